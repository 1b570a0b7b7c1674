"""Token choice: filters against float64 references, penalties against a one-row-at-a-time count."""

from __future__ import annotations

import pytest
import torch

from dflash_local.engine.sampling import Sampler, log_probabilities
from dflash_local.request import SamplingParams

V = 64


def reference(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities of one row in float64, by sorting, the way the definitions read."""
    p = torch.softmax(row.double() / params.temperature, -1)
    if 0 < params.top_k < len(p):
        p[p < p.sort(descending=True).values[params.top_k - 1]] = 0
        p /= p.sum()
    if params.top_p < 1:
        order = p.argsort(descending=True)
        total = 0.0
        kept: list[int] = []
        for token in order.tolist():
            if kept and total >= params.top_p:
                break
            kept.append(token)
            total += p[token].item()
        keep = torch.zeros_like(p, dtype=torch.bool)
        keep[kept] = True
        p[~keep] = 0
        p /= p.sum()
    if params.min_p > 0:
        p[p < params.min_p * p.max() * (1 - 1e-6)] = 0
        p /= p.sum()
    return p


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.99),
        SamplingParams(temperature=0.3, top_k=5),
        SamplingParams(temperature=1.7, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_probabilities_equal_a_float64_reference(params: SamplingParams) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, V) * 3
    got = log_probabilities(logits, params).exp().double()
    want = torch.stack([reference(row, params) for row in logits])
    assert (got - want).abs().max() < 1e-6


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, min_p=1.0),
    ],
    ids=str,
)
def test_at_least_one_token_is_kept(params: SamplingParams) -> None:
    logits = torch.randn(16, V)
    probabilities = log_probabilities(logits, params).exp()
    assert torch.equal(probabilities.argmax(-1), logits.argmax(-1))
    assert (probabilities.max(-1).values > 0.99).all()


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.875, 3), (0.9375, 5), (0.96875, 5)])
def test_a_sum_that_equals_top_p_is_enough(top_p: float, kept: int) -> None:
    """The fewest tokens whose sum reaches it, as in vLLM; those that tie with the last one stay as well."""
    shares, places = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16]), [40, 3, 17, 63, 0]
    logits = torch.full((6, V), -1e4).index_copy_(1, torch.tensor(places), shares.log().expand(6, -1))
    assert torch.equal(logits.softmax(-1)[:, places], shares.expand(6, -1)), "the sums are exact in float32"
    params = SamplingParams(temperature=1.0, top_p=top_p)
    found = log_probabilities(logits, params)
    assert all(set(row.isfinite().nonzero().flatten().tolist()) == set(places[:kept]) for row in found)
    assert found[0, places[0]].exp().item() == pytest.approx(0.5 / shares[:kept].sum().item())
    chosen = set()
    for seed in range(50):  # a drafted block of six rows, and the same rows one at a time
        sampler = Sampler(params, seed, V, torch.tensor([0]))
        drafts, noise = torch.zeros(5, dtype=torch.long), sampler.noise(7, 6)
        assert noise is not None
        block = sampler.choose(logits, drafts, noise)
        alone = [sampler.choose(logits[:1], drafts[:0], noise[row : row + 1]) for row in range(6)]
        assert torch.equal(block, torch.cat(alone))
        chosen |= set(block.tolist())
    assert chosen == set(places[:kept])


def test_top_k_zero_and_beyond_the_vocabulary_keep_everything() -> None:
    logits = torch.randn(4, V)
    plain = log_probabilities(logits, SamplingParams(temperature=1.0))
    for top_k in (0, V, V + 1):
        assert torch.equal(plain, log_probabilities(logits, SamplingParams(temperature=1.0, top_k=top_k)))
    assert torch.equal(plain, log_probabilities(logits, SamplingParams(temperature=1.0, top_p=1.0)))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), 1, V, torch.tensor([1]))
    assert sampler.noise(0, 4) is None


@pytest.mark.parametrize("temperature", [1e-4, 2.0, 5.0])
def test_extreme_temperatures_do_not_overflow(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), 1, V, torch.tensor([1]))
    logits = torch.randn(3, V) * 1000
    assert torch.isfinite(sampler.scores(logits, torch.tensor([1, 2]), sampler.noise(5, 3)).amax(-1)).all()


def test_penalties_of_a_block_equal_penalties_one_token_at_a_time() -> None:
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    prompt, drafts = torch.tensor([3, 4, 4]), torch.tensor([9, 3, 9])
    logits = torch.randn(4, V)
    block = Sampler(params, 0, V, prompt)
    block.emitted([7])
    rows = block.scores(logits, drafts, None)
    single = Sampler(params, 0, V, prompt)
    single.emitted([7])
    for i in range(4):
        assert torch.equal(rows[i : i + 1], single.scores(logits[i : i + 1], drafts[:0], None))
        if i < 3:
            single.emitted(drafts[i : i + 1].tolist())


def test_repetition_counts_the_prompt_and_presence_does_not() -> None:
    prompt, none = torch.tensor([3]), torch.tensor([], dtype=torch.long)
    logits = torch.full((1, V), 2.0)
    repetition = Sampler(SamplingParams(repetition_penalty=2.0), 0, V, prompt).scores(logits, none, None)
    presence = Sampler(SamplingParams(presence_penalty=1.0), 0, V, prompt).scores(logits, none, None)
    assert repetition[0, 3] == 1.0 and repetition[0, 4] == 2.0
    assert torch.equal(presence, logits)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, top_k=7, top_p=0.9, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.4),
        SamplingParams(temperature=0.0, frequency_penalty=0.5),
        SamplingParams(temperature=1.0),
        SamplingParams(),
    ],
)
@pytest.mark.parametrize("rows", [1, 4, 5, 16])
def test_tokens_chosen_a_few_rows_at_a_time_are_those_of_all_rows(params: SamplingParams, rows: int) -> None:
    """Each row sees the drafts before it, also across the border of two slices."""
    generator = torch.Generator().manual_seed(rows)
    sampler = Sampler(params, 11, V, torch.tensor([1, 2, 2]))
    logits = torch.randn(rows, V, generator=generator)
    drafts = torch.randint(V, (max(rows - 1, 0),), generator=generator)
    noise = sampler.noise(3, rows)
    assert torch.equal(sampler.choose(logits, drafts, noise), sampler.scores(logits, drafts, noise).argmax(-1))
