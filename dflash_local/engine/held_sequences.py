"""Sequences that are not on the device now: copies in host memory, from which a conversation goes on later."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch

from dflash_local.engine.runner import Snapshot
from dflash_local.kernels.allocate import on_host
from dflash_local.models.drafter_context import ContextCache
from dflash_local.models.transformers_target import KVCache
from dflash_local.shared_prefix import common_length

LEAST = 256  # tokens; a shorter sequence is run again as fast as it comes back
SHORT = 1024  # tokens; a shorter one makes room before any longer one


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A sequence with all that its runner and its session need to go on.

    Attributes:
        ids: committed ones. state: of the runner that made it. points: its snapshots, the shortest first.
    """

    ids: list[int]
    state: Any
    points: tuple[Snapshot, ...]

    @property
    def nbytes(self) -> int:
        return held_bytes(self.state) + held_bytes(self.points)


class Match(NamedTuple):
    """How a held sequence serves a prompt: with so many of its tokens."""

    held: HeldSequence
    length: int


class HeldSequences:
    """Those of a session, the one that was used last at the end, within a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._held: list[HeldSequence] = []

    def find(self, ids: list[int], whole: bool) -> Match | None:
        """Return the sequence that keeps most of a prompt's tokens.

        Args:
            whole: the target can go back to a sequence's end or to a snapshot only.
        """
        found = [Match(held, _usable(held, ids, whole)) for held in self._held]
        return max(found, key=lambda each: each.length, default=None)

    def take(self, held: HeldSequence) -> None:
        """Take one out, as it goes back to the device."""
        self._held = [each for each in self._held if each is not held]

    def keep(self, held: HeldSequence) -> None:
        """Hold one more; beginnings of it are forgotten, and of the others as many as there is no room for."""
        self._held = [each for each in self._held if held.ids[: len(each.ids)] != each.ids]
        self._held.append(held)
        size = sum(each.nbytes for each in self._held)
        while size > self.most_bytes:
            over = next((each for each in self._held if len(each.ids) < SHORT), self._held[0])
            self.take(over)
            size -= over.nbytes

    def clear(self) -> None:
        self._held.clear()


def hosted(value: Any) -> Any:
    """Return tuples, lists and dataclasses with copies on the host in the place of all tensors in them."""
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else on_host(value)
    if isinstance(value, (tuple, list)):
        return type(value)(hosted(each) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: hosted(getattr(value, each.name)) for each in fields(value)})
    return value


def held_bytes(value: Any) -> int:
    """Sum the bytes of all tensors and caches in tuples, lists and dataclasses."""
    if isinstance(value, (torch.Tensor, KVCache, ContextCache)):
        return value.nbytes
    if isinstance(value, (tuple, list)):
        return sum(map(held_bytes, value))
    if is_dataclass(value):
        return sum(held_bytes(getattr(value, each.name)) for each in fields(value))
    return 0


def _usable(held: HeldSequence, ids: list[int], whole: bool) -> int:
    common = common_length(held.ids, ids)
    if common == len(held.ids) or not whole:
        return common
    return max((point.length for point in held.points if point.length <= common), default=0)
