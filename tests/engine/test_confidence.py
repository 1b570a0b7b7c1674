"""Blocks are cut by what their drafts are worth: the text is the same, whatever is said of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.session import Session
from dflash_local.engine.verify_length import VerifyLength
from dflash_local.events import Step
from dflash_local.request import SamplingParams
from tests.engine_sessions import BLOCK, ask, random_prompt, text_of
from tests.families import VOCAB
from tests.proposers import Oracle

Build = Callable[..., Session]
COSTS = {1: 1.0, 2: 1.1, 3: 1.3, 4: 1.5, 6: 1.9, 8: 2.3}
ODD = (float("nan"), float("inf"), float("-inf"), 1e38, -1e38, 0.0)


class Hostile(Oracle):
    """Right or wrong at random, and as sure of it as it likes: of nothing, too much, too little, or the contrary."""

    chance = random.Random(3)

    def token(self, position: int) -> int:
        return super().token(position) + (self.chance.random() < 0.3)

    def confidences(self, count: int) -> torch.Tensor:
        chance = self.chance
        return torch.tensor([chance.choice((*ODD, chance.gauss(2, 4))) for _ in range(count)])


class Honest(Oracle):
    """Wrong at every eighth position, and knows it."""

    def confidences(self, count: int) -> torch.Tensor:
        at = torch.arange(self.length + 1, self.length + 1 + count)
        return torch.where(at % self.wrong_every == 0, 0.1, 5.0)


def with_costs(session: Session) -> Session:
    session.runner.costs = COSTS  # type: ignore[misc]
    return session


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)], ids=["greedy", "top-p"]
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_moe"])
def test_no_confidence_and_no_cut_changes_a_text(
    family: str, params: SamplingParams, new_session: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: Counter[int] = Counter()
    learnt, chance = VerifyLength.cut, random.Random(5)

    def cut(control: VerifyLength, confidences: Sequence[float]) -> int:
        return chance.choice((learnt(control, confidences), chance.choice(list(COSTS))))

    monkeypatch.setattr(VerifyLength, "cut", cut)
    for seed in range(2):
        prompt = random_prompt(9, seed)
        session = with_costs(new_session(family, Hostile(VOCAB, text_of(family, tuple(prompt), 160))))
        asked = SamplingParams(temperature=params.temperature, top_p=params.top_p, seed=seed)
        want = ask(session, prompt, 90, sampling=asked, mode="ar").ids
        session.reset()
        reply = ask(session, prompt, 90, sampling=asked)
        assert reply.ids == want
        used.update(dict(reply.finished.stats.verify_rows))
    assert set(used) == set(COSTS), f"blocks were to be cut everywhere: {used}"


def test_blocks_end_before_what_is_doubted(new_session: Build) -> None:
    """Once it has learnt what the drafter knows, no cycle verifies a draft that is wrong, but for the shortest."""
    prompt = random_prompt(9)
    session = with_costs(new_session("qwen3", Honest(VOCAB, text_of("qwen3", tuple(prompt), 700), 8)))
    reply = ask(session, prompt, 600)
    steps = [step for step in reply.find(Step) if step.rows > 1][40:]
    assert steps and all(step.accepted == step.drafted for step in steps if step.rows > 2)
    assert sum(step.accepted + 1 for step in steps) / len(steps) > 3.5
    session.close()


def test_an_asked_length_is_not_cut(new_session: Build) -> None:
    prompt = random_prompt(9)
    session = with_costs(new_session("qwen3", Hostile(VOCAB, text_of("qwen3", tuple(prompt), 160))))
    reply = ask(session, prompt, 60, block_size=5)
    assert {rows for rows, _ in reply.finished.stats.verify_rows} == {5}


@pytest.mark.parametrize("new_session", ["fused"], indirect=True)
def test_where_waiting_costs_too_much_confidences_are_learnt_from_all_the_same(new_session: Build) -> None:
    prompt = random_prompt(9)
    session = with_costs(new_session("qwen3", Honest(VOCAB, text_of("qwen3", tuple(prompt), 500), 8)))
    assert isinstance(session.runner, FusedRunner)
    session.runner.wait_ms = 50.0
    cuts: list[object] = []
    launch = session.runner.launch
    session.runner.launch = lambda cut=None: (cuts.append(cut), launch(cut))[1]  # type: ignore
    reply = ask(session, prompt, 400)
    choice = session.schedulers[True].choice
    assert choice is not None and choice.drafts
    control = choice.control
    assert not any(cuts) and not control.waits
    assert control.cut([5.0] * (BLOCK - 1)) == BLOCK > control.cut([5.0, *[0.1] * (BLOCK - 2)])
    assert reply.finished.stats.mean_acceptance_length is not None
