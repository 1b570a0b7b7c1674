"""Texts that a target wrote, one behind the other, as a drafter is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPEAT = 32  # tokens that come again end a reply


def repeat_start(ids: Sequence[int]) -> int:
    """Where ``REPEAT`` tokens begin that stood before; the length where none do. The repeat is no part of a reply."""
    seen: set[tuple[int, ...]] = set()
    for at in range(len(ids) - REPEAT + 1):
        run = tuple(ids[at : at + REPEAT])
        if run in seen:
            return at
        seen.add(run)
    return len(ids)


@dataclass(frozen=True, slots=True)
class Dialogues:
    """Texts one behind the other: ids and the target's likeliest ids [tokens], and of each text [n] its length and
    where the answer starts.
    """

    ids: np.ndarray
    best: np.ndarray
    length: np.ndarray
    answer: np.ndarray

    @property
    def answer_tokens(self) -> int:
        return int((self.length - self.answer).sum())

    def save(self, file: Path) -> None:
        np.savez(file, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, file: Path) -> Dialogues:
        with np.load(file) as found:
            return cls(**{name: found[name] for name in cls.__slots__})
