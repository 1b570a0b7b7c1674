"""Windows of one length, each with several dialogues behind one another, drawn for as long as they are wanted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dflash_local.adapt.dialogues import Dialogues

AHEAD = 8  # batches made before they are asked for


@dataclass(frozen=True, slots=True)
class Windows:
    """All [b, s]: ids, the target's likeliest ids, places in their texts, which text, whether the target wrote the id
    in its answer, and where the id stands in ``Dialogues.ids``.
    """

    ids: torch.Tensor
    best: torch.Tensor
    places: torch.Tensor
    texts: torch.Tensor
    own: torch.Tensor
    at: torch.Tensor

    @classmethod
    def empty(cls, rows: int, length: int) -> Windows:
        """Return windows of nothing in particular."""
        ids, own = torch.empty(rows, length, dtype=torch.long), torch.empty(rows, length, dtype=torch.bool)
        return cls(ids, ids, ids, ids, own, ids)

    def to(self, device: torch.device) -> Windows:
        return Windows(*(getattr(self, name).to(device, non_blocking=True) for name in self.__slots__))

    def rows(self, part: slice) -> Windows:
        """Return some of them."""
        return Windows(*(getattr(self, name)[part] for name in self.__slots__))


def pack(dialogues: Dialogues, rows: int, length: int, seed: int) -> Iterator[tuple[float, Windows]]:
    """Endless batches of ``rows`` windows, and how often all dialogues have been gone through; each window's last
    dialogue is cut at its end.
    """
    draw = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(dialogues.length.astype(np.int64))[:-1]])
    order, at, passes = draw.permutation(len(starts)), 0, 0
    while True:
        where, places, texts, own = (np.zeros((rows, length), kind) for kind in (np.int64, np.int64, np.int64, bool))
        for row in range(rows):
            filled = text = 0
            while filled < length:
                if at == len(order):
                    order, at, passes = draw.permutation(len(starts)), 0, passes + 1
                chosen = order[at]
                at += 1
                size = min(int(dialogues.length[chosen]), length - filled)
                part = slice(filled, filled + size)
                where[row, part] = np.arange(starts[chosen], starts[chosen] + size)
                places[row, part], texts[row, part] = np.arange(size), text
                own[row, filled + int(dialogues.answer[chosen]) : filled + size] = True
                filled, text = filled + size, text + 1
        ids, best = (column[where].astype(np.int64) for column in (dialogues.ids, dialogues.best))
        found = Windows(*(torch.from_numpy(each) for each in (ids, best, places, texts, own, where)))
        yield passes + at / len(order), found


def ahead(batches: Iterator[tuple[float, Windows]], pinned: bool) -> Iterator[tuple[float, Windows]]:
    """The same, made in a thread while the device works; ``pinned`` memory is copied to it without waiting."""
    made: queue.Queue[tuple[float, Windows]] = queue.Queue(AHEAD)

    def fill() -> None:
        for passes, batch in batches:
            if pinned:
                batch = Windows(*(getattr(batch, name).pin_memory() for name in batch.__slots__))
            made.put((passes, batch))

    threading.Thread(target=fill, daemon=True).start()
    while True:
        yield made.get()
