"""What a setting may be: the one marker that a field carries, and the checks that follow from it.

A field of a settings class is `Annotated[type, Setting("what it is for", above=0)]`. Reading TOML, checking objects
made in Python and the reference in docs/configuration.md all read these markers, so they cannot disagree. Every mistake
becomes a `Mistake`; nothing here raises at the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from headwater.errors import ConfigError
from headwater.secret import Secret


@dataclass(frozen=True, slots=True)
class Setting:
    """What a setting is for, and its range."""

    doc: str
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    not_empty: bool = False
    path: bool = False
    """A path, or an address with a scheme; a relative path is relative to the file it is written in."""

    def range(self) -> str:
        """The range in words; empty if there is none."""
        parts = (("above", self.above), ("at least", self.at_least), ("at most", self.at_most), ("below", self.below))
        words = [f"{word} {limit}" for word, limit in parts if limit is not None]
        return " and ".join(words) or ("not empty" if self.not_empty else "")

    def allows(self, value: object) -> bool:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (
                (self.above is None or value > self.above)
                and (self.at_least is None or value >= self.at_least)
                and (self.at_most is None or value <= self.at_most)
                and (self.below is None or value < self.below)
            )
        return not self.not_empty or bool(value.reveal() if isinstance(value, Secret) else value)


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing wrong with the settings, at its dotted key."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


class Problem(Exception):
    """Why one value is not valid; becomes the text of a Mistake."""


Check = Callable[[Any], Iterator[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class SettingField:
    """One field of a settings class, with what its annotations say."""

    name: str
    type: Any
    """Without Annotated and without `| None`."""
    optional: bool
    rule: Setting
    default: Any
    """MISSING where the setting is required."""

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def nested(self) -> bool:
        return is_dataclass(self.type)

    @property
    def mapping(self) -> bool:
        return get_origin(self.type) is Mapping

    @property
    def tuple_of_strings(self) -> bool:
        return get_origin(self.type) is tuple

    def expected(self) -> str:
        """The type, in the words of an error message."""
        if isinstance(self.type, type) and issubclass(self.type, StrEnum):
            return "one of " + ", ".join(f'"{member.value}"' for member in self.type)
        if self.nested or self.mapping:
            return "a table"
        if self.tuple_of_strings:
            return "a list of strings"
        return _WORDS[self.type]


_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    Secret: "a string",
}


def setting_fields(cls: type) -> tuple[SettingField, ...]:
    """The fields of a settings class, in their order."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(_setting_field(field, hints[field.name]) for field in fields(cls))


def _setting_field(field: Field[Any], hint: Any) -> SettingField:
    assert get_origin(hint) is Annotated, f"{field.name} carries no Setting"
    inner, rule = get_args(hint)
    optional = False
    if get_origin(inner) in (Union, UnionType):
        members = [member for member in get_args(inner) if member is not NoneType]
        optional, inner = True, members[0]
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return SettingField(field.name, inner, optional, rule, default)


def convert(field: SettingField, value: object) -> Any:
    """The value as the field's type, or a Problem. Strings become enums and secrets, integers become floats."""
    if field.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(field.type, type) and issubclass(field.type, StrEnum) and isinstance(value, str):
        if value not in {member.value for member in field.type}:
            raise Problem(f'expected {field.expected()}, found "{value}"')
        return field.type(value)
    if field.type is Secret and isinstance(value, str):
        value = Secret(value)
    if field.tuple_of_strings and isinstance(value, list | tuple):
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        raise Problem("expected a list of strings, found a list with something else in it")
    if field.mapping and isinstance(value, Mapping):
        value = {name: text_of(item) for name, item in value.items()}
    plain = Mapping if field.mapping else field.type
    # bool is an int to Python, but not to the author of the settings.
    if not isinstance(value, plain) or (isinstance(value, bool) and field.type is not bool):
        raise Problem(f"expected {field.expected()}, found {_found(field, value)}")
    if not field.rule.allows(value):
        raise Problem(f"must be {field.rule.range()}" + ("" if field.type is Secret else f", found {_shown(value)}"))
    return value


def text_of(item: object) -> Secret:
    """A value of a free table; numbers and booleans are written as Spark and Iceberg spell them."""
    if isinstance(item, Secret):
        return item
    if not isinstance(item, str | int | float):
        raise Problem("expected a string, a number, true or false")
    return Secret(str(item).lower() if isinstance(item, bool) else str(item))


def _found(field: SettingField, value: object) -> str:
    kind = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list"}
    word = next((word for type, word in kind.items() if isinstance(value, type)), "a table")
    # A value in the place of a secret may be a secret, whatever its type.
    if field.type is Secret or not isinstance(value, bool | int | float | str):
        return word
    return f"{word}: {_shown(value)}"


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


class Checked:
    """Base of settings classes: `validate()` for those made in Python, and room for rules over several fields."""

    __slots__ = ()
    what: ClassVar[str] = "settings"

    def __post_init__(self) -> None:
        """Converts values as they are converted from a file: a password given as a plain string would be shown, and a mode given
        as a string would not equal the mode. A value that is not valid is kept, for `validate` to report."""
        for field in setting_fields(type(self)):
            value = getattr(self, field.name)
            if value is not None and not field.nested:
                with suppress(Problem):
                    object.__setattr__(self, field.name, convert(field, value))

    def conflicts(self) -> Iterator[Mistake]:
        """Mistakes that only show when several fields are seen together. Called when each field by itself is right."""
        return iter(())

    def mistakes(self, prefix: str = "") -> list[Mistake]:
        """Everything wrong with this object and those inside it."""
        found: list[Mistake] = []
        for field in setting_fields(type(self)):
            value = getattr(self, field.name)
            if value is None and field.optional:
                continue
            if field.nested and isinstance(value, Checked):
                found += value.mistakes(f"{prefix}{field.name}.")
                continue
            try:
                convert(field, value)
            except Problem as problem:
                found.append(Mistake(prefix + field.name, str(problem)))
        if not found:
            found += [Mistake(prefix + mistake.key, mistake.text) for mistake in self.conflicts()]
        return found

    def validate(self) -> None:
        """Raise one ConfigError with every mistake, or return."""
        raise_mistakes(self.what, self.mistakes())


def raise_mistakes(what: str, mistakes: list[Mistake]) -> None:
    if mistakes:
        count = "a mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        raise ConfigError(
            f"{what} has {count}" if not what.endswith("settings") else f"{what} have {count}",
            detail="\n".join(str(mistake) for mistake in mistakes),
            hint="Correct every line above; docs/configuration.md lists all settings with their ranges.",
        )
