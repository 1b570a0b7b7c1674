"""The reference runner: draft, verify, accept, commit, eagerly, one cycle at a time; decoding without drafts is the
same.

Exact and slow; the oracle of the fused runner. Knows ids and positions, nothing of text, requests or events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch.nn.functional import embedding, linear

from dflash_local.engine.cpu_threads import CpuThreads
from dflash_local.engine.cycle import Cycle, PrefillStep, chunks, not_finite
from dflash_local.engine.sampling import Sampler, likelihoods
from dflash_local.errors import EngineError, UsageError
from dflash_local.kernels import markov_walk
from dflash_local.models.drafter import Drafter
from dflash_local.models.dspark import BORROWED, Tables
from dflash_local.models.transformers_target import Forward, TargetSnapshot, TransformersTarget


class Proposer(Protocol):
    """What a runner needs of a drafter: ``DFlashProposer``, or what tests plant."""

    @property
    def length(self) -> int:
        """Context positions held."""

    def extend(self, taps: torch.Tensor, start: int) -> None:
        """Take the taps [m, T x H] of newly committed tokens at positions ``start ..``."""

    def truncate(self, length: int) -> None:
        """Forget context after ``length``."""

    def propose(
        self, anchor: int, start: int, count: int, sampler: Sampler, noise: torch.Tensor | None
    ) -> torch.Tensor:
        """``count`` drafted ids for the positions after ``start``, where the anchor stands."""


class DFlashProposer:
    """A drafter with its context cache, bound to the target whose embedding and head it borrows where ``tables`` has
    none. It drafts its trained size, since bidirectional layers see all of the block; a shorter request takes the first
    slots.
    """

    def __init__(
        self, drafter: Drafter, target: TransformersTarget, draft_window: int | None = None, tables: Tables = BORROWED
    ) -> None:
        self.drafter, self.target, self._tables = drafter, target, tables
        self._cache = drafter.new_cache(draft_window=draft_window)
        # The mask row never changes: embed the whole block once, then only the anchor's row.
        ids = torch.full((drafter.config.draft_rows,), drafter.config.mask_token_id, device=target.device)
        self._block = self._embed(ids).to(drafter.dtype).clone()

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The block's rows: a DFlash 2 drafter scales the stored ones itself, a DSpark one takes them as they are."""
        config = self.drafter.config
        if self._tables.embedding is not None:
            return embedding(ids, self._tables.embedding)
        if config.dflash2 is None and config.dspark is None:
            return self.target.embed(ids)
        return self.target.stored_rows(ids) * (1.0 if config.dflash2 is None else config.dflash2.embedding_scale)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """For the ids that the target has; a DFlash 2 and a DSpark drafter take them without the target's soft cap."""
        if self._tables.head is not None:
            return linear(hidden, self._tables.head)[:, : self.target.vocab_size]
        config, rows = self.drafter.config, hidden.to(self.target.dtype)
        return (
            self.target.head(rows) if config.dflash2 is None and config.dspark is None else self.target.uncapped(rows)
        )

    @property
    def length(self) -> int:
        return self._cache.length

    def extend(self, taps: torch.Tensor, start: int) -> None:
        """Write the context K/V of newly committed tokens, once."""
        self.drafter.write_context(self._cache, taps.to(self.drafter.dtype), start)

    def truncate(self, length: int) -> None:
        if length < self._cache.length:
            self._cache.truncate(length)

    def propose(
        self, anchor: int, start: int, count: int, sampler: Sampler, noise: torch.Tensor | None
    ) -> torch.Tensor:
        anchor_id = torch.tensor([anchor], device=self.target.device)
        self._block[:1] = self._embed(anchor_id)
        drafter = self.drafter
        hidden = drafter.draft_hidden(self._cache, self._block, start)[drafter.config.first_draft :][:count]
        logits = self._logits(hidden)

        def choose(row: int, scores: torch.Tensor, ids: torch.Tensor | slice = slice(None)) -> torch.Tensor:
            return sampler.draft(scores, None if noise is None else noise[row : row + 1, ids])

        if drafter.selector is not None:
            return drafter.selector.walk(hidden, logits, anchor_id, choose)
        if drafter.markov is not None:
            return markov_walk.walk(logits, drafter.markov, anchor_id, choose)
        return sampler.draft(logits, None if noise is None else noise[:count])


def accept(drafts: torch.Tensor, chosen: torch.Tensor) -> tuple[int, list[int]]:
    """Number of accepted drafts and the ids emitted: the matching prefix and the target's next choice.

    Args:
        drafts: [m] proposed ids. chosen: [m + 1] the target's choice after the anchor and each draft.
    """
    matches = (drafts == chosen[:-1]).long().cumprod(0).sum()
    accepted, *ids = torch.cat((matches.view(1), chosen)).tolist()  # the cycle's one transfer to the host
    return accepted, ids[: accepted + 1]


