"""The conversation on the device and those that wait: which of a prompt's tokens need not be run."""

from __future__ import annotations

import psutil

from dflash_local.chat.template import Rendered
from dflash_local.engine import device_faults
from dflash_local.engine.held_sequences import LEAST, POINTS_SHARE, HeldSequence, HeldSequences, hosted, thinned
from dflash_local.engine.runner import Runner, Snapshot
from dflash_local.shared_prefix import common_length
from dflash_local.text_index import TextIndex


class Conversations:
    """The sequence of a runner, and others in host memory and in files.

    Attributes:
        index: of the runner's sequence. held: the others.
        turn: tokens of the last prompt that the next turn of its conversation has, too.
        points: snapshots of the runner's sequence, the shortest first.
    """

    def __init__(self, runner: Runner, memory: int) -> None:
        """Take ``memory`` bytes of the host at most."""
        self.runner, self.index = runner, TextIndex()
        self._points_bytes = memory // POINTS_SHARE if runner.takes_snapshots else 0
        self.held = HeldSequences(memory - self._points_bytes, lambda: runner.drafters)
        self.turn = 0
        self.points: list[Snapshot] = []

    def reuse(self, prompt: Rendered, with_drafts: bool) -> int:
        """Keep what the caches hold of a new prompt; returns how many of its tokens, of which the last is always run
        again: the longest common prefix where the caches still hold it, else the longest snapshot in it. Another
        conversation than the last one may come back from host memory, and the last one goes there.
        """
        ids = list(prompt.ids)
        self._switch(ids, with_drafts)
        common, point = self._kept(ids[:-1], with_drafts)
        self.runner.restart(common, point)
        self.index.truncate(common)
        self.points = [s for s in self.points if s.length <= common]
        if common and point is None and self.runner.takes_snapshots:  # behind the last reply
            self.remember(self.runner.snapshot())
        self.turn = prompt.stable
        return common

    def _kept(self, ids: list[int], with_drafts: bool) -> tuple[int, Snapshot | None]:
        """Count how many of the first tokens of a prompt the device keeps, and return the snapshot that this takes."""
        runner = self.runner
        common = common_length(runner.committed, ids)
        if with_drafts and runner.proposer is not None:
            common = runner.reusable(common)
        if runner.holds(common):
            return common, None
        point = max((s for s in self.points if s.length <= common), key=lambda s: s.length, default=None)
        return point.length if point else 0, point

    def _switch(self, ids: list[int], with_drafts: bool) -> None:
        """Hold the sequence of the last prompt where this one is no later turn of it, and bring the one back that
        serves it better.
        """
        runner = self.runner
        held = self.held.take(ids[:-1], runner.takes_snapshots, self._kept(ids[:-1], with_drafts)[0])
        self.leave(ids)
        if held is not None:
            runner.put(held.ids, held.state)
            self.points = list(held.points)
            self.index.truncate(0)

    def leave(self, ids: list[int]) -> None:
        """Hold the sequence of the last prompt where these ids are no later turn of it."""
        if len(self.runner.committed) >= LEAST and common_length(self.runner.committed, ids) < self.turn:
            self._hold()

    def _hold(self) -> None:
        """Hold the runner's sequence as it is, if the host has room for it."""
        try:
            state = self.runner.hold(room_of(self.held.most_held))
            if state is not None:
                held = HeldSequence(list(self.runner.committed), state, hosted(tuple(self.points)))
                self.held.keep(held)
        except (RuntimeError, MemoryError) as error:
            if not device_faults.is_out_of_memory(error):
                raise

    def remember(self, point: Snapshot | None) -> None:
        """Keep a snapshot for later turns."""
        if point is not None:
            others = [each for each in self.points if each.length != point.length]
            self.points = thinned([*others, point], self._points_bytes)

    def save(self) -> None:
        """Move all to files, where there are any."""
        if self.held.files is not None:
            if len(self.runner.committed) >= LEAST:
                self._hold()
            self.held.save()

    def begin_anew(self) -> None:
        """Forget what is on the device."""
        self.points.clear()
        self.runner.restart(0, None)


def room_of(most_bytes: int) -> int:
    """Return so many bytes, or what the host has to give."""
    return min(most_bytes, psutil.virtual_memory().available // 2)
