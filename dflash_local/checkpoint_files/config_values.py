"""Bounded readers for a checkpoint's config: no value of it reaches an allocation unchecked. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.errors import CheckpointError

SHOWN = 80  # characters of an offending value in a message


def shown(value: object) -> str:
    """Return a value for an error message, cut: a config may hold megabytes (and ints too long to print)."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


class UnknownValue(CheckpointError):
    """A required value is missing: a checkpoint is incomplete, or a shape of the registry is known in part."""

    def __init__(self, name: str, where: str) -> None:
        super().__init__(f"{where}: {name} is missing", "the checkpoint is incomplete; pull it again")
        self.name = name

    @property
    def kind(self) -> str:
        return CheckpointError.__name__


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """One JSON object of a config, or several merged, read key by key with bounds; ``where`` names it in errors."""

    values: Mapping[str, Any]
    where: str

    def present(self, key: str) -> bool:
        """Return True when the key is there and not null."""
        return self.values.get(key) is not None

    def missing(self, key: str) -> UnknownValue:
        """Return the error for a required key that is absent or null."""
        return UnknownValue(key, self.where)

    def required(self, key: str) -> Any:
        """Return the value of a key; UnknownValue when it is absent or null."""
        value = self.values.get(key)
        if value is None:
            raise self.missing(key)
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        """Return a required whole number in ``low..high``."""
        return self.check_integer(key, self.required(key), low, high)

    def check_integer(self, key: str, value: object, low: int, high: int) -> int:
        """Return ``value`` as an int. Raise CheckpointError where it is no whole number in ``low..high``; names
        ``key``.
        """
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.where}: {key} must be a whole number, got {shown(value)}")
        if not low <= value <= high:
            raise CheckpointError(f"{self.where}: {key} {shown(value)} is outside {low}..{high}")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """Return as ``integer`` does, but None when the key is absent or null."""
        return self.integer(key, low, high) if self.present(key) else None

    def number(self, key: str, low: float, high: float) -> float:
        """Return a required finite number in ``low..high``."""
        value = self.required(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{self.where}: {key} must be a number, got {shown(value)}")
        if not low <= value <= high or not math.isfinite(value):
            raise CheckpointError(f"{self.where}: {key} {shown(value)} is outside {low:g}..{high:g}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """Return as ``number`` does, but None when the key is absent or null."""
        return self.number(key, low, high) if self.present(key) else None

    def word(self, key: str, known: Sequence[str]) -> str:
        """Return a required word, one of ``known``."""
        value = self.required(key)
        if not isinstance(value, str) or value not in known:
            wrong = f"{self.where}: {key} {shown(value)} is not supported"
            raise CheckpointError(wrong, f"supported: {', '.join(known)}")
        return value

    def optional_text(self, key: str) -> str:
        """Return a text, empty when the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {key} must be text, got {shown(value)}")
        return value or ""

    def optional_flag(self, key: str) -> bool | None:
        """Return true, False, or None when the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} must be true or false, got {shown(value)}")
        return value

    def optional_list(self, key: str, longest: int) -> list[Any] | None:
        """Return a list of at most ``longest`` entries, or None when the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise CheckpointError(f"{self.where}: {key} must be a list, got {shown(value)}")
        if len(value) > longest:
            raise CheckpointError(f"{self.where}: {key} has {len(value)} entries, at most {longest} are allowed")
        return value

    def optional_names(self, key: str, longest: int) -> list[str] | None:
        """Return as ``optional_list`` does, of words only."""
        names = self.optional_list(key, longest)
        if names is not None and not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{self.where}: {key} must be names, got {shown(names)}")
        return names

    def inner(self, key: str) -> dict[str, Any]:
        """Return a nested object, empty when the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {key} must be an object, got {shown(value)}")
        return value

    def fields(self, key: str) -> ConfigFields:
        """Return what ``inner`` does as fields."""
        return ConfigFields(self.inner(key), f"{self.where}: {key}")


def fill(config: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return a configuration whose nulls have the values of its ``_inferred`` (dotted: in nested objects), and their
    keys.
    """
    known = dict(config)
    inferred = known.pop("_inferred", None)
    keys: set[str] = set()
    for name, value in inferred.items() if isinstance(inferred, Mapping) else ():
        outer, _, key = name.rpartition(".")
        place = known.get(outer) if outer else known
        if isinstance(place, Mapping) and place.get(key) is None:
            keys.add(key)
            known |= {outer: {**place, key: value}} if outer else {key: value}
    return known, frozenset(keys)


class Values:
    """Checked values of ``text_config.text_values``. ``inferred``: names of those that no source quotes."""

    def __init__(self, values: Mapping[str, Any], source: str, inferred: frozenset[str] = frozenset()) -> None:
        self.values = values
        self.source = source
        self._inferred = inferred
        self._used: set[str] = set()

    @property
    def inferred(self) -> tuple[str, ...]:
        """Return names of inferred values that were used."""
        return tuple(sorted(self._used))

    def get(self, name: str, default: Any = None) -> Any:
        found = self.values.get(name)
        if found is None:
            return default
        if name in self._inferred:
            self._used.add(name)
        return found

    def needed(self, name: str) -> int:
        """Return a whole number. Raises UnknownValue."""
        found = self.get(name)
        if found is None:
            raise UnknownValue(name, self.source)
        return int(found)
