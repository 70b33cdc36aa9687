"""SASLprep (RFC 4013) as Postgres does it, which is not quite as the RFC says.

ASCII stays as it is, control characters included. A character that the RFC forbids is no error: the password is then taken
unchanged. And forbidden characters are looked for before normalizing, not after. The server's verifier is made in the same way,
so a client that is stricter or laxer cannot log in with some passwords.
"""

from __future__ import annotations

import stringprep
import unicodedata

_FORBIDDEN = (
    stringprep.in_table_a1,
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


def saslprep(password: str) -> str:
    if password.isascii():
        return password
    mapped = "".join(
        " " if stringprep.in_table_c12(character) else character
        for character in password
        if stringprep.in_table_c12(character) or not stringprep.in_table_b1(character)
    )
    if not mapped or any(forbids(character) for character in mapped for forbids in _FORBIDDEN):
        return password
    if any(map(stringprep.in_table_d1, mapped)) and not (
        stringprep.in_table_d1(mapped[0])
        and stringprep.in_table_d1(mapped[-1])
        and not any(map(stringprep.in_table_d2, mapped))
    ):
        return password
    return unicodedata.normalize("NFKC", mapped)


class PreparedPassword:
    """In place of scramp's own, which needs nothing but the bytes."""

    __slots__ = ("_bytes",)

    def __init__(self, password: str) -> None:
        self._bytes = saslprep(password).encode()

    def __bytes__(self) -> bytes:
        return self._bytes
