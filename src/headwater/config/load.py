"""Settings from TOML: every mistake of the file is found before the first is reported.

The pipeline's settings are at the top of the file, followed by `[destination]`, `[store]` and `[spark]`. A string
may be given as `{ env = "NAME" }` or `{ file = "path" }`; what is read that way never appears in a message.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.config.pipeline import PipelineConfig
from headwater.config.settings import Settings
from headwater.errors import ConfigError
from headwater.secret import Secret
from headwater.setting_rules import (
    Checked,
    Mistake,
    Problem,
    SettingField,
    convert,
    raise_mistakes,
    setting_fields,
    text_of,
)
from headwater.wire.pem import is_pem

_SECTIONS = tuple(one for one in setting_fields(Settings) if one.name != "pipeline")
_INDIRECT = frozenset({"env", "file"})


def load_settings(source: Path | str, environ: Mapping[str, str] | None = None) -> Settings:
    """Read settings from a file (a Path) or from TOML text (a str); relative paths are relative to the file.

    Raises one ConfigError whose detail has a line for each mistake.
    """
    environ = os.environ if environ is None else environ
    text, name, base = _read(source)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{name} is not valid TOML", detail=str(error), hint="Correct that line; strings need quotes."
        ) from None
    reader = _Reader(environ, base)
    sections = {one.name for one in _SECTIONS}
    top = {key: value for key, value in document.items() if key not in sections}
    pipeline = reader.table(PipelineConfig, top, "", also_known=sections)
    values = {"pipeline": pipeline} | reader.fields(_SECTIONS, document, "")
    raise_mistakes(name, reader.mistakes)
    return Settings(**values)


def _read(source: Path | str) -> tuple[str, str, Path]:
    if isinstance(source, str):
        return source, "the settings", Path.cwd()
    try:
        return source.read_text(encoding="utf-8"), source.name, source.resolve().parent
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"the settings file {source} cannot be read",
            detail=str(reason),
            hint="Give the path of a TOML file; docs/configuration.md has an example to start from.",
        ) from None


@dataclass
class _Reader:
    """Goes through a document along the fields of the settings classes and collects the mistakes."""

    environ: Mapping[str, str]
    base: Path
    mistakes: list[Mistake] = field(default_factory=list)

    def table(self, cls: type, value: Mapping[str, Any], prefix: str, also_known: set[str] | None = None) -> Any:
        """An object of `cls`, or None if anything in the table was wrong."""
        before = len(self.mistakes)
        fields = setting_fields(cls)
        self._refuse_unknown(value, {one.name for one in fields} | (also_known or set()), prefix)
        values = self.fields(fields, value, prefix)
        if len(self.mistakes) > before:
            return None
        made = cls(**values)
        if isinstance(made, Checked):
            self.mistakes += [Mistake(prefix + mistake.key, mistake.text) for mistake in made.conflicts()]
        return made

    def fields(self, fields: tuple[SettingField, ...], value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for one in fields:
            key = prefix + one.name
            try:
                if one.name in value:
                    values[one.name] = self._value(one, value[one.name], key)
                elif one.required and one.nested:
                    # An empty table reports each missing setting by its name.
                    values[one.name] = self.table(one.type, {}, f"{key}.")
                elif one.required:
                    raise Problem(f"missing; expected {one.expected()}")
            except Problem as problem:
                self.mistakes.append(Mistake(key, str(problem)))
        return values

    def _value(self, one: SettingField, value: Any, key: str) -> Any:
        if one.optional and one.nested and value is False:
            return None
        if one.nested:
            if not isinstance(value, dict):
                raise Problem(f"expected a table, written [{key}], found something else")
            return self.table(one.type, value, f"{key}.")
        if one.mapping:
            if not isinstance(value, dict):
                raise Problem(f"expected a table, written [{key}], found something else")
            return self._mapping(value, key)
        if isinstance(value, dict) and value.keys() <= _INDIRECT and one.type in (str, Secret):
            value = self._indirect(value)
        if one.optional and one.type is str and value == "":
            return None
        return self._placed(one, convert(one, value))

    def _mapping(self, value: Mapping[str, Any], prefix: str) -> dict[str, Secret]:
        """A free table of strings, in which every mistake is reported by its name."""
        made: dict[str, Secret] = {}
        for name, item in value.items():
            key = f'{prefix}."{name}"'
            try:
                if isinstance(item, dict) and item.keys() <= _INDIRECT:
                    item = self._indirect(item)
                if isinstance(item, dict):
                    raise Problem(f'expected a string, found a table; quote a name with dots: "{name}.x"')
                made[name] = text_of(item)
            except Problem as problem:
                self.mistakes.append(Mistake(key, str(problem)))
        return made

    def _indirect(self, value: Mapping[str, Any]) -> str:
        if len(value) != 1 or not all(isinstance(item, str) for item in value.values()):
            raise Problem('expected { env = "NAME" } or { file = "path" }')
        kind, name = next((kind, str(name)) for kind, name in value.items())
        if kind == "env":
            if name not in self.environ:
                raise Problem(f"the environment variable {name} is not set; set it in the environment of headwater")
            return str(self.environ[name])
        try:
            return (self.base / name).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise Problem(f'the file "{name}" cannot be read: {reason}') from None

    def _placed(self, one: SettingField, value: Any) -> Any:
        """A relative path made absolute, so that it means the same wherever the program is started."""
        if isinstance(value, Secret):
            return Secret(self._placed(one, value.reveal()))
        if not one.rule.path or "://" in value or is_pem(value):
            return value
        return os.path.normpath(self.base / Path(value).expanduser())

    def _refuse_unknown(self, value: Mapping[str, Any], known: set[str], prefix: str) -> None:
        for name in value:
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
                hint = f'; did you mean "{near[0]}"?' if near else f"; known here: {', '.join(sorted(known))}"
                self.mistakes.append(Mistake(prefix + name, f"unknown setting{hint}"))
