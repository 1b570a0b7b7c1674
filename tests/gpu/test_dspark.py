"""The kernels of DSpark drafters at the sizes of Qwen3's, against their reference; in replayed graphs; both engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.drafters.dspark.layout import MARKOV_BLOCK
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.choose import Choosing, best_with_margin
from dflash_local.kernels.markov_walk import MarkovWalk, MarkovWeights, walk
from dflash_local.kernels.noise import gumbel
from dflash_local.layout.cycle import best_buffers
from dflash_local.request import SamplingParams
from tests.dspark_checkpoints import DRAFTS, TARGET, VOCAB, raw, save_drafter
from tests.engine_sessions import ask

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IDS, ROWS, SEED, START = 151_936, 7, 2**63 + 11, 5000
TEMPERATURE = 0.8
PROMPTS = [list(range(first, first + 12)) for first in (3, 30, 60)]


def weights_of(rank: int, dtype: torch.dtype, ids: int = IDS) -> MarkovWeights:
    return MarkovWeights(*(torch.randn(ids, rank, device="cuda").mul_(rank**-0.25).to(dtype) for _ in range(2)))


def chooser_of(weights: MarkovWeights, anchor: torch.Tensor) -> MarkovWalk:
    buffers = best_buffers("markov", -(-len(weights.following) // MARKOV_BLOCK))
    return MarkovWalk(weights, anchor, Tensors(buffers, torch.device("cuda")).take(buffers))


def sample(chooser: MarkovWalk, logits: torch.Tensor, out: torch.Tensor) -> None:
    seed, start = torch.tensor([SEED - 2**64]).cuda(), torch.tensor([START], dtype=torch.int32).cuda()
    chooser.choose(logits, out, Choosing((torch.tensor([TEMPERATURE]).cuda(), seed, start)))


def check(
    found: list[int], weights: MarkovWeights, anchor: torch.Tensor, logits: torch.Tensor, temperature: float
) -> None:
    """Each id is the best of its row behind the ids that were found, up to what sums in another order may round."""
    noise = gumbel(SEED, START + 1, len(logits), logits.shape[1], logits.device)
    wide = MarkovWeights(weights.previous.double(), weights.following.double())

    def followed(row: int, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exact = scores if not temperature else scores / temperature + noise[row]
        off = float(exact.max() - exact[0, found[row]])
        assert off <= 1e-4, f"row {row}: the best is {int(exact.argmax())}, {found[row]} is {off} behind it"
        return torch.tensor([found[row]], device=logits.device), best_with_margin(exact)[1]

    assert walk(logits, wide, anchor, followed)[0].tolist() == found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [256, 600, 12], ids=["published", "several tiles", "narrow"])
def test_the_walk_equals_its_reference(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    weights, anchor = weights_of(rank, dtype), torch.tensor([IDS - 1]).cuda()
    chooser, out, found = chooser_of(weights, anchor), torch.empty(ROWS, dtype=torch.int64).cuda(), set()
    for ids in (IDS, IDS, 32_768, 1000):  # also of a head that gives the first of them only
        logits = torch.randn(ROWS, ids, device="cuda").mul_(4).to(dtype)
        for rows in (ROWS, 3, 1):
            out.fill_(-9)
            chooser.choose(logits[:rows], out[:rows])
            check(out[:rows].tolist(), weights, anchor, logits[:rows], 0.0)
            assert set(out[rows:].tolist()) <= {-9}
            sample(chooser, logits[:rows], out[:rows])
            check(out[:rows].tolist(), weights, anchor, logits[:rows], TEMPERATURE)
            found |= set(out[:rows].tolist())
    assert len(found) > 2 * ROWS


@pytest.mark.parametrize("noisy", [False, True])
def test_a_replayed_walk_reads_anchor_and_logits_anew(noisy: bool) -> None:
    """A hundred times: each kernel begins while the one before it runs."""
    torch.manual_seed(0)
    weights, anchor = weights_of(256, torch.bfloat16), torch.tensor([1]).cuda()
    logits, out = torch.empty(ROWS, IDS, device="cuda").bfloat16(), torch.empty(ROWS, dtype=torch.int64).cuda()
    chooser = chooser_of(weights, anchor)
    temperature = torch.tensor([TEMPERATURE]).cuda()
    seed, start = torch.tensor([SEED - 2**64]).cuda(), torch.tensor([START], dtype=torch.int32).cuda()

    def work() -> None:
        if noisy:
            chooser.choose(logits, out, Choosing((temperature, seed, start)))
        else:
            chooser.choose(logits, out)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    found = []
    for first in range(0, 150_000, 1500):
        anchor.fill_(first)
        logits.normal_().mul_(3)
        graph.replay()
        found.append(out.tolist())
        check(found[-1], weights, anchor, logits, TEMPERATURE if noisy else 0.0)
    assert len({tuple(each) for each in found}) > 50


def session_of(folder: Path, engine: str, **options: bool) -> Session:
    wanted = LoadConfig(dtype="float32", device="cuda", engine=engine, **options)  # type: ignore[arg-type]
    return load(find(str(TARGET), str(folder)), wanted)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, seed=4)])
def test_both_engines_write_and_draft_the_same_in_float32(sampling: SamplingParams, tmp_path: Path) -> None:
    """By a drafter that knows the text of one prompt by heart, and by one of random weights."""
    random = save_drafter(tmp_path / "random", raw())
    plain = [ask(session_of(random, "reference"), prompt, 60, sampling=sampling, mode="ar").ids for prompt in PROMPTS]
    text = [PROMPTS[0][-1], *plain[0]]
    for folder in (random, save_drafter(tmp_path / "learnt", raw(markov_rank=VOCAB), text=text)):
        fused, reference = (session_of(folder, engine) for engine in ("fused", "reference"))
        assert fused.facts.engine == "fused" and reference.facts.engine == "reference"
        for prompt, want in zip(PROMPTS, plain, strict=True):
            replies = [
                ask(session, prompt, 30, sampling=sampling, block_size=DRAFTS + 1) for session in (fused, reference)
            ]
            assert [reply.ids for reply in replies] == [want[:30]] * 2
            one, two = (reply.finished.stats.acceptance_lengths for reply in replies)
            assert one == two
            if folder.name == "learnt" and prompt is PROMPTS[0]:
                assert max(one) >= 4, "it drafts what it has by heart"
