"""Describe how a token is chosen from logits: processors, temperature, filters, shared noise.

Drafter and verifier use the same noise: one seed gives one text with any drafter, any block length, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from dflash_local.kernels.choose import best_with_margin
from dflash_local.kernels.noise import gumbel
from dflash_local.layout.cycle import ROWS_TOGETHER
from dflash_local.request import SamplingParams


def log_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return log-probabilities [M, V] float32 after temperature, top-k, top-p and min-p; -inf where filtered. Each
    filter acts on what the one before left, renormalised, keeps what ties with the last one kept, and at least one.
    """
    scaled = logits.float() / params.temperature
    vocab = scaled.shape[-1]
    if 0 < params.top_k < vocab:
        smallest = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    logp = scaled.log_softmax(-1)
    if params.top_p < 1.0:
        ordered = logp.sort(dim=-1, descending=True).values
        mass = ordered.exp()
        before = mass.cumsum(-1) - mass
        kept = (before < params.top_p).sum(-1, keepdim=True).clamp_(min=1)
        logp = logp.masked_fill(logp < ordered.gather(-1, kept - 1), float("-inf")).log_softmax(-1)
    if params.min_p > 0.0:
        best = logp.amax(-1, keepdim=True)
        floor = best + torch.log(torch.tensor(params.min_p, device=logp.device))
        logp = logp.masked_fill(logp < torch.minimum(floor, best), float("-inf")).log_softmax(-1)
    return logp


class Likelihood(NamedTuple):
    """Natural log probability of an emitted token and of the likeliest ones, as (id, log probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def likelihoods(logits: torch.Tensor, chosen: torch.Tensor, top: int | None) -> tuple[Likelihood, ...]:
    """Return what the target thought of the ``chosen`` ids [M], from its raw logits [>= M, V]; nothing without top."""
    if top is None:
        return ()
    logp = logits[: len(chosen)].float().log_softmax(-1)
    own = logp.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    best = logp.topk(min(top, logp.shape[-1]), dim=-1)
    rows = zip(chosen.tolist(), own.tolist(), best.indices.tolist(), best.values.tolist())
    return tuple(Likelihood(token, value, tuple(zip(ids, values))) for token, value, ids, values in rows)


class LogitsProcessor(Protocol):
    """What changes logits by the text so far. Nothing of a cycle stays behind in it but what ``accept`` was told."""

    def apply(self, logits: torch.Tensor, drafts: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return logits [M, V]; row i follows what was accepted and the ``first`` + i first ``drafts``."""

    def accept(self, ids: Sequence[int]) -> None:
        """Take ids as emitted."""


class Guide(LogitsProcessor, Protocol):
    """One that works on the host, with the drafts of a cycle before the target's logits are there."""

    def begin(self) -> None:
        """Compute what needs no drafts, while they are made."""

    def forced(self, drafts: Sequence[int]) -> Sequence[int]:
        """Return the drafts, or in their place ids that are sure to come, up to one behind which nothing is emitted."""

    def prepare(self, drafts: Sequence[int], rows: int) -> None:
        """Compute what ``apply`` of the cycle's rows needs."""


