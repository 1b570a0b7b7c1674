"""L3 and L4 (a) on the trained demo pairs, and equality in every mode.

L1 and L2 stand in test_lossless_greedy.py and test_lossless_sampling.py; L4 (b) is ``dflash certify``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from dflash_local.catalog.bundled import BUNDLED, HELD_OUT, find
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.sampling import log_probabilities
from dflash_local.request import Limits, Request, SamplingParams, user_request
from tests.engine_sessions import Reply

PAIRS = pytest.mark.parametrize("pair", BUNDLED)
REPLY = 400


@cache
def session_of(pair: str) -> Session:
    return load(find(pair), LoadConfig(dtype="float32", device="cpu"))


def prompts(count: int) -> list[str]:
    rows = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    return [row["prompt"] for row in rows[:: max(1, len(rows) // count)]][:count]


def reply(session: Session, request: Request) -> Reply:
    return Reply(list(session.generate(request)))


SAMPLINGS = (SamplingParams(seed=7), SamplingParams(temperature=0.8, seed=7))


@pytest.mark.parametrize(
    ("pair", "count", "new"),
    [*((pair, 1, 32) for pair in BUNDLED), *(pytest.param(pair, 3, 120, marks=pytest.mark.slow) for pair in BUNDLED)],
)
def test_text_is_the_same_in_both_modes_and_every_block_size(pair: str, count: int, new: int) -> None:
    session = session_of(pair)
    for prompt in prompts(count):
        for sampling in SAMPLINGS:
            limits = Limits(max_new_tokens=new)
            want = reply(session, user_request(prompt, sampling=sampling, limits=limits, mode="ar")).ids
            for block in (2, 5, 8):
                request = user_request(prompt, sampling=sampling, limits=limits, block_size=block)
                assert reply(session, request).ids == want, f"{prompt!r}, block {block}, {sampling}"


@PAIRS
def test_every_token_is_the_argmax_of_the_row_that_emitted_it(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(pair)
    session.reset()
    rows: list[torch.Tensor] = []
    head = session.runner.target.head
    monkeypatch.setattr(session.runner, "_logits", lambda hidden: rows.append(head(hidden)) or rows[-1])
    answer = reply(session, user_request(prompts(1)[0], limits=Limits(max_new_tokens=100)))
    emitted = iter(answer.ids)
    lengths = iter((1, *answer.finished.stats.acceptance_lengths))
    for logits, length in zip(rows, lengths, strict=True):
        for row in logits[:length]:
            token = next(emitted, None)  # the last cycle may run past the limit
            assert token is None or token == int(row.argmax())
    assert not list(emitted), "a token was emitted that no row chose"


def sampled(session: Session, params: SamplingParams, tokens: int) -> Iterator[tuple[torch.Tensor, int]]:
    """(log-probabilities of the target, emitted token) of at least so many tokens, teacher-forced."""
    target, count = session.runner.target, 0
    for seed in range(1, 10_000):
        if count >= tokens:
            return
        prompt = prompts(40)[seed % 40]
        sampling = SamplingParams(temperature=params.temperature, seed=seed)
        request = user_request(prompt, sampling=sampling, limits=Limits(max_new_tokens=REPLY))
        ids = session.render(request).ids
        emitted = reply(session, request).ids
        session.reset()
        with torch.inference_mode():
            whole = torch.tensor([*ids, *emitted[:-1]])
            logits = target.head(target.prefill(whole, False).hidden[len(ids) - 1 :])
            logp = log_probabilities(logits, params)
        session.reset()
        count += len(emitted)
        yield from zip(logp, emitted, strict=True)


@pytest.mark.parametrize(
    ("pair", "tokens"),
    [("demo-hybrid", 400), *(pytest.param(pair, 10_000, marks=pytest.mark.slow) for pair in BUNDLED)],
)
def test_sampled_text_follows_the_targets_distribution(pair: str, tokens: int) -> None:
    """z of the summed surprise is N(0,1) and the randomised PIT uniform, if the sampling is lossless.

    At temperature 2 these toys are uncertain enough for the test to have power.
    """
    surprise = variance = 0.0
    uniform: list[float] = []
    generator = torch.Generator().manual_seed(1)
    for logp, token in sampled(session_of(pair), SamplingParams(temperature=2.0), tokens):
        p = logp.double().exp()
        finite = torch.where(p > 0, logp.double(), torch.zeros_like(p))
        mean = float((p * finite).sum())
        surprise += float(logp[token]) - mean
        variance += float((p * finite**2).sum()) - mean**2
        below = float(p[:token].sum())
        uniform.append(below + float(p[token]) * float(torch.rand((), generator=generator)))
    assert variance > 100, "too little entropy for a test with power"
    assert abs(surprise / variance**0.5) < 5
    counts = torch.histc(torch.tensor(uniform, dtype=torch.float64), 20, 0.0, 1.0)
    expected = len(uniform) / 20
    statistic = ((counts - expected) ** 2 / expected).sum()
    p_value = float(torch.special.gammaincc(torch.tensor(19 / 2).double(), statistic / 2))
    assert p_value > 1e-6
