"""Likely values in place of nulls, as the registry's copies of configurations hold them under ``_inferred``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def fill(config: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """A configuration with its likely values, and the keys that hold one; dotted names reach into nested objects."""
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
