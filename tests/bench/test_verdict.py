"""Thresholds and explanations on hand-made numbers."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_local.bench.verdict import Look, Noise, Position, explained, judge, measure
from dflash_local.engine.sampling import Sampler
from dflash_local.request import SamplingParams

GREEDY = SamplingParams()
NOISE = Noise(tau=0.1, measured=0.1, cap=0.5, positions=5000)


def position(single: float, block: float, rivals: tuple[float, float] = (0.0, 0.0), noise: float = 0.05) -> Position:
    return Position(1, Look(0, single, rivals[0], noise), Look(1, block, rivals[1]))


def test_the_threshold_is_the_percentile_and_capped() -> None:
    samples = [i / 10_000 for i in range(10_000)]
    noise = measure(samples, torch.bfloat16)
    assert noise.tau == pytest.approx(0.9989 / 2, abs=0.1) and noise.tau == 0.5  # capped
    assert noise.measured == pytest.approx(0.999, abs=1e-3) and noise.enough
    assert measure([0.2] * 10, torch.bfloat16).tau == 0.2
    assert measure([0.2] * 10, torch.float32).tau == 1e-3
    assert measure([], torch.float32).tau == 0.0


def test_the_threshold_follows_temperature_and_rounding_but_never_passes_the_cap() -> None:
    assert NOISE.threshold(0.0, GREEDY) == 0.1
    assert NOISE.threshold(0.25, GREEDY) == 0.25
    assert NOISE.threshold(0.0, SamplingParams(temperature=0.5)) == pytest.approx(0.2)
    assert NOISE.threshold(0.0, SamplingParams(temperature=0.1)) == 0.5
    assert NOISE.threshold(0.0, SamplingParams(repetition_penalty=2.0)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("found", "fine", "margin"),
    [
        (position(0.0, 0.0), True, 0.0),
        (position(0.08, 0.0, (0.0, 0.09)), True, 0.09),
        (position(0.3, 0.0), False, 0.3),  # AR would not have written it
        (position(0.0, 0.3), False, 0.3),  # the verify did not choose it
        (position(0.05, 0.0, (0.0, 0.4)), False, 0.4),  # the rival was no rival in the block
    ],
)
def test_margins_are_the_larger_of_both_passes(found: Position, fine: bool, margin: float) -> None:
    assert explained(found, NOISE, GREEDY) == (fine, margin)


@pytest.mark.parametrize(
    ("found", "fine"),
    [
        (position(math.inf, 0.0, (0.0, 0.7)), True),  # the token came in over the border
        (position(0.9, 0.0, (0.0, math.inf)), True),  # AR's token went out over it
        (position(math.inf, 0.0, (0.0, math.inf)), True),  # they changed places
        (position(math.inf, 0.6, (0.0, 0.0)), False),  # kept, but not chosen
        (position(math.inf, 0.0, (0.0, 0.7), noise=0.8), False),  # the logits moved: no border matter
        (position(math.inf, math.inf), False),  # dropped by both
        (position(0.0, 0.0, (math.inf, math.inf)), False),  # AR wrote what both drop
    ],
)
def test_a_filters_border_is_a_near_tie_only_if_each_pass_chose_what_it_kept(found: Position, fine: bool) -> None:
    assert explained(found, NOISE, GREEDY)[0] is fine


def test_judging_looks_at_perturbed_scores_of_the_right_position() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    prompt = torch.tensor([1, 2, 3])
    torch.manual_seed(0)
    logits = torch.randn(4, 16)
    sampler = Sampler(params, 5, 16, prompt)
    text = [int(sampler.choose(logits[i : i + 1], prompt[:0], sampler.noise(3 + i, 1))) for i in range(4)]
    found = judge(Sampler(params, 5, 16, prompt), 3, text, logits, iter([logits[:1], logits[1:]]))
    assert [p.single.short for p in found] == [p.block.short for p in found] == [0.0] * 4
    shifted = judge(Sampler(params, 5, 16, prompt), 4, text, logits, iter([logits]))
    assert max(p.single.short for p in shifted) > 0.01, "noise of another position explains another text"


def test_noise_is_that_of_the_gaps_among_the_best() -> None:
    single = torch.tensor([[5.0, 4.9, 0.0, -3.0]])
    block = single + torch.tensor([[0.1, -0.05, 0.0, 2.0]]) + 1.0  # a common shift is no noise, nor is the bulk
    found = judge(Sampler(GREEDY, 0, 4, torch.tensor([0])), 1, [0], single, iter([block]), single)
    assert found[0].single.noise == pytest.approx(0.15, abs=1e-5)
    assert found[0].agreed and found[0].plain is not None and found[0].plain.best == 0
