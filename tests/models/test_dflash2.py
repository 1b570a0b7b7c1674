"""DFlash 2 drafters against golden data of the published module, and their parts against definitions spelled out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_local.drafters.dflash2.layout import BASE, CONVOLVED, KERNELS, SelectorConfig
from dflash_local.drafters.dflash2.reference import CandidateSelector, DFlash2Model
from dflash_local.kernels.block_convolution import block_convolution_reference
from dflash_local.kernels.candidate_walk import Codebooks, candidates
from dflash_local.kernels.choose import best_with_margin
from dflash_local.models.checkpoint import Checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
PAIRS = ("qwen3-dflash2-b8", "qwen3-dflash2-b16")
TEMPERATURE = 0.8  # of the sampled walk in the golden data


class Golden:
    """A pair's drafter, the target's two tables, and what is expected of the first cycle of each case."""

    def __init__(self, name: str) -> None:
        folder = GOLDEN / name
        names = ["model.embed_tokens.weight", "lm_head.weight"]
        tables = dict(Checkpoint.open(folder / "target").read(names=names))
        self.embedding, self.head = (tables[name] for name in names)
        self.drafter = DFlash2Model.load(Checkpoint.open(folder / "drafter"))
        self.cases = json.loads((folder / "expected.json").read_text())["cases"]
        self.expected = load_file(folder / "expected.safetensors")

    def of(self, number: int, name: str) -> torch.Tensor:
        return self.expected[f"case{number}.{name}"][0]

    def anchor(self, number: int) -> torch.Tensor:
        return torch.tensor(self.cases[number]["output_ids"][:1])

    def hidden(self, number: int, drafter: DFlash2Model | None = None) -> torch.Tensor:
        """The drafted rows of the first cycle."""
        drafter = drafter or self.drafter
        config, taps = drafter.config, self.of(number, "target_taps")
        ids = torch.full((config.block_size,), config.mask_token_id)
        ids[:1] = self.anchor(number)
        cache = drafter.new_cache(capacity=4)
        drafter.write_context(cache, taps, 0)
        return drafter.draft_hidden(cache, self.embedding[ids] * config.embedding_scale, len(taps))

    def walk(self, number: int, choose: Any) -> torch.Tensor:
        """The ids."""
        hidden, selector = self.hidden(number)[1:], self.drafter.selector
        return selector.walk(hidden, hidden @ self.head.T, self.anchor(number), choose)[0]


def likeliest(row: int, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return best_with_margin(scores)


@pytest.fixture(params=PAIRS, scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def test_golden_hidden_rows_and_drafts(golden: Golden) -> None:
    assert len(golden.cases) == 6
    for number in range(6):
        torch.testing.assert_close(golden.hidden(number), golden.of(number, "draft_hidden"), atol=1e-4, rtol=0)
        assert golden.walk(number, likeliest).tolist() == golden.of(number, "drafted_ids").tolist()


def test_golden_scores_of_the_candidates(golden: Golden) -> None:
    """Factor and soft cap of the logits, which candidates there are, and with what probability each is drawn behind
    the ids that the reference drew before it.
    """
    for number in range(6):
        drawn, wanted = golden.of(number, "sampled_ids"), golden.of(number, "candidate_ids")
        q, logits = golden.of(number, "candidate_probs"), golden.of(number, "draft_logits")

        def draw(row: int, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = torch.zeros(len(golden.head)).scatter(0, ids, (scores[0] / TEMPERATURE).softmax(-1))
            reference = torch.zeros(len(golden.head)).scatter(0, wanted[row], q[row])  # noqa: B023
            torch.testing.assert_close(found, reference, atol=1e-4, rtol=0)
            return (ids == drawn[row]).nonzero()[0], torch.zeros(1)  # noqa: B023

        assert golden.walk(number, draw).tolist() == drawn.tolist()
        config = golden.drafter.config
        scores, ids = candidates(config.selector, golden.hidden(number)[1:] @ golden.head.T)
        torch.testing.assert_close(scores, logits.gather(-1, ids), atol=1e-4, rtol=0)


def test_golden_data_notices_what_is_left_out(golden: Golden) -> None:
    """Either side of either convolution, the codebooks, the embedding's scale and causality: each moves the answer."""
    good = golden.of(4, "draft_hidden")
    config, weights = golden.drafter.config, golden.drafter._weights
    for module in CONVOLVED:
        base, kernels = f"layers.0.{module}.{BASE}", f"layers.0.{module}.{KERNELS}"
        identity = torch.zeros_like(weights.own_tensors[base])
        identity[:, 0] = 1
        for changed in (
            replace(weights, own_tensors={**weights.own_tensors, base: identity}),
            replace(weights, own_matrices={**weights.own_matrices, kernels: 0 * weights.own_matrices[kernels]}),
        ):
            assert (golden.hidden(4, DFlash2Model(config, changed)) - good).abs().max() > 1e-2
    causal = DFlash2Model(replace(config, causal=(True,) * config.num_layers), weights)
    assert (golden.hidden(4, causal) - good).abs().max() > 1e-2
    greedy = [golden.of(number, "draft_logits").argmax(-1).tolist() for number in range(6)]
    assert any(greedy[number] != golden.of(number, "drafted_ids").tolist() for number in range(6))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("groups", [1, 4, 12])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_convolution_is_the_sum_over_the_rows_before(size: int, groups: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, base = torch.randn(rows, 12, generator=generator), torch.randn(size, 12, generator=generator)
    own = torch.randn(rows, size, groups, generator=generator)
    expected = torch.zeros(rows, 12)
    for row in range(rows):
        for channel in range(12):
            for back in range(min(size, row + 1)):
                kernel = base[back, channel] + own[row, back, channel * groups // 12]
                expected[row, channel] += kernel * x[row - back, channel]
    torch.testing.assert_close(block_convolution_reference(x, base, own), expected, atol=1e-5, rtol=1e-5)


def small_selector(**changes: Any) -> tuple[CandidateSelector, Codebooks, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    before, after, projection = (torch.randn(shape, generator=generator) for shape in ((20, 3), (20, 3), (3, 6)))
    config, codebooks = SelectorConfig(**{"rank": 3, "top_k": 5, "vocab_size": 20, **changes}), Codebooks(before, after)
    return CandidateSelector(config, codebooks, projection), codebooks, projection


@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_the_walk_takes_the_best_follower_among_the_likeliest(top_k: int) -> None:
    selector, codebooks, projection = small_selector(top_k=top_k, output_multiplier=0.5, softcap=2.0)
    generator = torch.Generator().manual_seed(2)
    hidden, logits = torch.randn(7, 6, generator=generator), 3 * torch.randn(7, 20, generator=generator)
    before, expected = 4, []
    for row in range(7):
        likely = logits[row].argsort(descending=True)[:top_k].tolist()
        mixed = codebooks.predecessors[before] * (projection @ hidden[row])
        unary = 2 * torch.tanh(logits[row] * 0.5 / 2)
        before = likely[int(torch.stack([unary[i] + mixed @ codebooks.successors[i] for i in likely]).argmax())]
        expected.append(before)
    assert selector.walk(hidden, logits, torch.tensor([4]), likeliest)[0].tolist() == expected
    assert selector.walk(hidden[:3], logits[:3], torch.tensor([4]), likeliest)[0].tolist() == expected[:3]
    if top_k == 1:
        assert expected == logits.argmax(-1).tolist()
    else:
        assert expected != logits.argmax(-1).tolist()
