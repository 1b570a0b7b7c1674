"""The fused runner: a whole cycle is two CUDA graphs, one that drafts and one that verifies, and the host reads what
came of it a cycle late. Where the number of rows follows from the drafts' confidences it waits between the two.

Without CUDA the same launches run eagerly through the kernels' PyTorch references, so that its logic is tested
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from dflash_local.drafters.engines import FusedDrafter
from dflash_local.engine.cycle_costs import MeasuredExperts, MeasuredGrowth
from dflash_local.engine.cycle_records import CycleKey, CycleRecords, Launched, Margins
from dflash_local.engine.graphs import Graphs
from dflash_local.engine.held_sequences import hosted
from dflash_local.engine.oracle_drafter import OracleDrafter
from dflash_local.engine.runner import Cut, Cycle, SequenceRunner, not_finite
from dflash_local.engine.sampling import Sampler, likelihoods
from dflash_local.errors import EngineError
from dflash_local.kernels.accept import NOT_FINITE, Progress, accept
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.choose import Chooser, Choosing, Noise
from dflash_local.layout.cycle import MAX_STOP_IDS, cycle_buffers
from dflash_local.models.fused.attention import hold_rows, put_held_rows
from dflash_local.models.fused.moe import FixedRouting, fixed_routing
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.transformers_target import TargetSnapshot
from dflash_local.request import SamplingParams

AHEAD = 2  # cycles on their way while the host reads an older one
COUNTED = 16  # of as many cycles of one number of rows one brings its experts to the host


@dataclass(frozen=True, slots=True)
class FusedSnapshot:
    """Hold a target's snapshot, and each drafter's where that had the context."""

    target: TargetSnapshot
    contexts: tuple[Any, ...]

    @property
    def length(self) -> int:
        return self.target.length


@dataclass(frozen=True, slots=True)
class HeldBuffers:
    """Hold a sequence's state on the host.

    Attributes:
        drafters: those that had the context. rows: of the target's caches, then of theirs.
    """

    point: FusedSnapshot
    drafters: tuple[FusedDrafter, ...]
    rows: list[tuple[torch.Tensor, ...]]


class FusedRunner(SequenceRunner):
    """Holds the token sequence as the host knows it; see ``Runner``.

    Attributes:
        peak_before: see ``engine.drafter_precision.ChosenPrecision``.
    """

    target: FusedTarget
    name = "fused"
    drafter_precision = "full"
    peak_before = 0

    def __init__(
        self, target: FusedTarget, proposer: FusedDrafter | None, context: int, own: FusedDrafter | None = None
    ) -> None:
        """Bind a target to its drafters, if there are any."""
        self.target, self._proposer, self.own, self.context = target, proposer, own, context
        self.ids: list[int] = []
        self.committed: list[int] = []
        buffers = cycle_buffers(target.rows, target.vocab_size)
        tensors = Tensors(buffers.all(), target.device)
        progress = tensors.take(buffers.progress)
        self.progress = Progress.over(target.start, target.kept, target.cycle, target.tokens, progress)
        self._chooser = Chooser(tensors.take(buffers.choice))
        self._draft_chooser = Chooser(tensors.take(buffers.draft_choice), not_finite_id=0)
        self._temperature, self._seed = tensors.take(buffers.sampling)
        self._temperature.fill_(1.0)
        self._seed.zero_()
        self._margins = Margins(self.progress.margins)
        self._records = CycleRecords(self.progress, target.distinct_experts)
        self._graphs = Graphs(target.device.type == "cuda")
        target.run_recorded = self._graphs.run  # a certificate scores thousands of rows
        self._ready: list[Cycle] = []
        self._block, self._uses_own, self._with_taps = 1, False, False
        self._drafted: dict[bool, int] = {}  # drafts of a whole block of the proposer, and of ``own``
        self._reported_fault = ""
        self.costs: Mapping[int, float] = {}
        self.verify_costs: Mapping[int, float] = {}
        self.own_costs: Mapping[int, float] = {}
        self.wait_ms = 0.0
        self.experts: MeasuredExperts | None = None
        self.growth = MeasuredGrowth()
        self._replayed = "cycle"  # the name of what ``replay`` records
        self._counted_rows = self._uncounted = 0  # rows of the last cycle; cycles of so many since one was counted
        self._kept = 0  # rows that the last cycle committed, as the host knows
        self.end_at(context, exactly=False)

    @property
    def peak_bytes(self) -> int:
        """Return what torch's allocator has held at most on its GPU, but for what was tried in vain or replaced."""
        return max(self.peak_before, torch.cuda.max_memory_allocated(self.target.device))

    @property
    def proposer(self) -> FusedDrafter | None:
        """Return what fills the blocks; with another one everything recorded is forgotten."""
        return self._proposer

    @proposer.setter
    def proposer(self, proposer: FusedDrafter | None) -> None:
        if proposer is not self._proposer:
            self._drain()
            self._graphs.clear()
        self._proposer = proposer

    @property
    def num_experts(self) -> float | None:
        """Return routed experts of a layer, the mean of those that are mixtures; None when none is."""
        return _mean([part.weights.config.num_experts for part in self.target.mixtures])

    def distinct_experts(self, rows: int) -> float | None:
        """Return ``Cycle.experts`` of the last block, which had so many rows; waits for the device."""
        return _mean(self.target.distinct_of(rows))

    @property
    def exact(self) -> bool:
        return self.target.exact

    def begin(
        self, sampler: Sampler, stop_ids: frozenset[int], block: int, with_drafts: bool, top: int | None = None
    ) -> None:
        """Begin as ``Runner.begin`` says. Raise EngineError where stop ids are more than the device has room for."""
        if len(stop_ids) > MAX_STOP_IDS:
            raise EngineError(f"{len(stop_ids)} stop ids, {MAX_STOP_IDS} are known here", "use --engine reference")
        self._sampler, self._top = sampler, top
        self.set_block(block if self.proposer is not None else 1)
        own = {} if self.own is None else {True: len(self.own.drafts)}  # its blocks have a length of their own
        self._drafted = own | ({} if self.proposer is None else {False: min(block - 1, len(self.proposer.drafts))})
        params = sampler.params
        self._with_taps = with_drafts and self.proposer is not None
        self._noisy = not params.greedy
        # Filters, processors and log-probabilities are the sampler's business: the host takes part in each cycle.
        self._plain = top is None and not sampler.processors and (params.greedy or not params.filtered)
        self._temperature.fill_(params.temperature if self._noisy else 1.0)
        self._seed.fill_(sampler.seed - 2**64 if sampler.seed >= 2**63 else sampler.seed)
        stops = torch.full_like(self.progress.stops, -1, device="cpu")
        stops[: len(stop_ids)] = torch.tensor(sorted(stop_ids), dtype=torch.int32)
        self.progress.stops.copy_(stops)
        self.progress.done.zero_()
        self._ready.clear()
        self._counted_rows = 0
        self.end_at(self.context, exactly=False)

    def end_at(self, length: int, exactly: bool) -> None:
        self._limit = min(length, self.context) - 1
        self.progress.limit.fill_(self._limit)
        self._ahead = 0 if exactly and self.target.is_recurrent else AHEAD

    def notice(self) -> str:
        if self._graphs.fault == self._reported_fault:
            return ""
        self._reported_fault = self._graphs.fault
        return f"no CUDA graph could be recorded ({self._graphs.fault}): replies are slower than they could be"

    def _extend(self, taps: torch.Tensor, ids: torch.Tensor, start: int) -> None:
        for each in self.drafters:
            each.write_context(self._taps_of(each, taps), ids, start)

    def _first(self, hidden: torch.Tensor, prompt: torch.Tensor) -> Cycle:
        """Choose the first token, which belongs to no cycle."""
        logits = self.target.head(hidden)
        if not bool(torch.isfinite(logits).all()):
            raise not_finite()
        self._sampler.prepare((), 1)
        chosen = self._sampler.choose(logits, prompt[:0], self._sampler.noise(len(prompt), 1))
        self.target.tokens[:1] = chosen
        self.progress.cycle.fill_(self._records.cycle)  # nothing is left to commit: the number may change
        self.ids.append(int(chosen))
        self._sampler.emitted(self.ids[-1:])
        return Cycle((self.ids[-1],), 0, 0, 0, 0.0, 0.0, likelihoods(logits, chosen, self._top))

    def launch(self, cut: Cut | None = None, copied: Sequence[int] = ()) -> None:
        rows = len(copied) + 1 if copied else max(1, self._block)
        drafts = self._drafts_for(rows) if self._with_taps and not copied else 0
        if copied:
            self.set_tokens((self.ids[-1], *copied))
        # What is on its way may have moved on by a whole block each.
        max_seq_len = len(self.committed) + (len(self._records) + 2) * self.target.rows
        self.target.written = max(self.target.written, max_seq_len)
        own = self._uses_own and drafts > 0
        key = CycleKey(rows, drafts, self._with_taps, self._noisy, self.target.bucket(max_seq_len), own)
        if self._plain:
            self._send(Launched(self._run("cycle", key, cut), bool(copied)))
        else:
            self._step_by_step(key, cut, bool(copied))

    def settle(self, newest: int = 0) -> None:
        while len(self._records) > newest:
            if (cycle := self._receive()) is not None:
                self._ready.append(cycle)

    def _drafts_for(self, rows: int) -> int:
        """Count the drafts of a cycle of so many rows; of a chain only those that are verified, as it pays for each."""
        drafter, whole = self._drafter(self._uses_own), self._drafted.get(self._uses_own, 0)
        return min(rows - 1, whole) if rows == 1 or (drafter is not None and drafter.chained) else whole

    def _drafter(self, own: bool) -> FusedDrafter | None:
        return self.own if own else self.proposer

    def _run(self, name: str, key: CycleKey, cut: Cut | None) -> CycleKey:
        """Run a cycle in graphs of its drafts, of the block's begin and of the rest; returns the key of its rows."""
        key = self._with_drafts(key, cut)
        rest = replace(key, drafts=0, own=False)  # as a cycle whose drafts are given
        self._graphs.run((name, rest), lambda: self._rest(rest))
        return key

    def _with_drafts(self, key: CycleKey, cut: Cut | None) -> CycleKey:
        """Make a cycle's drafts and begin its block, where they are cut with all of them, while the host waits for
        their margins and chooses; returns the key of the rows that are to be verified. With guides, which may put other
        drafts in their place, the block is not begun.
        """
        begun = key
        if key.drafts:
            made = replace(key, rows=key.drafts + 1)
            self._graphs.run(("draft", made), lambda: self.draft(made))
            if cut is not None:
                begun = made
                self._margins.send()
        if not self._sampler.guides:
            self._begin(begun)
        if cut is None or not key.drafts:
            return key
        return replace(key, rows=min(cut(self._margins.receive(key.drafts)), key.rows))

    def _begin(self, key: CycleKey) -> None:
        rows, max_seq_len = key.rows, key.max_seq_len
        self._graphs.run(("begin", rows, max_seq_len), lambda: self.target.begin(rows, max_seq_len))

    def _send(self, launched: Launched) -> None:
        """Have its record copied, and its counts of experts where another number of rows began, or now and then."""
        key = launched.key
        self._uncounted = self._uncounted + 1 if key.rows == self._counted_rows else COUNTED
        self._counted_rows = key.rows
        counted = self.target.distinct_experts is not None and self._uncounted >= COUNTED
        self._uncounted = 0 if counted else self._uncounted
        self._records.send(launched, counted)

    @contextmanager
    def idle(self, ids: Sequence[int]) -> Iterator[None]:
        """Have ``replay`` run cycles behind these committed ids within; they emit nothing and move nothing."""
        prompt = torch.tensor(list(ids), dtype=torch.long, device=self.target.device)
        sampler = Sampler(SamplingParams(temperature=0.0), 0, self.vocab_size, prompt)
        self.begin(sampler, frozenset(), self.target.rows, self.proposer is not None)
        for _ in self.prefill(ids, 0):
            pass
        self.progress.done.fill_(1)
        try:
            yield
        finally:
            self.restart(0, None)

    def set_tokens(self, ids: Sequence[int]) -> None:
        """Let the next cycles begin with an id, and with drafts behind it."""
        self.progress.tokens[: len(ids)] = torch.tensor(ids)

    def replay(self, rows: int, cut: Cut | None = None, given: bool = False, own: bool = False, at: int = 0) -> None:
        """Run one greedy cycle of so many rows, recorded or replayed; 1 is the plain step.

        Args:
            cut: see ``launch``. given: its drafts are what stands in ``tokens``; a plain step keeps no drafter's
                context. own: see ``set_block``. at: which of the target's buckets; 0 is the shortest.
        """
        self.set_block(rows, own)
        drafts = 0 if given else self._drafts_for(rows)
        taps = (rows > 1 or not given) and self.proposer is not None
        key = CycleKey(rows, drafts, taps, False, self.target.buckets[at], own)
        self._run(self._replayed, key, cut)

    @contextmanager
    def routed(self, rows: int, routing: FixedRouting) -> Iterator[None]:
        """Have ``replay`` run cycles of so many rows whose experts are drawn within."""
        self._replayed = routing
        try:
            with fixed_routing(self.target.mixtures, rows, routing):
                yield
        finally:
            self._replayed = "cycle"
            self._graphs.forget(routing)

    def _rest(self, key: CycleKey) -> None:
        """Verify, choose, keep the drafters' contexts, accept: what of a cycle stands behind the begun block."""
        rows = key.rows
        self.target.finish(rows, key.max_seq_len, key.taps)
        self._chooser.choose(self.target.logits[:rows], self.progress.chosen[:rows], Choosing(self._noise(key)))
        self._close(key)

    def draft(self, key: CycleKey) -> None:
        """Make a cycle's drafts, by launches alone."""
        if (proposer := self._drafter(key.own)) is not None:
            proposer.block(key.max_seq_len)
            drafts = self.progress.tokens[1 : key.drafts + 1]
            chooser = proposer.selector or self._draft_chooser
            how = Choosing(self._noise(key), self.progress.margins[: len(drafts)], proposer.head_ids)
            chooser.choose(proposer.drafts[: len(drafts)], drafts, how)

    def _close(self, key: CycleKey) -> None:
        # Context rows are written for the whole block before ``accept`` moves ``start``: those of rejected rows lie
        # behind it, where the next cycle writes again.
        for each in self.drafters if key.taps else ():
            each.inject(self._taps_of(each, self.target.tapped[: key.rows]))
        accept(self.progress, key.rows)

    def _noise(self, key: CycleKey) -> Noise | None:
        return (self._temperature, self._seed, self.progress.start) if key.noisy else None

    def _step_by_step(self, key: CycleKey, cut: Cut | None, copied: bool) -> None:
        """Run the same cycle with the sampler between its halves; the host waits for it."""
        key = self._with_drafts(key, cut)
        # Read before the pass is launched, or the host would wait for it and could not work beside it.
        known = self._sampler.forced(self.progress.tokens[1 : key.rows])
        if known is not None:
            costs = self.own_costs if key.own else self.costs
            key = replace(key, rows=min([key.rows, *(rows for rows in costs if rows > len(known))]))
        rows, rest = key.rows, replace(key, drafts=0, own=False)
        drafts = self.progress.tokens[1:rows]
        noise = self._sampler.noise(len(self.ids), rows)
        if self._sampler.guides:
            self._begin(key)
        self._graphs.run(("verify", rest), lambda: self.target.finish(rows, rest.max_seq_len, rest.taps))
        self._sampler.prepare(known, rows)
        logits, chosen = self.target.logits[:rows], self.progress.chosen[:rows]
        finite = torch.isfinite(logits).all()
        chosen.copy_(self._sampler.choose(logits, drafts, noise))
        if not bool(finite):  # read behind what is launched meanwhile: the host waits here
            raise not_finite()
        self._graphs.run(("close", rest), lambda: self._close(rest))
        self._send(Launched(key, copied))
        if (cycle := self._receive()) is not None:
            self._sampler.emitted(cycle.ids)
            found = likelihoods(logits, chosen[: len(cycle.ids)], self._top)
            self._ready.append(replace(cycle, likelihoods=found))

    def collect(self) -> list[Cycle]:
        """Return cycles that have become known: all but the last few that were launched."""
        self.settle(self._ahead)
        cycles, self._ready = self._ready, []
        return cycles

    def _receive(self) -> Cycle | None:
        """Wait for the oldest cycle under way; None when the sequence had ended before it."""
        record = self._records.receive()
        count, ids = record.count, record.ids[: max(record.count, 0)]
        before = len(self.committed)
        self._kept = min(max(count, 0), max(self._limit - before, 0))
        if count == NOT_FINITE:
            raise not_finite()
        if count == 0:
            return None
        self.ids += ids  # the last cycle's may reach behind the limit; ``rewind`` cuts them
        self.committed = self.ids[: before + self._kept]
        key, copied = record.launched
        for each in self.drafters if key.taps else ():
            each.length = len(self.committed)
        drafted = record.rows - 1 if key.drafts or copied else 0
        experts = None if record.experts is None else _mean(self.target.distinct_of(record.rows, record.experts))
        told = record.margins[: key.drafts]
        counts = drafted, min(record.accepted, drafted), record.rows
        return Cycle(ids, *counts, 0.0, 0.0, experts=experts, confidences=told, copied=copied, own=key.own)

    def rewind(self, length: int) -> None:
        """Go back as far as recurrent states and rings hold what is needed; else the next prompt finds a snapshot."""
        self._drain()
        back = len(self.committed) - (length - 1)
        # The device commits a cycle's rows to the recurrent state with the next cycle: until then fewer can be kept.
        if self.target.is_recurrent and back > 0:
            if back > self._kept:
                return
            self._kept -= back
            self.target.keep(self._kept)
        elif not self.target.holds(length - 1):
            return
        del self.ids[length:]
        self._set_length(length - 1)

    def _set_length(self, length: int) -> None:
        """Set the device to ``length`` committed tokens of ``ids``."""
        self.committed = self.ids[:length]
        self.target.set_length(length)
        for each in self.drafters:
            each.length = min(each.length, length)
        if length < len(self.ids):
            self.progress.tokens[:1] = self.ids[length]
        self.progress.done.zero_()

    def _drain(self) -> None:
        """Wait until nothing is under way."""
        while self._records:
            self._receive()
        self._ready.clear()

    def snapshot(self) -> FusedSnapshot:
        held = (each.snapshot() if each.length == self.target.length else None for each in self.drafters)
        return FusedSnapshot(self.target.snapshot(), tuple(held))

    def reusable(self, length: int) -> int:
        held = super().reusable(length)
        # A target that goes back to a snapshot has the context's rows in it as well.
        return min(each.reusable(held) for each in self.drafters) if self.holds(held) else held

    @property
    def takes_snapshots(self) -> bool:
        return self.target.is_recurrent or bool(self.target.rings)

    def holds(self, length: int) -> bool:
        return super().holds(length) and self.target.holds(length)

    def restart(self, length: int, point: FusedSnapshot | None) -> None:
        self._drain()
        if point is not None:
            self.target.restore(point.target)
            for each, context in zip(self.drafters, point.contexts):
                if context is not None:
                    each.restore(context)
        elif length == 0:
            self.target.clear()
        elif not self.holds(length):
            raise EngineError(f"this target cannot go back to {length} tokens without a snapshot")
        self.ids = self.committed[:length]
        self._set_length(length)

    def hold(self, most_bytes: int) -> HeldBuffers | None:
        self._drain()
        length = len(self.committed)
        self._set_length(length)
        drafters = tuple(each for each in self.drafters if each.length == length)
        caches = self._caches(drafters)
        if sum(part[:, :1].nbytes for cache in caches for part in cache) * length > most_bytes:
            return None
        point, self._kept = hosted(self.snapshot()), 0
        with self.target.entered():
            return HeldBuffers(point, drafters, [hold_rows(cache, length) for cache in caches])

    def put(self, ids: Sequence[int], held: HeldBuffers, rest: Sequence[int] = ()) -> None:
        self._drain()
        with self.target.entered():
            for cache, rows in zip(self._caches(held.drafters), held.rows, strict=True):
                put_held_rows(cache, rows)
        self.committed = list(ids)
        self.restart(len(ids), held.point)
        for each in self.drafters:
            each.length = len(ids) if any(each is other for other in held.drafters) else 0
        self.ids += rest
        if rest:
            self.progress.tokens[:1] = rest[0]

    def _caches(self, drafters: Sequence[FusedDrafter]) -> list[tuple[torch.Tensor, ...]]:
        """Return those that hold every position, of the target and of drafters."""
        return [*self.target.caches, *(cache for each in drafters for cache in each.caches)]

    def oracle_drafter(self, text: Sequence[int]) -> OracleDrafter:
        return OracleDrafter(self.target, text)

    def close(self) -> None:
        try:
            self._drain()
        finally:
            self._graphs.clear()
            del self.target, self._proposer, self.own


def _mean(counts: Sequence[int]) -> float | None:
    return sum(counts) / len(counts) if counts else None
