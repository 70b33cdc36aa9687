"""A string that does not show its text: for passwords, keys, and settings whose names do not say whether they are secret."""

from __future__ import annotations

from collections.abc import Mapping


class Secret:
    """A string that does not show its text. `reveal()` returns it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret('***')"

    def __str__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return (Secret, (self._text,))


def revealed(secrets: Mapping[str, Secret]) -> dict[str, str]:
    """The texts in clear: pass them on, never log them."""
    return {name: secret.reveal() for name, secret in secrets.items()}
