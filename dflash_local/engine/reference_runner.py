"""The reference runner: draft, verify, accept, commit, eagerly, one cycle at a time; decoding without drafts is the
same.

Exact and slow; the oracle of the fused runner. Knows ids and positions, nothing of text, requests or events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_local.drafters.engines import Drafts, OwnProposer, Proposer
from dflash_local.engine.cpu_threads import CpuThreads
from dflash_local.engine.cycle_costs import MeasuredGrowth
from dflash_local.engine.runner import Cut, Cycle, SequenceRunner, not_finite
from dflash_local.engine.sampling import Sampler, likelihoods
from dflash_local.errors import EngineError, UsageError
from dflash_local.models.transformers_target import Forward, KVCache, TargetSnapshot, TransformersTarget


@dataclass(frozen=True, slots=True)
class HeldCaches:
    """Hold a sequence's state; ``contexts``: of the drafters."""

    kv: KVCache
    point: TargetSnapshot
    contexts: list[Any]


def accept(drafts: torch.Tensor, chosen: torch.Tensor) -> tuple[int, list[int]]:
    """Return number of accepted drafts and the ids emitted: the matching prefix and the target's next choice.

    Args:
        drafts: [m] proposed ids. chosen: [m + 1] the target's choice after the anchor and each draft.
    """
    matches = (drafts == chosen[:-1]).long().cumprod(0).sum()  # ones up to the first draft that is not the choice
    accepted, *ids = torch.cat((matches.view(1), chosen)).tolist()  # the cycle's one transfer to the host
    return accepted, ids[: accepted + 1]


