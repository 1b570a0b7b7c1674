"""What a block drafts, by properties that need no recorded numbers: its context, its slots, its temperature, its noise.

Wrong drafts change no text, so the tests of the text cannot see them: here they are compared with a cold start, and
with what the target itself will choose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from dflash_local.engine.session import Session
from dflash_local.events import Step
from dflash_local.request import SamplingParams
from tests.drafting import Known, cold_logits, greedy_text, knowing, noted, sampled_texts
from tests.engine_sessions import BLOCK, Reply, ask, random_prompt
from tests.families import VOCAB
from tests.proposers import Oracle

Build = Callable[..., Session]
PROMPT = random_prompt(9)
BOTH = pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
# A recurrent target, which has caches of keys and values as well; one that has these alone in the long tests.
HYBRID = pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_5"])
CASES = ((0.3, 7), (1.0, 2**63 + 5), (0.0, 3), (1.7, 9), (0.3, 8))  # temperature, seed
BLOCKS = (BLOCK, 3, BLOCK, 5, 2)  # of each case
NEW = 30


def turn(session: Session, family: str, prompt: list[int], new: int, wrong_every: int, **fields: Any) -> list[int]:
    """One reply by an oracle's drafts; what the drafter drafted meanwhile must be what it drafts from a cold start."""
    text = greedy_text(family, prompt)
    drafter = session.runner.proposer
    drafter.oracle, drafter.noted = Oracle(VOCAB, text, wrong_every), []
    reply = ask(session, prompt, new, **fields)
    assert reply.ids == text[len(prompt) :][: len(reply.ids)]
    found = list(drafter.noted)
    cold = cold_logits(family, text, [draft.start for draft in found])
    for draft in found:
        assert draft.anchor == text[draft.start]
        torch.testing.assert_close(draft.logits, cold[draft.start][: len(draft.logits)], atol=1e-3, rtol=0)
    return [*prompt, *reply.ids]


# All drafts refused and none are in the long tests: some of each are between them.
@BOTH
@pytest.mark.parametrize("wrong_every", [4, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 1))])
def test_a_block_drafts_from_the_taps_of_the_committed_text_whatever_was_rejected(
    new_session: Build, family: str, wrong_every: int
) -> None:
    session = new_session(family, noted)
    turn(session, family, PROMPT, 30, wrong_every)
    assert len(session.runner.proposer.noted) >= 30 // BLOCK


@HYBRID
def test_a_block_drafts_from_the_taps_of_the_committed_text_over_many_turns(new_session: Build, family: str) -> None:
    session = new_session(family, noted)
    talk = turn(session, family, PROMPT, 21, 5)  # ends inside a block
    talk = turn(session, family, [*talk, 1, 2, 3], 20, 0, block_size=3)  # goes on, in short blocks
    asked = iter((False, False, False, True))
    talk = turn(session, family, [*talk, 4], 40, 3, cancelled=lambda: next(asked))
    talk = turn(session, family, [*talk, 6, 7], 9, 4, mode="ar")  # whose taps nobody takes
    talk = turn(session, family, [*talk, 8], 12, 4)
    turn(session, family, [*talk[:14], 50, 51], 20, 4)  # goes back behind what was said


def check_lengths(reply: Reply, known: Known, block: int) -> None:
    """Each cycle accepted exactly the drafts before the first that was made wrong."""
    start, steps = len(PROMPT), [step for step in reply.find(Step) if step.rows]
    assert len(steps) > 2
    for step in steps:
        assert (step.drafted, step.rows) == (block - 1, block)
        assert step.accepted == known.accepted(start, block - 1), f"the block at {start}"
        start += step.accepted + 1


# With log probabilities the fused engine's sampler works on the host, whatever is accepted.
@BOTH
@pytest.mark.parametrize(
    ("logprobs", "wrong_every"),
    [(None, 0), (0, 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((None, 5), (0, 0)))],
)
def test_a_drafter_that_equals_the_target_is_right_in_every_slot_at_every_temperature(
    new_session: Build, family: str, wrong_every: int, logprobs: int | None
) -> None:
    """Drafts and choices share temperature and noise, so equal logits give equal ids; and the text is the definition's.

    One request after the other, so that nothing of the one before may be left.
    """
    known = Known(family, wrong_every)
    session = new_session(family, partial(knowing, known))
    texts = sampled_texts(family, tuple(PROMPT), CASES, NEW + 2 * BLOCK)
    for (temperature, seed), block, text in zip(CASES, BLOCKS, texts, strict=True):
        known.learn(text)
        sampling = SamplingParams(temperature=temperature, seed=seed)
        reply = ask(session, PROMPT, NEW, sampling=sampling, logprobs=logprobs, block_size=block)
        assert reply.ids == list(text[len(PROMPT) :][:NEW]), sampling
        check_lengths(reply, known, block)
