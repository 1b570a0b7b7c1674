"""What was learnt on this machine of how far confidences are right: one JSON file in the cache folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dflash_local.store.kept import keep, read_kept


class ConfidenceRecord:
    """Keeps what controllers of the verify length learn of a pair ``name``; nothing where ``folder`` is None."""

    def __init__(self, folder: Path | None, name: str = "") -> None:
        self._path, self._name = None if folder is None else folder / "confidences.json", name

    def read(self, greedy: bool) -> list[float]:
        """Read what was learnt; of numbers that are none, and of another file, nothing."""
        return read_kept(self._path, lambda entries: [float(each) for each in entries[self._key(greedy)]]) or []

    def keep(self, greedy: bool, learnt: Sequence[float]) -> None:
        """Keep what was learnt by now, in the place of what was before."""
        if self._path is not None:
            entries = read_kept(self._path, dict) or {}
            keep(self._path, json.dumps({**entries, self._key(greedy): learnt}) + "\n")

    def _key(self, greedy: bool) -> str:
        return f"{self._name}, {'greedy' if greedy else 'sampled'}"
