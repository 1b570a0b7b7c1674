"""Dialogues written by the target itself, many at once: a question behind the template's opening, then its answer.

All slots step together, one token a step, on CUDA as one graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dflash_local.adapt.dialogues import REPEAT
from dflash_local.adapt.openings import Frame, Opening
from tools.train.frozen_target import FrozenTarget
from tools.train.slot_kernels import choose

MIN_P = 0.05
POLL = 16  # steps between two looks at what has ended
TAIL = 4 * REPEAT  # tokens in which a slot looks for a repeat while it writes


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens of a question and of an answer at most, and slots."""

    question: int = 160
    answer: int = 320
    slots: int = 2048


@dataclass(frozen=True, slots=True)
class Written:
    """Rows that ended: ids and the target's likeliest ids [n, room], lengths, where the question and the answer start
    [n]. All on the CPU.
    """

    ids: torch.Tensor
    best: torch.Tensor
    length: torch.Tensor
    question: torch.Tensor
    answer: torch.Tensor


class Slots:
    """The state of all slots, and the step that moves them.

    Args:
        seed: of the noise.
        compiled: False where few steps are made.
    """

    def __init__(self, target: FrozenTarget, frame: Frame, limits: Limits, seed: int, *, compiled: bool = True) -> None:
        self.target, self.frame, self.limits, self._compiled = target, frame, limits, compiled
        self.device = device = target.device
        self.room = len(frame.before) + limits.question + len(frame.after) + limits.answer + 2
        count, shape = limits.slots, (target.kv_heads, self.room, target.head_dim)
        self.keys = torch.zeros((len(target.layers), count, *shape), device=device, dtype=target.dtype)
        self.values = torch.zeros_like(self.keys)
        self.ids = torch.zeros(count, self.room + len(frame.after), dtype=torch.long, device=device)
        self.best = torch.zeros_like(self.ids)
        self.at, self.given, self.question, self.answer = (
            torch.zeros(count, dtype=torch.long, device=device) for _ in range(4)
        )
        self.answering, self.greedy = (torch.zeros(count, dtype=torch.bool, device=device) for _ in range(2))
        self.ended = torch.ones(count, dtype=torch.bool, device=device)
        self.temperature = torch.ones(count, device=device)
        self.seed = torch.tensor([seed << 32], device=device)
        self._every = torch.arange(count, device=device)
        self._after = torch.tensor(frame.after, dtype=torch.long, device=device)
        self._special, self._stop = (self._table(ids) for ids in (frame.special | frame.stop, frame.stop))
        self._begun = torch.zeros(count, dtype=torch.bool, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def _table(self, ids: frozenset[int]) -> torch.Tensor:
        table = torch.zeros(self.target.head.shape[0], dtype=torch.bool, device=self.device)
        table[torch.tensor(sorted(ids), dtype=torch.long, device=self.device)] = True
        return table

    def fill(self, slots: Sequence[int], openings: Sequence[Opening], *, answering: bool = False) -> None:
        """Begin dialogues in slots. ``answering``: the ids are whole prompts, replies follow at once.

        A slot keeps what its first dialogue left of the template's opening, which is the same in all of them.
        """
        before = [] if answering else list(self.frame.before)
        rows = [before + list(opening.ids) for opening in openings]
        width = max(map(len, rows))
        table = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        where = torch.tensor(slots, device=self.device)

        def placed(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(self.device)

        given = placed([len(row) for row in rows], torch.long)
        self.ids[where, :width] = table.to(self.device)
        self.given[where] = given
        self.question[where] = len(before)
        self.answer[where] = given
        self.answering[where] = answering
        self.at[where] = torch.where(self._begun[where] & (not answering), len(before) - 1, 0)
        self._begun[where] = not answering
        self.greedy[where] = placed([opening.greedy for opening in openings], torch.bool)
        self.temperature[where] = placed([opening.temperature for opening in openings], torch.float)
        self.ended[where] = False

    @torch.no_grad()
    def step(self) -> None:
        """One token further in every slot that has not ended."""
        last = self.ids[self._every, self.at]
        logits = self.target.next_logits(last, self.at, self.keys, self.values, self._compiled)
        heat = torch.where(self.answering, self.temperature, 1.0)
        chosen, best = choose(logits, heat, self.answering & self.greedy, math.log(MIN_P), self.seed)
        self.seed += 1
        there = self.at + 1
        writes = ~self.ended & (there >= self.given)
        self.ids[self._every, there] = torch.where(writes, chosen, self.ids[self._every, there])
        self.best[self._every, there] = torch.where(writes, best, self.best[self._every, there])
        asked = there - self.question >= self.limits.question
        turn = writes & ~self.answering & (self._special[chosen] | asked)
        told = there - self.answer >= self.limits.answer - 1
        end = writes & self.answering & (self._stop[chosen] | told)
        for offset in range(len(self.frame.after)):
            here = self.ids[self._every, there + offset]
            self.ids[self._every, there + offset] = torch.where(turn, self._after[offset], here)
        self.given.copy_(torch.where(turn, there + len(self.frame.after), self.given))
        self.answer.copy_(torch.where(turn, self.given, self.answer))
        self.answering.logical_or_(turn)
        self.at.copy_(torch.where(self.ended | end, self.at, there))
        self.ended.logical_or_(end)

    def capture(self) -> None:
        """On CUDA, make the step one graph; the slots' state moves by a few steps."""
        if self.device.type != "cuda":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.step()

    def restart(self) -> None:
        """Forget what slots hold of the template's opening: trial steps began at any place."""
        self._begun.zero_()

    def run(self, steps: int = POLL) -> None:
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self.step()

    @torch.no_grad()
    def end_repeats(self) -> None:
        """End the answers whose last ``REPEAT`` tokens stand among the ``TAIL`` before; what is kept is cut later."""
        back = torch.arange(1 - TAIL, 1, device=self.device)
        place = (self.at.unsqueeze(1) + back).clamp_min(0)
        runs = self.ids.gather(1, place).unfold(1, REPEAT, 1)
        again = (runs[:, :-1] == runs[:, -1:]).all(-1) & (place[:, : TAIL - REPEAT] >= self.answer.unsqueeze(1))
        self.ended.logical_or_(again.any(1) & self.answering)

    def take(self, rows: torch.Tensor) -> Written:
        """What stands in the slots ``rows`` [n], which have ended."""
        question, answer = (each[rows].cpu() for each in (self.question, self.answer))
        length = self.at[rows].cpu() + 2  # the last place read, and the token it gave
        ids, best = (each[rows].to(torch.int32).cpu()[:, : self.room] for each in (self.ids, self.best))
        return Written(ids, best, length, question, answer)


def write_dialogues(slots: Slots, openings: Iterator[Opening], seconds: float, keep: Callable[[Written], None]) -> None:
    """Keep all slots writing for so long; what has not ended by then is dropped.

    Args:
        keep: called with what has ended, while the next steps run.
    """
    count = slots.limits.slots
    slots.fill(range(count), [next(openings) for _ in range(count)])
    slots.capture()
    slots.restart()
    slots.fill(range(count), [next(openings) for _ in range(count)])
    began = time.monotonic()
    waiting: Written | None = None
    while time.monotonic() - began < seconds:
        slots.run()
        if waiting is not None:
            keep(waiting)
        slots.end_repeats()
        ended = slots.ended.nonzero().flatten()
        waiting = None
        if len(ended):
            waiting = slots.take(ended)
            slots.fill(ended.tolist(), [next(openings) for _ in range(len(ended))])
    if waiting is not None:
        keep(waiting)


def greedy_replies(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], stop: frozenset[int], most: int
) -> list[list[int]]:
    """The target's own replies to whole prompts, its stop id included, at most ``most`` tokens; not cut at repeats."""
    frame = Frame((), (), frozenset(), stop)
    slots = Slots(target, frame, Limits(max(map(len, prompts)), most, len(prompts)), seed=0, compiled=False)
    slots.fill(range(len(prompts)), [Opening(prompt) for prompt in prompts], answering=True)
    while not bool(slots.ended.all()):
        slots.run()
    found = slots.take(torch.arange(len(prompts), device=slots.device))
    return [row[start:end].tolist() for row, start, end in zip(found.ids, found.answer, found.length, strict=True)]