class ReferenceRunner(SequenceRunner):
    """Holds the token sequence; see ``Runner``. A cycle's rows are committed when the next one starts, or by
    ``rewind``: so a stop string found late is undone exactly, for recurrent targets too.
    """

    target: TransformersTarget
    name = "reference"
    exact = False
    wait_ms = 0.0
    drafter_precision = "full"
    experts = None
    growth = MeasuredGrowth()

    def __init__(
        self,
        target: TransformersTarget,
        proposer: Proposer | None,
        context: int,
        threads: CpuThreads | None = None,
        own: OwnProposer | None = None,
    ) -> None:
        """Bind target and drafters. ``threads``: chooses how many compute a cycle; None: as many as torch was told."""
        self.target, self.proposer, self.own, self.context, self._threads = target, proposer, own, context, threads
        self.ids: list[int] = []
        self.committed: list[int] = []  # ids whose state the target holds
        self.costs: Mapping[int, float] = {}
        self.verify_costs: Mapping[int, float] = {}
        self.own_costs: Mapping[int, float] = {}
        self._pending: Forward | None = None
        self._cycles: list[Cycle] = []
        self._stop_ids: frozenset[int] = frozenset()
        self._block, self._uses_own = 1, False
        self._top: int | None = None

    def begin(
        self, sampler: Sampler, stop_ids: frozenset[int], block: int, with_drafts: bool, top: int | None = None
    ) -> None:
        self._sampler, self._stop_ids, self._top = sampler, stop_ids, top
        self.set_block(block if self.proposer is not None else 1)
        self._with_taps = with_drafts and self.proposer is not None
        self._cycles.clear()

    def end_at(self, length: int, exactly: bool) -> None:
        """Do nothing: each cycle is known before the next one begins."""

    def notice(self) -> str:
        return ""

    def _first(self, hidden: torch.Tensor, prompt: torch.Tensor) -> Cycle:
        """Choose the first token, which belongs to no cycle: one of no rows."""
        noise = self._sampler.noise(len(prompt), 1)
        logits = self._logits(hidden)
        self._sampler.prepare((), 1)
        chosen = self._sampler.choose(logits, prompt[:0], noise)
        self.ids.append(int(chosen))
        self._sampler.emitted(self.ids[-1:])
        return Cycle((self.ids[-1],), 0, 0, 0, 0.0, 0.0, likelihoods(logits, chosen, self._top))

    def _extend(self, taps: torch.Tensor, ids: torch.Tensor | None, start: int) -> None:
        for each in self.drafters:
            each.extend(self._taps_of(each, taps), start)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.target.head(hidden)
        if not bool(torch.isfinite(logits).all()):
            raise not_finite()
        return logits

    def settle(self, newest: int = 0) -> None:
        """Do nothing: each cycle is known before the next one begins."""

    def launch(self, cut: Cut | None = None, copied: Sequence[int] = ()) -> None:
        self._commit_pending(len(self.ids) - 1)
        start = len(self.committed)
        rows = min(len(copied) + 1 if copied else self._block, self.context - start)
        if self._threads is not None:
            self._threads.settle()
        clock = time.perf_counter()
        # One noise for drafter and target: where both find the same token likeliest, the draft is accepted.
        noise = self._sampler.noise(start + 1, rows)
        confidences: tuple[float, ...] = ()
        if copied:
            drafts = torch.tensor(copied[: rows - 1], dtype=torch.long, device=self.target.device)
        else:
            drafts, made = self._drafts(rows - 1, noise)
            confidences = tuple(made.tolist())
            rows = min(rows if cut is None or not confidences else cut(confidences), len(drafts) + 1)
        known = self._sampler.forced(drafts[: rows - 1])
        rows = rows if known is None else len(known) + 1
        drafts, noise = drafts[: rows - 1], None if noise is None else noise[:rows]
        drafted = self._now()
        anchor = torch.tensor(self.ids[-1:], dtype=torch.long, device=self.target.device)
        out = self.target.verify(torch.cat((anchor, drafts)), self._with_taps)
        self._sampler.prepare(known, rows)
        logits = self._logits(out.hidden)
        chosen = self._sampler.choose(logits, drafts, noise)
        accepted, ids = accept(drafts, chosen)
        done = self._now()
        # A cycle without the drafter's pass would look as if its threads were better.
        if self._threads is not None and not copied:
            self._threads.add(rows, done - clock)
        self._pending = out
        for i, token in enumerate(ids):
            if token in self._stop_ids:
                del ids[i + 1 :]
                break
        self._sampler.emitted(ids)
        self.ids += ids
        found = likelihoods(logits, chosen[: len(ids)], self._top)
        times = drafted - clock, done - drafted
        counts = rows - 1, accepted, rows
        whose = {"copied": bool(copied), "own": self._uses_own and bool(confidences)}
        self._cycles.append(Cycle(tuple(ids), *counts, *times, found, confidences=confidences, **whose))

    def _drafts(self, count: int, noise: torch.Tensor | None) -> Drafts:
        proposer = self.own if self._uses_own else self.proposer
        if count == 0 or proposer is None:
            return Drafts(torch.empty(0, dtype=torch.long, device=self.target.device), torch.empty(0))
        drafts, confidences = proposer.propose(self.ids, count, self._sampler, noise)
        if drafts.shape != (count,):
            raise EngineError(f"the drafter proposed a tensor of shape {tuple(drafts.shape)}, {(count,)} was asked for")
        low, high = torch.stack((drafts.min(), drafts.max())).tolist()
        if low < 0 or high >= self.target.vocab_size:
            wrong = low if low < 0 else high
            raise EngineError(f"the drafter proposed token {wrong}, the vocabulary has {self.target.vocab_size}")
        return Drafts(drafts, confidences)

    def _now(self) -> float:
        """Return host clock with the device idle, so that draft and verify can be told apart."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def collect(self) -> list[Cycle]:
        cycles, self._cycles = self._cycles, []
        return cycles

    def rewind(self, length: int) -> None:
        """Go back to the start of the last cycle at most."""
        if length < len(self.committed):
            raise EngineError(f"cannot rewind to {length}, {len(self.committed)} tokens are committed")
        del self.ids[length:]
        self._commit_pending(length - 1)

    def _commit_pending(self, length: int) -> None:
        """Commit rows of the last verify until ``length`` tokens are committed."""
        start, pending = len(self.committed), self._pending
        self._pending = None
        if pending is None or length <= start:
            return
        rows = length - start
        self.target.commit(rows)
        if pending.taps is not None:
            self._extend(pending.taps[:rows], None, start)
        self.committed += self.ids[start:length]

    def restart(self, length: int, point: TargetSnapshot | None) -> None:
        self._pending = None
        if point is not None:
            self.target.restore(point)
        elif length == 0:
            self.target.clear()
        elif length != self.target.length:
            self.target.truncate(length)
        for each in self.drafters:
            each.truncate(length)
        del self.committed[length:]
        self.ids = list(self.committed)

    def hold(self, most_bytes: int) -> HeldCaches | None:
        """Hold a sequence as ``Runner.hold`` says; on a device, of which only the fused engine knows how much is free,
        none.
        """
        if self.target.device.type != "cpu":
            return None
        self._commit_pending(len(self.ids) - 1)
        if self.target.kv.nbytes > most_bytes:
            return None
        return HeldCaches(self.target.kv.copy(), self.target.snapshot(), [each.hold() for each in self.drafters])

    def put(self, ids: Sequence[int], held: HeldCaches, rest: Sequence[int] = ()) -> None:
        self._pending = None
        self.target.kv = held.kv.copy()
        self.target.restore(held.point)
        for each, context in zip(self.drafters, held.contexts, strict=True):
            each.put(context)
        self.committed, self.ids = list(ids), [*ids, *rest]

    def oracle_drafter(self, text: Sequence[int]) -> Proposer:
        raise UsageError("drafts can be planted in the fused engine only", "add --engine fused")

    def close(self) -> None:
        del self.target, self.proposer, self.own
