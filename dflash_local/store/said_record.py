"""Which ids the replies of this machine say: a file of counts for each vocabulary in the cache folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash_local.store.kept import keep, read_kept

MANY = 2**20  # ids said that a file counts; beyond them all counts are halved, so that the latest weigh more
MOST = 65_536  # ids of which a file has counts: those that are said most
AT_ONCE = 8192  # ids after which a file is written anew, which takes up to 0.1 s


class SaidRecord:
    """Keeps how often each id was said; nothing where ``folder`` is None. ``vocabulary`` names what ids stand for."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._fresh = Counter[int]()  # not written yet

    def read(self, vocabulary: str) -> list[int]:
        """Return the ids that were said, the most frequent one first, and the lowest of equally frequent ones."""
        counts = self._counts(vocabulary)
        return sorted(counts, key=lambda each: (-counts[each], each))

    def add(self, vocabulary: str, ids: Iterable[int]) -> None:
        """Count a reply in, to be written with others."""
        self._fresh.update(ids)
        if self._fresh.total() >= AT_ONCE:
            self.write(vocabulary)

    def write(self, vocabulary: str) -> None:
        """Write what was counted."""
        if self._folder is None or not self._fresh:
            return
        counts = self._counts(vocabulary) + self._fresh
        self._fresh.clear()
        while counts.total() > MANY:
            counts = Counter({each: count // 2 for each, count in counts.items() if count > 1})
        keep(self._path(self._folder, vocabulary), json.dumps(dict(counts.most_common(MOST))) + "\n")

    def _counts(self, vocabulary: str) -> Counter[int]:
        """Read a file; of one that is not as it should be nothing."""
        path = None if self._folder is None else self._path(self._folder, vocabulary)
        return Counter(read_kept(path, _counts_of) or {})

    @staticmethod
    def _path(folder: Path, vocabulary: str) -> Path:
        return folder / f"said-{vocabulary}.json"


def _counts_of(entries: Any) -> dict[int, int]:
    found = {int(each): count for each, count in entries.items()}
    if not all(each >= 0 and type(count) is int and 0 < count <= MANY for each, count in found.items()):
        raise ValueError("no counts of ids")
    return found
