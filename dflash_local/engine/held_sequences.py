"""Sequences that are not on the device now: copies in host memory or files, from which a conversation goes on later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from threading import Thread
from typing import Any

import psutil
import torch

from dflash_local.engine.packed_state import pack, unpack
from dflash_local.engine.runner import Snapshot
from dflash_local.kernels.allocate import on_host
from dflash_local.loaded import HeldCount, Place
from dflash_local.models.drafter_context import ContextCache
from dflash_local.models.transformers_target import KVCache
from dflash_local.shared_prefix import common_length
from dflash_local.store.sequence_files import SequenceFiles, StoredSequence

LEAST = 256  # tokens; a shorter sequence is run again as fast as it comes back
SHORT = 1024  # tokens; a shorter one makes room before any longer one
KEPT_SNAPSHOTS = 2  # of the sequence on the device that stay there
POINTS_SHARE = 4  # one of so many parts of the memory for sequences is what its other snapshots take at most
MISFITS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)  # raised by a file of another version


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
    def lengths(self) -> list[int]:
        """Return where it can be gone back to."""
        return [point.length for point in self.points]

    @property
    def nbytes(self) -> int:
        return held_bytes(self.state) + held_bytes(self.points)


class HeldSequences:
    """Those of a session, within a number of bytes: in host memory, then in files.

    Args:
        most_bytes: of host memory. drafters: see ``packed_state``; those of the moment.

    Attributes:
        held: those in host memory, the one that was used last at the end.
        files: where those go that there is no room for; None: nowhere.
    """

    def __init__(self, most_bytes: int, drafters: Callable[[], Sequence[Any]] = tuple) -> None:
        self.most_bytes, self._drafters = most_bytes, drafters
        self.files: SequenceFiles | None = None
        self.held: list[HeldSequence] = []
        self._writer: Thread | None = None

    @property
    def most_held(self) -> int:
        """Return the most bytes that a sequence may have."""
        return max(self.most_bytes, 0 if self.files is None else self.files.most_bytes)

    def take(self, ids: list[int], whole: bool, beyond: int) -> HeldSequence | None:
        """Return the sequence that keeps most of a prompt's tokens, and more than ``beyond``. One in memory is taken
        out where the prompt goes on from it, or from before its last reply; of one that only begins as the prompt does
        another prompt may be the next turn.

        Args:
            whole: the target can go back to a sequence's end or to a snapshot only.
        """
        self._await_writer()
        stored = [] if self.files is None else self.files.stored()
        free = psutil.virtual_memory().available // 2
        every: list[HeldSequence | StoredSequence] = [*self.held, *stored]
        found = [(_usable(each, ids, whole), each) for each in every]
        for length, best in sorted(found, key=lambda each: each[0], reverse=True):
            if length <= beyond:
                break
            if isinstance(best, HeldSequence):
                if length > len(best.ids) // 2:
                    self._drop(best)
                return best
            if length - beyond >= LEAST and best.nbytes <= free and (read := self._read(best)) is not None:
                return read
        return None

    def keep(self, held: HeldSequence) -> None:
        """Hold one more; beginnings of it are forgotten, and of the others as many as there is no room for."""
        self.held = [each for each in self.held if held.ids[: len(each.ids)] != each.ids]
        self.held.append(held)
        size = sum(each.nbytes for each in self.held)
        while self.held and size > self.most_bytes:
            over = next((each for each in self.held if len(each.ids) < SHORT), self.held[0])
            self._drop(over)
            self._write(over)
            size -= over.nbytes

    def counts(self) -> Iterator[HeldCount]:
        """Count those in memory and in files."""
        stored = [] if self.files is None else self.files.stored()
        places: dict[Place, Sequence[HeldSequence | StoredSequence]] = {"host": list(self.held), "disk": stored}
        for place, found in places.items():
            yield HeldCount(place, len(found), sum(len(each.ids) for each in found), sum(each.nbytes for each in found))

    def clear(self) -> None:
        """Forget those in memory."""
        self.held.clear()

    def save(self) -> None:
        """Move those in memory to files, where there are any, the one that was used last at first."""
        while self.held:
            self._write(self.held.pop())
        self._await_writer()

    def _drop(self, held: HeldSequence) -> None:
        self.held = [each for each in self.held if each is not held]

    def _write(self, held: HeldSequence) -> None:
        """Write a file while the next reply is made; one at a time, so that little is held beyond ``most_bytes``."""
        if self.files is None:
            return
        self._await_writer()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies to the host are awaited by nobody
        packed = pack((held.state, held.points), self._drafters())
        what = held.ids, held.lengths, packed.content, packed.body
        self._writer = Thread(target=self.files.write, args=what, name="dflash-sequence-writer")
        self._writer.start()

    def _await_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()
        self._writer = None

    def _read(self, stored: StoredSequence) -> HeldSequence | None:
        assert self.files is not None
        found = self.files.read(stored)
        if found is None:
            return None
        now, body = found
        try:
            state, points = unpack(now.content, body, self._drafters())
        except MISFITS:
            self.files.refuse(now)
            return None
        return HeldSequence(now.ids, state, points)


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


def _usable(held: HeldSequence | StoredSequence, ids: list[int], whole: bool) -> int:
    common = common_length(held.ids, ids)
    if common == len(held.ids) or not whole:
        return common
    return max((length for length in held.lengths if length <= common), default=0)


def thinned(points: Sequence[Snapshot], most_bytes: int) -> list[Snapshot]:
    """Return snapshots, the shortest first, of which all but the newest are copied to host memory. Of those that take
    more than so many bytes the ones go first that lie closest together.
    """
    older, newest = [hosted(each) for each in points[:-KEPT_SNAPSHOTS]], points[-KEPT_SNAPSHOTS:]
    sizes = [held_bytes(each) for each in older]
    while sum(sizes) > most_bytes:
        lengths = [0, *(each.length for each in older), newest[0].length]
        gaps = [after - before for before, after in zip(lengths, lengths[2:], strict=False)]
        closest = gaps.index(min(gaps))
        del older[closest], sizes[closest]
    return [*older, *newest]
