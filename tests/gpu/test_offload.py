"""What lies in pinned host memory on a GPU: gathered inside graphs, copied and restored, the same bits as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_local.catalog.bundled import Pair
from dflash_local.engine.load_pair import load
from dflash_local.kernels.allocate import pinned_empty
from dflash_local.kernels.gather_rows import gather_rows
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Request, SamplingParams
from tests.engine_sessions import Reply, random_prompt

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parent.parent / "golden"


def test_rows_of_a_pinned_table_are_its_rows_in_a_replayed_graph() -> None:
    """The ids change between replays; 2,056 numbers end in the middle of a program's piece."""
    for size, rows in ((5120, 16), (4096, 1), (2056, 64), (5120, 1024)):
        made = torch.randn(1000, size, device="cuda").to(torch.bfloat16)
        table = pinned_empty((1000, size), torch.bfloat16).copy_(made)
        assert table.is_pinned()
        ids, out = torch.zeros(rows, dtype=torch.int64, device="cuda"), torch.empty(rows, size, device="cuda").to(made)
        gather_rows(table, ids, out)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            gather_rows(table, ids, out)
        for seed in range(3):
            ids.copy_(torch.randint(0, 1000, (rows,), generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(out, made[ids])


@pytest.mark.parametrize("name", ["qwen3-v2-swa-b16", "qwen35-v2-swa-b8"])  # whose embeddings are not their heads
@pytest.mark.parametrize("precision", ["full", "8bit"])
def test_replies_are_the_same_bits(name: str, precision: str) -> None:
    pair = Pair(name, GOLDEN / name / "target", GOLDEN / name / "drafter", bundled=False)
    prompt = tuple(random_prompt(40))

    def replies(offload: str) -> list[object]:
        config = LoadConfig(device="cuda", engine="fused", offload=offload, drafter_precision=precision, exact=True)
        session = load(pair, config)
        assert session.facts.load.offload == offload
        found: list[object] = []
        for prompt_ids in (prompt, prompt[:30]):  # the second goes back to a snapshot, or to the beginning
            for sampling in (SamplingParams(), SamplingParams(temperature=0.8, seed=7)):
                request = Request(prompt_ids=prompt_ids, sampling=sampling, limits=Limits(max_new_tokens=60))
                found.append(Reply(list(session.generate(request))).ids)
        session.close()
        return found

    assert replies("none") == replies("embedding") == replies("all")
