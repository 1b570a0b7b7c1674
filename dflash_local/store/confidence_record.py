"""What was learnt on this machine of how far confidences are right: one JSON file in the cache folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dflash_local.store.kept import keep, read_kept


class ConfidenceRecord:
    """Keeps what controllers of the verify length learn of a pair ``name``; nothing where ``folder`` is None."""

    def __init__(self, folder: Path | None, name: str = "") -> None:
        self._path, self._name = None if folder is None else folder / "confidences.json", name

    def read(self, greedy: bool) -> dict[str, list[float]]:
        """Read what was learnt; of numbers that are none, and of another file, nothing."""
        return read_kept(self._path, lambda entries: _numbers(entries[self._key(greedy)])) or {}

    def keep(self, greedy: bool, learnt: Mapping[str, list[float]]) -> None:
        """Keep what was learnt by now, in the place of what was before; what this load had not stays."""
        if self._path is not None:
            entries = read_kept(self._path, dict) or {}
            with suppress(ValueError, TypeError, AttributeError):
                learnt = {**_numbers(entries.get(self._key(greedy), {})), **learnt}
            keep(self._path, json.dumps({**entries, self._key(greedy): learnt}) + "\n")

    def _key(self, greedy: bool) -> str:
        return f"{self._name}, {'greedy' if greedy else 'sampled'}"


def _numbers(entry: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: [float(each) for each in learnt] for name, learnt in entry.items()}