class Penalties:
    """Repetition (CTRL, arXiv 1909.05858) counts prompt and reply, presence and frequency the reply only."""

    def __init__(self, params: SamplingParams, vocab: int, prompt: torch.Tensor) -> None:
        self._params = params
        self._seen = torch.zeros(vocab, dtype=torch.int32, device=prompt.device)
        self._reply = torch.zeros_like(self._seen)
        self._add(self._seen, prompt)

    @staticmethod
    def _add(counts: torch.Tensor, ids: torch.Tensor) -> None:
        counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))

    def accept(self, ids: Sequence[int]) -> None:
        emitted = torch.tensor(ids, dtype=torch.long, device=self._seen.device)
        self._add(self._seen, emitted)
        self._add(self._reply, emitted)

    def apply(self, logits: torch.Tensor, drafts: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Penalise logits [M, V] in float32; row i sees the counted tokens and the ``first`` + i first ``drafts``."""
        rows = len(logits)
        extra = torch.zeros(rows, logits.shape[-1], dtype=torch.int32, device=logits.device)
        self._add(extra[0], drafts[:first])
        extra[1:] = extra[0]
        for i in range(1, rows):
            extra[i:, drafts[first + i - 1]] += 1
        logits = logits.float()
        params = self._params
        if params.repetition_penalty != 1.0:
            penalised = torch.where(logits < 0, logits * params.repetition_penalty, logits / params.repetition_penalty)
            logits = torch.where(self._seen + extra > 0, penalised, logits)
        reply = self._reply + extra
        logits = logits - params.presence_penalty * (reply > 0)
        return logits - params.frequency_penalty * reply


class Sampler:
    """Chooses the target's tokens and the drafter's proposals for one request.

    Args:
        params: the request's sampling parameters. seed: 64-bit seed of the noise.
        vocab: width of the logits. prompt: ids [P] that penalties count.
        guides: what changes the target's logits besides penalties.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab: int,
        prompt: torch.Tensor,
        guides: Iterable[Guide] = (),
    ) -> None:
        self.params, self.seed, self.vocab = params, seed, vocab
        self.device = prompt.device
        self.guides = tuple(guides)
        self.processors: list[LogitsProcessor] = [
            *self.guides,
            *([Penalties(params, vocab, prompt)] if params.penalised else []),
        ]

    def noise(self, first: int, rows: int) -> torch.Tensor | None:
        """Draw noise for the tokens at ``first ..``, once per cycle for drafter and verifier; None when greedy."""
        if self.params.greedy:
            return None
        return gumbel(self.seed, first, rows, self.vocab, self.device)

    def forced(self, drafts: torch.Tensor) -> Sequence[int] | None:
        """Return a cycle's drafts [m] up to one behind which nothing is emitted, with ids that are sure to come in the
        place of wrong ones; ``drafts`` begins with the same. None without guides: the host then does not wait for
        drafts of a device.
        """
        if not self.guides or not len(drafts):
            return None
        for each in self.guides:
            each.begin()
        proposed: list[int] = drafts.tolist()  # the host waits for them
        ids = proposed
        for each in self.guides:
            ids = list(each.forced(ids))
        if ids != proposed[: len(ids)]:
            drafts[: len(ids)].copy_(torch.tensor(ids))
        return ids

    def prepare(self, drafts: Sequence[int] | None, rows: int) -> None:
        """Take what ``forced`` gave before ``choose`` of so many rows, best while the target's pass runs: the host
        works on it.
        """
        for each in self.guides:
            each.prepare(drafts or (), rows)

    def emitted(self, ids: Sequence[int]) -> None:
        for each in self.processors:
            each.accept(ids)

    def draft(self, logits: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the drafter's proposals [m] from its logits [m, <= V]: the noisy argmax, no filters. Returns their
        margins beside them.
        """
        if noise is None:
            return best_with_margin(logits)
        return best_with_margin(logits.float() / self.params.temperature + noise[:, : logits.shape[-1]])

    def scores(
        self, logits: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor | None, first: int = 0
    ) -> torch.Tensor:
        """Return perturbed scores [M, V], whose argmax is chosen; row i follows the ``first`` + i first ``drafts``."""
        for each in self.processors:
            logits = each.apply(logits, drafts, first)
        if noise is None:
            return logits
        return log_probabilities(logits, self.params) + noise

    def choose(self, logits: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Choose the target's tokens [M], one for each row of ``logits`` [M, V], a few rows at a time."""
        found = []
        for first in range(0, len(logits), ROWS_TOGETHER):
            rows = slice(first, first + ROWS_TOGETHER)
            own = None if noise is None else noise[rows]
            found.append(self.scores(logits[rows], drafts, own, first).argmax(-1))
        return torch.cat(found)