class ReferenceRunner:
    """Holds the token sequence; see ``Runner``. A cycle's rows are committed when the next one starts, or by
    ``rewind``: so a stop string found late is undone exactly, for recurrent targets too.
    """

    name = "reference"
    exact = False
    drafter_precision = "full"
    experts = None

    def __init__(
        self,
        target: TransformersTarget,
        proposer: Proposer | None,
        context: int,
        threads: CpuThreads | None = None,
    ) -> None:
        """``threads``: chooses how many compute a cycle; None: always as many as torch was told."""
        self.target, self.proposer, self.context, self._threads = target, proposer, context, threads
        self.ids: list[int] = []
        self.committed: list[int] = []  # ids whose state the target holds
        self.costs: Mapping[int, float] = {}
        self._pending: Forward | None = None
        self._cycles: list[Cycle] = []
        self._stop_ids: frozenset[int] = frozenset()
        self._block = 1
        self._top: int | None = None

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def is_recurrent(self) -> bool:
        return self.target.is_recurrent

    def begin(
        self, sampler: Sampler, stop_ids: frozenset[int], block: int, with_drafts: bool, top: int | None = None
    ) -> None:
        self._sampler, self._stop_ids, self._block, self._top = sampler, stop_ids, block, top
        self._with_taps = with_drafts and self.proposer is not None
        self._cycles.clear()

    def end_at(self, length: int, exactly: bool) -> None:
        """Nothing to do: each cycle is known before the next one begins."""

    def notice(self) -> str:
        return ""

    def set_block(self, block: int) -> None:
        self._block = block

    def prefill(self, ids: Sequence[int], stable: int) -> Iterator[PrefillStep]:
        start = len(self.committed)
        if start >= len(ids):
            raise EngineError("nothing of the prompt was left to process")
        self.ids = list(ids)
        tensor = torch.tensor(self.ids, dtype=torch.long, device=self.target.device)
        for at, end in chunks(start, len(ids), stable, self.target.prefill_chunk):
            out = self.target.prefill(tensor[at:end], self._with_taps)
            self._extend(out.taps, at)
            self.committed += self.ids[at:end]
            first = self._first(out.hidden[-1:], tensor) if end == len(ids) else None
            point = self.target.snapshot() if end == stable and self.target.is_recurrent else None
            yield PrefillStep(end - start, len(ids) - start, point, first)

    def _first(self, hidden: torch.Tensor, prompt: torch.Tensor) -> Cycle:
        """The first token, which belongs to no cycle: one of no rows."""
        noise = self._sampler.noise(len(prompt), 1)
        logits = self._logits(hidden)
        chosen = self._sampler.choose(logits, prompt[:0], noise)
        self._sampler.emitted(chosen)
        self.ids.append(int(chosen))
        return Cycle((self.ids[-1],), 0, 0, 0, 0.0, 0.0, likelihoods(logits, chosen, self._top))

    def _extend(self, taps: torch.Tensor | None, start: int) -> None:
        if taps is not None and self.proposer is not None:
            self.proposer.extend(taps, start)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.target.head(hidden)
        if not bool(torch.isfinite(logits).all()):
            raise not_finite()
        return logits

    def launch(self) -> None:
        self._commit_pending(len(self.ids) - 1)
        start = len(self.committed)
        rows = min(self._block, self.context - start)
        if self._threads is not None:
            self._threads.settle()
        clock = time.perf_counter()
        noise = self._sampler.noise(start + 1, rows)
        drafts = self._drafts(start, rows - 1, noise)
        drafted = self._now()
        anchor = torch.tensor(self.ids[-1:], dtype=torch.long, device=self.target.device)
        out = self.target.verify(torch.cat((anchor, drafts)), self._with_taps)
        logits = self._logits(out.hidden)
        chosen = self._sampler.choose(logits, drafts, noise)
        accepted, ids = accept(drafts, chosen)
        done = self._now()
        if self._threads is not None:
            self._threads.add(rows, done - clock)
        self._pending = out
        for i, token in enumerate(ids):
            if token in self._stop_ids:
                del ids[i + 1 :]
                break
        self._sampler.emitted(chosen[: len(ids)])
        self.ids += ids
        found = likelihoods(logits, chosen[: len(ids)], self._top)
        self._cycles.append(Cycle(tuple(ids), rows - 1, accepted, rows, drafted - clock, done - drafted, found))

    def _drafts(self, start: int, count: int, noise: torch.Tensor | None) -> torch.Tensor:
        if count == 0 or self.proposer is None:
            return torch.empty(0, dtype=torch.long, device=self.target.device)
        drafts = self.proposer.propose(self.ids[-1], start, count, self._sampler, noise)
        if drafts.shape != (count,):
            raise EngineError(f"the drafter proposed a tensor of shape {tuple(drafts.shape)}, {(count,)} was asked for")
        low, high = torch.stack((drafts.min(), drafts.max())).tolist()
        if low < 0 or high >= self.target.vocab_size:
            wrong = low if low < 0 else high
            raise EngineError(f"the drafter proposed token {wrong}, the vocabulary has {self.target.vocab_size}")
        return drafts

    def _now(self) -> float:
        """Host clock with the device idle, so that draft and verify can be told apart."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def collect(self) -> list[Cycle]:
        cycles, self._cycles = self._cycles, []
        return cycles

    def rewind(self, length: int) -> None:
        """Reaches back to the start of the last cycle, not further."""
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
        self._extend(pending.taps[:rows] if pending.taps is not None else None, start)
        self.committed += self.ids[start:length]

    def restart(self, length: int, point: TargetSnapshot | None) -> None:
        self._pending = None
        if point is not None:
            self.target.restore(point)
        elif length == 0:
            self.target.clear()
        elif length != self.target.length:
            self.target.truncate(length)
        if self.proposer is not None:
            self.proposer.truncate(length)
        del self.committed[length:]
        self.ids = list(self.committed)

    def planted(self, text: Sequence[int]) -> Proposer:
        raise UsageError("drafts can be planted in the fused engine only", "add --engine fused")

    def close(self) -> None:
        del self.target, self.proposer
