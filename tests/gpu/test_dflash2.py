"""The kernels of DFlash 2 drafters at the sizes of Qwen3.8-27B's, against their references; and in replayed graphs."""

from __future__ import annotations

import pytest
import torch

from dflash_local.drafters.dflash2.layout import SelectorConfig, candidate_buffers
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.block_convolution import block_convolution, block_convolution_reference
from dflash_local.kernels.candidate_walk import CandidateWalk, Codebooks, candidates, walk
from dflash_local.kernels.choose import Choosing, best_with_margin
from dflash_local.kernels.noise import gumbel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
VOCAB, ROWS, SEED, START = 248_320, 7, 2**63 + 11, 5000


def likely(top_k: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits [ROWS, VOCAB] whose largest are told apart in every dtype."""
    logits = torch.randn(ROWS, VOCAB, device="cuda").clamp_(max=4.0)
    for row in logits:
        ids = torch.randperm(VOCAB, device="cuda")[: 2 * top_k]
        row[ids] = 5.0 + 0.25 * torch.arange(2 * top_k, device="cuda")
    return logits.to(dtype)


def expected(
    config: SelectorConfig, books: Codebooks, projected: torch.Tensor, anchor: torch.Tensor, logits: torch.Tensor,
    temperature: float,
) -> list[int]:  # fmt: skip
    """In float32; ``temperature``: 0 is greedy."""
    noise = gumbel(SEED, START + 1, len(logits), VOCAB, logits.device)

    def choose(row: int, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return best_with_margin(scores if not temperature else scores / temperature + noise[row, ids])

    wide = Codebooks(books.predecessors.float(), books.successors.float())
    return walk(*candidates(config, logits.float()), projected.float(), wide, anchor, choose)[0].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "config",
    [SelectorConfig(256, 16, VOCAB), SelectorConfig(300, 64, VOCAB, 0.5, 12.0), SelectorConfig(16, 1, VOCAB)],
    ids=["published", "many, capped", "one"],
)
def test_the_walk_equals_its_reference(config: SelectorConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(config.top_k)
    shape = (VOCAB, config.rank)
    books = Codebooks(*(torch.randn(shape, device="cuda").mul_(0.4).to(dtype) for _ in range(2)))
    projected, anchor = torch.randn(ROWS, config.rank, device="cuda").to(dtype), torch.tensor([VOCAB - 1]).cuda()
    buffers = candidate_buffers(config, ROWS, VOCAB)
    room = Tensors(buffers, torch.device("cuda")).take(buffers)
    chooser, out = CandidateWalk(config, books, projected, anchor, room), torch.empty(ROWS, dtype=torch.int64).cuda()
    seed, start = torch.tensor([SEED - 2**64]).cuda(), torch.tensor([START], dtype=torch.int32).cuda()
    found = set()
    for _ in range(4):
        logits = likely(config.top_k, dtype)
        for rows in (ROWS, 3):
            chooser.choose(logits[:rows], out[:rows])
            assert out[:rows].tolist() == expected(config, books, projected, anchor, logits[:rows], 0.0)
            chooser.choose(logits[:rows], out[:rows], Choosing((torch.tensor([0.8]).cuda(), seed, start)))
            assert out[:rows].tolist() == expected(config, books, projected, anchor, logits[:rows], 0.8)
        found |= set(out.tolist())
    assert len(found) > 2 * ROWS


def test_a_replayed_walk_reads_the_anchor_anew() -> None:
    torch.manual_seed(0)
    config = SelectorConfig(256, 16, VOCAB)
    books = Codebooks(*(torch.randn(VOCAB, config.rank, device="cuda").bfloat16() for _ in range(2)))
    projected, anchor = torch.randn(ROWS, config.rank, device="cuda").bfloat16(), torch.tensor([1]).cuda()
    buffers, logits = candidate_buffers(config, ROWS, VOCAB), likely(config.top_k, torch.bfloat16)
    room = Tensors(buffers, torch.device("cuda")).take(buffers)
    chooser, out = CandidateWalk(config, books, projected, anchor, room), torch.empty(ROWS, dtype=torch.int64).cuda()
    chooser.choose(logits, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chooser.choose(logits, out)
    found = []
    for first in range(0, 200_000, 20_000):
        anchor.fill_(first)
        graph.replay()
        found.append(out.tolist())
        assert found[-1] == expected(config, books, projected, anchor, logits, 0.0)
    assert len({tuple(each) for each in found}) > 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 4])
def test_the_convolution_equals_its_reference(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    rows, base = torch.randn(8, 5120, device="cuda").to(dtype), torch.randn(size, 5120, device="cuda").to(dtype)
    own, x = torch.randn(8, 2, size, 320, device="cuda").to(dtype), torch.randn(8, 5120, device="cuda").to(dtype)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for side in range(2):
        want = block_convolution_reference(rows.float(), base.float(), own[:, side].float())
        found = block_convolution(rows, base, own[:, side], torch.empty_like(rows))
        torch.testing.assert_close(found.float(), want, atol=tolerance, rtol=tolerance)
        added = block_convolution(rows, base, own[:, side], x.clone(), x.clone())
        torch.testing.assert_close(added.float(), x.float() + want, atol=2 * tolerance, rtol=tolerance)
