"""A head of some ids on a GPU: what it drafts, by each choice's kernels and out of each format of the whole head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash_local.catalog import bundled
from dflash_local.drafters.dflash2.layout import SelectorConfig, candidate_buffers
from dflash_local.drafters.dspark.layout import MARKOV_BLOCK
from dflash_local.engine import drafter_precision
from dflash_local.engine.drafter_precision import choose_precision
from dflash_local.engine.load_pair import load
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.candidate_walk import CandidateWalk, Codebooks
from dflash_local.kernels.choose import Chooser, Choosing, RowChooser
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.markov_walk import MarkovWalk, MarkovWeights
from dflash_local.layout.cycle import best_buffers
from dflash_local.load_config import FREQUENT, LoadConfig
from dflash_local.models.fused.linear import Linear, finish, gathered_rows
from dflash_local.request import SamplingParams
from tests.engine_sessions import ask, random_prompt
from tests.quantized_weights import fp8, gguf, int4, int8, nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IDS, ROWS, RANK = 151_936, 7, 64
SELECTOR = SelectorConfig(RANK, 16, IDS)


def on_card(buffers: Any) -> list[torch.Tensor]:
    return list(Tensors(buffers, torch.device("cuda")).take(buffers))


def by_logits(_books: Codebooks, _projected: torch.Tensor, _anchor: torch.Tensor) -> RowChooser:
    return Chooser.allocate(ROWS, IDS, torch.device("cuda"), not_finite_id=0)


def by_candidates(books: Codebooks, projected: torch.Tensor, anchor: torch.Tensor) -> RowChooser:
    return CandidateWalk(SELECTOR, books, projected, anchor, on_card(candidate_buffers(SELECTOR, ROWS, IDS)))


def by_the_id_before(books: Codebooks, _projected: torch.Tensor, anchor: torch.Tensor) -> RowChooser:
    return MarkovWalk(MarkovWeights(*books), anchor, on_card(best_buffers("markov", -(-IDS // MARKOV_BLOCK))))


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("chooser_of", [by_logits, by_candidates, by_the_id_before])
def test_columns_of_some_ids_give_what_all_columns_give(chooser_of: Callable[..., RowChooser], noisy: bool) -> None:
    """With the other ids out of reach the whole head chooses the same ids, to the bit of their margins, in a graph."""
    torch.manual_seed(3)
    ids = torch.randperm(IDS, device="cuda")[:FREQUENT].sort().values
    logits = 3 * torch.randn(ROWS, IDS, device="cuda", dtype=torch.bfloat16)
    few = logits[:, ids].contiguous()
    whole = torch.full_like(logits, -3e4).index_copy_(1, ids, few)
    books = Codebooks(*(torch.randn(IDS, RANK, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(2)))
    projected = torch.randn(ROWS, RANK, device="cuda", dtype=torch.bfloat16)
    chooser = chooser_of(books, projected, torch.tensor([IDS - 1], device="cuda"))
    temperature, seed = torch.tensor([0.8]).cuda(), torch.tensor([2**60 + 3]).cuda()
    start = torch.tensor([700], dtype=torch.int32).cuda()

    def chosen(of: torch.Tensor, head_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, margins = torch.zeros(ROWS, dtype=torch.int64).cuda(), torch.zeros(ROWS).cuda()

        def run() -> None:
            if noisy:
                chooser.choose(of, out, Choosing((temperature, seed, start), margins, head_ids))
            else:
                chooser.choose(of, out, Choosing(None, margins, head_ids))

        run()
        torch.cuda.synchronize()
        out.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        return out, margins

    (want, leads), (found, margins) = chosen(whole, None), chosen(few, ids.to(torch.int32))
    assert torch.equal(found, want) and bool(torch.isin(found, ids).all()) and int(found.max()) > FREQUENT
    assert torch.equal(margins, leads)


@pytest.mark.parametrize(
    "weight_of",
    [
        lambda: int4(96, 256, 32, True, device="cuda"),
        lambda: int8(96, 256, 256, device="cuda"),
        lambda: fp8(96, 256, device="cuda"),
        lambda: nvfp4(96, 256, device="cuda"),
        lambda: gguf("Q6_K", 96, 256, device="cuda"),
    ],
    ids=["int4", "int8", "fp8", "nvfp4", "Q6_K"],
)
def test_rows_are_taken_out_of_packed_codes(weight_of: Callable[[], Any]) -> None:
    head = Linear(weight_of())
    finish([head])
    assert isinstance(head.weight, FragmentWeight)
    ids = torch.tensor([0, 5, 40, 41, 95], device="cuda")
    some = gathered_rows(head, ids, False).weight
    assert isinstance(some, torch.Tensor) and torch.equal(some, head.weight.dequantized().to(some.dtype)[ids])


@pytest.mark.parametrize("pair", ["demo", "demo-hybrid"])
@pytest.mark.parametrize("word", ["frequent", "8bit-frequent"])
def test_a_frequent_head_changes_no_reply(pair: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_precision, "FREQUENT", 256)
    wanted = LoadConfig(dtype="bfloat16", device="cuda", engine="fused", exact=True, drafter_precision="full")
    session = load(bundled.find(pair), wanted)
    prompt, samplings = random_prompt(15), (SamplingParams(), SamplingParams(temperature=1.5, seed=5))
    want = [ask(session, prompt, 200, sampling=how, mode="ar").ids for how in samplings]
    session.reset()
    runner: Any = session.runner
    runner._graphs.clear()
    said = sorted(set(want[0] + want[1]), reverse=True)
    choose_precision(runner.proposer, word, session.facts.block_size, said=said)
    assert (type(runner.proposer.head.weight) is FragmentWeight) == (word == "8bit-frequent")
    lengths: list[int] = []
    for how, ids in zip(samplings, want, strict=True):
        reply = ask(session, prompt, 200, sampling=how, mode="dflash")
        assert reply.ids == ids
        lengths += reply.finished.stats.acceptance_lengths
    assert max(lengths) > 1, "drafts of chosen ids are accepted"
