"""From mappings of a file to dataclasses, by the type hints of their fields: strict keys and types, nothing converted.

A field may be a text, a flag, a number with its ``Between``, a ``Literal``, a tuple, a dict or another dataclass;
``Annotated`` rules check or replace a value and raise ``UsageError``. A key that is null is one that is not there.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, cast, get_args, get_origin, get_type_hints

from dflash_local.catalog.yaml_file import FIX, Section, Unquoted, kind_of
from dflash_local.errors import SettingsError, UsageError
from dflash_local.terminal import safe_line

NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,19})?")
MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Between:
    """The range of a number, both ends included."""

    low: float
    high: float


class At(NamedTuple):
    """Where a value stands, for errors: ``place`` is file and line, ``name`` the row and the key."""

    place: str
    name: str

    def key(self, section: Section, key: str) -> At:
        return At(section.places[key], f"{self.name}{'.' if ': ' in self.name else ': '}{key}")

    def fail(self, message: str, hint: str = FIX) -> NoReturn:
        """Raise the one kind of error a file can have."""
        raise SettingsError(safe_line(f"{self.place}: {self.name}: {message}"), safe_line(hint))


def shown(value: object) -> str:
    """A value of the file as errors quote it: escaped and short."""
    if not isinstance(value, str):
        return kind_of(value)
    return repr(str(value)) if len(value) <= MAX_SHOWN else repr(f"{value[:MAX_SHOWN]}...")


class Key(NamedTuple):
    """A key that a section may have, and what its value must be."""

    type: Any
    required: bool


@lru_cache(maxsize=64)
def keys_of(kind: Any) -> Mapping[str, Key]:
    """The keys of a dataclass's section, in the order of its fields."""

    def required(field: Field[Any]) -> bool:
        return field.default is MISSING and field.default_factory is MISSING

    hints = get_type_hints(kind, include_extras=True)
    return {field.name: Key(hints[field.name], required(field)) for field in fields(kind)}


def read_keys(keys: Mapping[str, Key], section: Any, at: At) -> dict[str, Any]:
    """The values of a section by key, null ones left out. SettingsError: a wrong type, an unknown or a missing key."""
    if not isinstance(section, Section):
        at.fail(f"expected a mapping, got {kind_of(section)}")
    for key in section:
        if key not in keys:
            At(section.places[key], at.name).fail(f"unknown key {shown(key)}", _suggestion(key, keys))
    found = {
        key: read(keys[key].type, value, at.key(section, key)) for key, value in section.items() if value is not None
    }
    for name, known in keys.items():
        if known.required and name not in found:
            at.fail(f"key {name!r} is missing")
    return found


def read(kind: Any, value: Any, at: At) -> Any:
    """``value`` as the type ``kind``. SettingsError: it is something else, or not allowed."""
    if kind is str:
        return _text(value, at)
    origin, inner = _parts(kind)
    if origin is Annotated:
        for rule in inner[1:]:
            if isinstance(rule, Between):
                return _number(inner[0], rule, value, at)
        value = read(inner[0], value, at)
        try:
            for rule in inner[1:]:
                value = rule(value)
        except UsageError as error:
            at.fail(error.message, error.hint)
        return value
    if origin is Union or origin is types.UnionType:
        return None if value is None else read(next(one for one in inner if one is not type(None)), value, at)
    if origin is Literal:
        if value not in inner:  # "off" is a word here, whatever YAML makes of it
            close = difflib.get_close_matches(str(value), inner, n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            at.fail(f"{shown(value)} is not allowed", f"{meant}allowed: {', '.join(inner)}")
        return str(value)
    if origin is tuple:
        if not isinstance(value, list):
            at.fail(f"expected a list, got {kind_of(value)}")
        places = [At(item.place, at.name) if isinstance(item, Section) else at for item in value]
        return tuple(read(inner[0], item, place) for item, place in zip(value, places))
    if origin is dict:
        if not isinstance(value, Section):
            at.fail(f"expected a mapping, got {kind_of(value)}")
        named = str in get_args(inner[0])
        keyed = {key: at.key(value, key) for key in value}
        names = {key: read(inner[0], key if named else Unquoted(key), keyed[key]) for key in value}
        return {names[key]: read(inner[1], item, keyed[key]) for key, item in value.items()}
    if kind is Any:
        return value
    if is_dataclass(kind):
        return cast(Any, kind)(**read_keys(keys_of(cast(Any, kind)), value, at))
    if kind is bool:
        if not isinstance(value, Unquoted) or value not in ("true", "false"):
            at.fail(f"{shown(value)} is not allowed", "allowed: true, false, null")
        return value == "true"
    raise TypeError(f"no reader for {kind}")


@lru_cache(maxsize=256)
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _text(value: Any, at: At) -> str:
    """On one line, control characters shown as signs."""
    if not isinstance(value, str):
        at.fail(f"expected a single value, got {kind_of(value)}")
    if isinstance(value, Unquoted):
        at.fail(f"a text is expected, but YAML reads {shown(value)} as something else", f'quote it: "{value}"')
    value = value.strip()
    return value if value.isprintable() else safe_line(value)


def _number(kind: Any, between: Between, value: Any, at: At) -> float:
    """In plain digits, so that no two readers of YAML differ in it."""
    low, high = between.low, between.high
    digits = NUMBER.fullmatch(value) if isinstance(value, Unquoted) else None
    if digits is None or (kind is int and digits[2]) or not low <= float(value) <= high:
        what = f"a whole number from {low} to {high}" if kind is int else f"a number from {low:g} to {high:g}"
        text = isinstance(value, str) and not isinstance(value, Unquoted)
        at.fail(f"{shown(value)}{' (a text)' if text else ''} is not allowed", f"allowed: {what}, or null")
    number: float = kind(value)
    return number


def _suggestion(key: str, keys: Mapping[str, Key]) -> str:
    """The hint for an unknown key: the nearest one of here or of a section within, or all of here."""
    within = {name: place for place, one in keys.items() for name in _keys_within(one.type)}
    for pool in (list(keys), list(within)):
        close = difflib.get_close_matches(key, pool, n=1, cutoff=0.7)
        if close:
            place = "" if close[0] in keys else f" of {within[close[0]]}"
            return f"did you mean {close[0]!r}{place}?"
    return f"allowed: {', '.join(keys)}"


def _keys_within(kind: Any) -> list[str]:
    if is_dataclass(kind):
        keys = keys_of(cast(Any, kind))
        return [*keys, *(name for key in keys.values() for name in _keys_within(key.type))]
    return [name for inner in get_args(kind) for name in _keys_within(inner)]
