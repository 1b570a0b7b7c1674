"""Choices of ids, with what lies between the best score and the next, for Triton's interpreter: see ``interpreted``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dflash_local.drafters.dflash2.layout import SelectorConfig, candidate_buffers
from dflash_local.drafters.dspark.layout import MARKOV_BLOCK
from dflash_local.kernels import candidate_walk, choose, markov_walk
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.choose import Choosing, RowChooser

Results = tuple[torch.Tensor, ...]
Checks = Iterator[tuple[str, Callable[[], Results]]]


def chosen(
    chooser: RowChooser,
    logits: torch.Tensor,
    out: torch.Tensor,
    noisy: bool,
    told: bool = True,
    head_ids: torch.Tensor | None = None,
) -> Results:
    """``out`` once the ids are in it, and their margins as far as they count, where they are asked for."""
    margins = torch.full((len(out),), -9.0) if told else None
    if noisy:
        start = torch.tensor([17], dtype=torch.int32)
        noise = torch.tensor([0.8]), torch.tensor([-(2**62) + 5]), start
        chooser.choose(logits, out, Choosing(noise, margins, head_ids))
    else:
        chooser.choose(logits, out, Choosing(None, margins, head_ids))
    return (out,) if margins is None else (out, margins.clamp(max=100.0))


def named(logits: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of so many ids of all, and these ids, ascending."""
    ids = torch.randperm(logits.shape[1])[:columns].sort().values
    return logits[:, ids].contiguous(), ids.to(torch.int32)


def choices() -> Checks:
    def run(noisy: bool, poisoned: bool, not_finite_id: int = choose.NOT_FINITE, told: bool = False) -> Results:
        logits = torch.randn(4, 5001)
        logits[1, 7] = logits[1, 4000] = 9.0  # of equals the first
        if poisoned:
            logits[2, 4999], logits[3, 0] = float("nan"), float("inf")
        out = torch.zeros(4, dtype=torch.int64)
        chooser = choose.Chooser.allocate(4, 5001, torch.device("cpu"), not_finite_id)
        return chosen(chooser, logits, out, noisy, told)

    def some(noisy: bool) -> Results:
        logits, head_ids = named(torch.randn(4, 5001), 2500)
        logits[1, 7] = logits[1, 2400] = 9.0
        logits[2, 2499] = float("nan")
        chooser = choose.Chooser.allocate(4, 5001, torch.device("cpu"), 0)
        return chosen(chooser, logits, torch.zeros(4, dtype=torch.int64), noisy, True, head_ids)

    for noisy in (False, True):
        yield f"choice of drafts, some ids, noisy {noisy}", partial(some, noisy)
        for poisoned in (False, True):
            yield f"choice, noisy {noisy}, poisoned {poisoned}", partial(run, noisy, poisoned)
        yield f"choice of drafts, poisoned, noisy {noisy}", partial(run, noisy, True, 0, True)


def walks() -> Checks:
    def run(
        noisy: bool, config: SelectorConfig, rows: int = 5, vocab: int = 5001, poisoned: bool = False, some: int = 0
    ) -> Results:
        logits = 3 * torch.randn(rows + 2, vocab)
        if poisoned:
            logits[:, 1:] = float("-inf")
        books = candidate_walk.Codebooks(torch.randn(vocab, config.rank), torch.randn(vocab, config.rank))
        buffers = candidate_buffers(config, rows + 2, vocab)
        room = Tensors(buffers, torch.device("cpu")).take(buffers)
        projected, anchor = torch.randn(rows + 2, config.rank), torch.tensor([7])
        walk = candidate_walk.CandidateWalk(config, books, projected, anchor, room)
        out = torch.full((rows,), -9)
        logits, head_ids = named(logits, some) if some else (logits, None)
        return chosen(walk, logits[:rows], out, noisy, head_ids=head_ids)

    for noisy in (False, True):
        yield f"choice of candidates, noisy {noisy}", partial(run, noisy, SelectorConfig(12, 6, 5001))
        few = SelectorConfig(8, 6, 5001)
        yield f"choice of candidates, some ids, noisy {noisy}", partial(run, noisy, few, 3, some=2500)
        capped = SelectorConfig(16, 8, 5001, output_multiplier=0.6, softcap=4.0)
        yield f"choice of candidates, capped, noisy {noisy}", partial(run, noisy, capped, 7)
    yield "choice of one candidate", partial(run, False, SelectorConfig(8, 1, 5001), 1)
    yield "choice among all ids", partial(run, True, SelectorConfig(8, 20, 20), 3, 20)
    yield "choice of candidates, wide codebooks", partial(run, False, SelectorConfig(700, 16, 300), 3, 300)
    yield "choice of the only candidate", partial(run, True, SelectorConfig(8, 5, 5001), 3, 5001, True)


def markov_walks() -> Checks:
    def run(noisy: bool, rank: int, rows: int = 5, ids: int = 501, **more: Any) -> Results:
        dtype, poisoned = more.get("dtype", torch.float32), more.get("poisoned", False)
        logits, vocab = torch.randn(rows + 2, ids), ids + 3  # the head knows more ids than are drafted
        if poisoned:
            logits[1, ids - 1], logits[2, 0] = float("nan"), float("-inf")
        before, behind = (torch.randn(vocab, rank).mul_(rank**-0.25).to(dtype) for _ in range(2))
        blocks = -(-vocab // MARKOV_BLOCK)
        room = torch.empty(blocks), torch.empty(blocks, dtype=torch.int32), torch.empty(blocks)
        weights = markov_walk.MarkovWeights(before, behind)
        if not markov_walk.runs_kernels(logits):  # the kernel sums in float32, whatever it reads
            weights = markov_walk.MarkovWeights(before.float(), behind.float())
        walk = markov_walk.MarkovWalk(weights, torch.tensor([vocab - 1]), room)
        out = torch.full((rows,), -9)
        logits, head_ids = named(logits, more["some"]) if "some" in more else (logits, None)
        return chosen(walk, logits[:rows], out, noisy, head_ids=head_ids)

    for noisy in (False, True):
        yield f"choice by the id before, noisy {noisy}", partial(run, noisy, 12)
        yield f"choice by the id before, some ids, noisy {noisy}", partial(run, noisy, 12, some=300)
        yield f"choice by the id before, poisoned, noisy {noisy}", partial(run, noisy, 12, poisoned=True)
    yield "choice by the id before, wide", partial(run, True, 300, 3, 200)
    yield "choice by the id before, 16 bits", partial(run, False, 256, 7, dtype=torch.bfloat16)
    yield "choice by the id before, one row", partial(run, False, 8, 1)


def runs() -> Checks:
    """Ids are to be equal; margins come of sums in another order."""
    for checks in (choices, walks, markov_walks):
        for name, run in checks():
            found = list[Results]()  # the kernel's and the reference's, which are run once for both checks

            def ids(run: Callable[[], Results] = run, found: list[Results] = found) -> Results:
                found.append(run())
                return found[-1][:1]

            yield name, ids
            if "drafts" in name or checks is not choices:
                yield f"margins of the {name}", lambda found=found: found.pop(0)[1:]  # type: ignore[misc]
