"""The values of a configuration, some of them perhaps null: looked up by name, inferred ones noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_local.checkpoint_files.config_values import UnknownValue


def fill(config: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """A configuration whose nulls have the values of its ``_inferred`` (dotted: in nested objects), and their keys."""
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
        """Names of inferred values that were used."""
        return tuple(sorted(self._used))

    def get(self, name: str, default: Any = None) -> Any:
        found = self.values.get(name)
        if found is None:
            return default
        if name in self._inferred:
            self._used.add(name)
        return found

    def needed(self, name: str) -> int:
        """A whole number. Raises UnknownValue."""
        found = self.get(name)
        if found is None:
            raise UnknownValue(name, self.source)
        return int(found)
