"""Bounded readers for a checkpoint's config: no value of it reaches an allocation unchecked. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.errors import CheckpointError

SHOWN = 80  # characters of an offending value in a message


def shown(value: object) -> str:
    """A value for an error message, cut: a config may hold megabytes (and ints too long to print)."""
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
class Fields:
    """One JSON object of a config, or several merged, read key by key with bounds; ``where`` names it in errors."""

    values: Mapping[str, Any]
    where: str

    def present(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self.values.get(key) is not None

    def missing(self, key: str) -> UnknownValue:
        """The error for a required key that is absent or null."""
        return UnknownValue(key, self.where)

    def required(self, key: str) -> Any:
        """The value of a key; UnknownValue when it is absent or null."""
        value = self.values.get(key)
        if value is None:
            raise self.missing(key)
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        """A required whole number in ``low..high``."""
        return self.check_integer(key, self.required(key), low, high)

    def check_integer(self, key: str, value: object, low: int, high: int) -> int:
        """``value`` if it is a whole number in ``low..high``, else an error naming ``key``."""
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.where}: {key} must be a whole number, got {shown(value)}")
        if not low <= value <= high:
            raise CheckpointError(f"{self.where}: {key} {shown(value)} is outside {low}..{high}")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """Like ``integer``, but None when the key is absent or null."""
        return self.integer(key, low, high) if self.present(key) else None

    def number(self, key: str, low: float, high: float) -> float:
        """A required finite number in ``low..high``."""
        value = self.required(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{self.where}: {key} must be a number, got {shown(value)}")
        if not low <= value <= high or not math.isfinite(value):
            raise CheckpointError(f"{self.where}: {key} {shown(value)} is outside {low:g}..{high:g}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """Like ``number``, but None when the key is absent or null."""
        return self.number(key, low, high) if self.present(key) else None

    def word(self, key: str, known: Sequence[str]) -> str:
        """A required word, one of ``known``."""
        value = self.required(key)
        if not isinstance(value, str) or value not in known:
            wrong = f"{self.where}: {key} {shown(value)} is not supported"
            raise CheckpointError(wrong, f"supported: {', '.join(known)}")
        return value

    def optional_text(self, key: str) -> str:
        """A text, empty when the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {key} must be text, got {shown(value)}")
        return value or ""

    def optional_flag(self, key: str) -> bool | None:
        """True, False, or None when the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} must be true or false, got {shown(value)}")
        return value

    def optional_list(self, key: str, longest: int) -> list[Any] | None:
        """A list of at most ``longest`` entries, or None when the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise CheckpointError(f"{self.where}: {key} must be a list, got {shown(value)}")
        if len(value) > longest:
            raise CheckpointError(f"{self.where}: {key} has {len(value)} entries, at most {longest} are allowed")
        return value

    def optional_names(self, key: str, longest: int) -> list[str] | None:
        """Like ``optional_list``, of words only."""
        names = self.optional_list(key, longest)
        if names is not None and not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{self.where}: {key} must be names, got {shown(names)}")
        return names

    def inner(self, key: str) -> dict[str, Any]:
        """A nested object, empty when the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {key} must be an object, got {shown(value)}")
        return value

    def fields(self, key: str) -> Fields:
        """As ``inner``, to be read like this."""
        return Fields(self.inner(key), f"{self.where}: {key}")
