"""Whole requests: limits, stops, cancel, faults, seeds, reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.chat.template import Rendered
from dflash_local.drafters.engines import Drafts
from dflash_local.engine import LoadConfig, load
from dflash_local.engine.session import Session
from dflash_local.errors import ContextError, EngineError, NumericsError, UsageError
from dflash_local.events import Notice, PrefillProgress, Started, Step
from dflash_local.models.fused.target import FusedTarget
from dflash_local.request import Limits, Request, SamplingParams, user_request
from tests.engine_sessions import BLOCK, Reply, ask, random_prompt, target_of, text_of
from tests.families import VOCAB
from tests.proposers import Oracle, Planted, RandomDrafts

Build = Callable[..., Session]
PROMPT = random_prompt(9)
HYBRID = "qwen3_5"
BOTH = pytest.mark.parametrize("family", ["qwen3", HYBRID])


def oracle(family: str, wrong_every: int = 0) -> Oracle:
    return Oracle(VOCAB, text_of(family, tuple(PROMPT)), wrong_every)


def test_a_prompt_that_was_counted_is_of_its_request_alone() -> None:
    """Of tools that are equal, and written otherwise."""
    session = load(find("demo-hybrid"), LoadConfig(device="cpu", dtype="float32", context=2000))

    def prompt(default: object) -> Request:
        told = {"type": "object", "properties": {"q": {"default": default}}}
        tool = {"type": "function", "function": {"name": "look", "parameters": told}}
        return user_request("hi", tools=(tool,), limits=Limits(2), return_token_ids=True)

    session.count(prompt(1))
    with_true, again = (Reply(list(session.generate(prompt(True)))).find(Started)[0] for _ in range(2))
    assert with_true.prompt_ids == again.prompt_ids
    session.close()


def test_prompt_longer_than_the_context_names_both_counts(new_session: Build) -> None:
    session = new_session("qwen3", RandomDrafts(VOCAB), context=20)
    with pytest.raises(ContextError, match="21 tokens.*20") as error:
        ask(session, random_prompt(21))
    assert error.value.exit_code == 2 and error.value.http_status == 400
    assert session.runner.target.length == 0, "nothing was run"


@BOTH
@pytest.mark.parametrize("room", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_prompt_close_to_the_context_finishes_with_length(new_session: Build, family: str, room: int) -> None:
    session = new_session(family, oracle(family, 3), context=len(PROMPT) + room)
    reply = ask(session, PROMPT)
    assert reply.finished.reason == "length"
    assert reply.ids == list(text_of(family, tuple(PROMPT)))[len(PROMPT) :][:room]
    assert session.runner.target.length <= session.facts.context


@BOTH
@pytest.mark.parametrize("new", [0, 1, BLOCK, BLOCK + 1, 30])
def test_exactly_as_many_tokens_as_asked(new_session: Build, family: str, new: int) -> None:
    for wrong_every in (0, 2, 1):
        reply = ask(new_session(family, oracle(family, wrong_every)), PROMPT, new)
        assert reply.ids == list(text_of(family, tuple(PROMPT)))[len(PROMPT) :][:new]
        assert reply.finished.reason == "length"
        assert reply.finished.usage.completion_tokens == new


@pytest.mark.parametrize("prompt", [[5], [0]])
def test_one_token_prompts_work(new_session: Build, prompt: list[int]) -> None:
    text = text_of("qwen3", tuple(prompt), 20)
    assert ask(new_session("qwen3", Oracle(VOCAB, text)), prompt, 20).ids == list(text[1:])


@BOTH
# The prompt's token, a draft, the last of a block, a bonus token, and the same of the next block.
@pytest.mark.parametrize("at", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_nothing_follows_a_stop_id_in_any_slot(new_session: Build, family: str, at: int) -> None:
    """With an oracle the reply's token 0 is the prompt's, 8 and 16 are bonus tokens, the rest accepted drafts."""
    text = list(text_of(family, tuple(PROMPT)))
    stop = text[len(PROMPT) + at]
    first = text.index(stop, len(PROMPT))
    session = new_session(family, oracle(family), stop_ids=frozenset({stop}))
    reply = ask(session, PROMPT, 40)
    assert reply.finished.reason == "stop"
    assert reply.ids == text[len(PROMPT) : first + 1]
    assert session.runner.committed == text[:first], "the stop id and what follows are not in the cache"
    assert session.runner.target.length == first
    lengths = reply.finished.stats.acceptance_lengths
    assert lengths == (BLOCK,) * -(-(len(reply.ids) - 1) // BLOCK), "the text is cut at its stop id, not its cycle"


def test_a_stop_id_that_is_drafted_but_not_accepted_does_not_stop(new_session: Build) -> None:
    text = text_of("qwen3", tuple(PROMPT))
    unused = next(i for i in range(VOCAB) if i not in text)

    class DraftsStop(Planted):
        def token(self, position: int) -> int:
            return unused

    reply = ask(new_session("qwen3", DraftsStop(VOCAB), stop_ids=frozenset({unused})), PROMPT, 20)
    assert reply.ids == list(text[len(PROMPT) : len(PROMPT) + 20])


@BOTH
@pytest.mark.parametrize("asked", [1, 2, 4])
def test_cancel_ends_within_a_cycle_and_reuse_equals_a_cold_start(new_session: Build, family: str, asked: int) -> None:
    """The n-th question is answered yes: in prefill, then before the second, third... cycle."""
    text = list(text_of(family, tuple(PROMPT)))
    session = new_session(family, oracle(family, 5))
    calls = count(1)
    reply = ask(session, PROMPT, 40, cancelled=lambda: next(calls) >= asked)
    assert reply.finished.reason == "cancelled"
    assert reply.ids == text[len(PROMPT) :][: len(reply.ids)] and len(reply.ids) < 40
    assert next(calls) == asked + 1, "nothing was asked after the yes"
    again = ask(session, PROMPT + reply.ids, 30)
    cold = ask(new_session(family, oracle(family, 5)), PROMPT + reply.ids, 30)
    assert again.ids == cold.ids == text[len(PROMPT) + len(reply.ids) :][:30]


def poison(session: Session, monkeypatch: pytest.MonkeyPatch, call: int, row: int) -> None:
    """Put one NaN into one row of the ``call``-th head product of the target."""
    calls, head = count(1), session.runner.target.head

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).clone()
        if next(calls) == call:
            logits[min(row, len(logits) - 1), 3] = float("nan")
        return logits

    monkeypatch.setattr(session.runner.target, "head", poisoned)
    target = session.runner.target
    if isinstance(target, FusedTarget):  # its blocks have their own way to the head
        finish = target.finish

        def poisoned_block(rows: int, max_seq_len: int, with_taps: bool) -> None:
            finish(rows, max_seq_len, with_taps)
            if next(calls) == call:
                target.logits[min(row, rows - 1), 3] = float("nan")

        monkeypatch.setattr(target, "finish", poisoned_block)


@BOTH
@pytest.mark.parametrize(("call", "row"), [(1, 0), (2, 0), (3, 5)])
def test_nan_in_a_verify_row_ends_the_request_and_poisons_nothing(
    new_session: Build, family: str, call: int, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = new_session(family, oracle(family, 5))
    with monkeypatch.context() as patch:
        poison(session, patch, call, row)
        with pytest.raises(NumericsError, match="not finite"):
            ask(session, PROMPT, 40)
    assert ask(session, PROMPT, 40).ids == list(text_of(family, tuple(PROMPT)))[len(PROMPT) :][:40]


def test_a_hopeless_drafter_is_switched_off_with_a_notice(new_session: Build) -> None:
    text = text_of("qwen3", tuple(PROMPT))
    reply = ask(new_session("qwen3", Oracle(VOCAB, text, wrong_every=1)), PROMPT, 60)
    assert reply.ids == list(text[len(PROMPT) : len(PROMPT) + 60])
    (notice,) = reply.find(Notice)
    assert "no draft was accepted" in notice.message
    rows = [e.rows for e in reply.events if hasattr(e, "rows")]
    assert rows[1] == BLOCK and rows[-1] == 1


def test_a_seed_gives_one_text_whatever_drafts_blocks_and_requests_before(new_session: Build) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=2**63 + 5)
    want = ask(new_session(HYBRID, None), PROMPT, 24, sampling=sampling, mode="ar").ids
    text = [*PROMPT, *want]
    for drafter in (Oracle(VOCAB, text, 4), RandomDrafts(VOCAB)):
        session = new_session(HYBRID, drafter)
        for block in (2, 5, None):
            assert ask(session, PROMPT, 24, sampling=sampling, block_size=block).ids == want
            ask(session, random_prompt(4, seed=block or 0), 5)
        assert ask(session, PROMPT, 24, sampling=sampling, mode="ar").ids == want
    other = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=6)
    assert ask(session, PROMPT, 24, sampling=other).ids != want


def test_a_request_without_a_seed_draws_a_fresh_one_and_says_it(new_session: Build) -> None:
    session = new_session("qwen3", RandomDrafts(VOCAB))
    hot = SamplingParams(temperature=1.5)
    first, second = (ask(session, PROMPT, 20, sampling=hot) for _ in range(2))
    seeds = [r.finished.stats.seed for r in (first, second)]
    assert seeds[0] != seeds[1]
    repeat = ask(session, PROMPT, 20, sampling=SamplingParams(temperature=1.5, seed=seeds[0]))
    assert repeat.ids == first.ids


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (lambda n: torch.full((n,), VOCAB), f"token {VOCAB}"),
        (lambda n: torch.full((n,), -1), "token -1"),
        (lambda n: torch.zeros(n + 1, dtype=torch.long), "shape"),
    ],
)
@pytest.mark.parametrize("new_session", ["reference"], indirect=True)  # the fused one takes the argmax of logits
def test_impossible_drafts_are_a_typed_error(
    new_session: Build, proposal: Callable[[int], torch.Tensor], message: str
) -> None:
    class Impossible(Planted):
        broken = True

        def propose(self, ids: Sequence[int], count: int, sampler: object, noise: object) -> Drafts:
            drafts = proposal(count) if self.broken else torch.zeros(count, dtype=torch.long)
            return Drafts(drafts, self.confidences(count))

    drafter = Impossible(VOCAB)
    session = new_session("qwen3", drafter)
    with pytest.raises(EngineError, match=message):
        ask(session, PROMPT)
    drafter.broken = False
    assert ask(session, PROMPT, 20).ids == list(text_of("qwen3", tuple(PROMPT)))[len(PROMPT) :][:20]


def test_thousands_of_equal_tokens_reach_the_limit(new_session: Build, prompt: int = 2_500) -> None:
    session = new_session("qwen3", RandomDrafts(VOCAB), context=prompt + 20)
    reply = ask(session, [7] * prompt, 200)
    assert reply.finished.reason == "length" and reply.finished.usage.completion_tokens == 20
    progress = reply.find(PrefillProgress)
    assert [p.done for p in progress] == sorted({p.done for p in progress}) and progress[-1].done == prompt


def test_reuse_keeps_the_longest_common_prefix_of_a_kv_only_target(new_session: Build) -> None:
    session = new_session("qwen3", oracle("qwen3", 5))
    reply = ask(session, PROMPT, 20)
    conversation = [*PROMPT, *reply.ids]
    for prompt, reused in (
        ([*conversation, 1, 2, 3], len(conversation) - 1),  # the last token was never committed
        ([*conversation[:12], 50, 51], 12),
        (conversation[:12], 11),  # a prompt's last token is always processed again
    ):
        (started,) = (again := ask(session, prompt, 20)).find(Started)
        assert started.reused_tokens == reused
        assert again.ids == ask(new_session("qwen3", RandomDrafts(VOCAB)), prompt, 20).ids
        session = new_session("qwen3", oracle("qwen3", 5))
        ask(session, PROMPT, 20)


def test_reuse_of_a_recurrent_target_takes_the_state_or_a_snapshot(new_session: Build) -> None:
    session = new_session(HYBRID, oracle(HYBRID, 5))
    stable = len(PROMPT) - 3  # as if the last three ids were the generation prompt

    def render(request: Request, *_: object) -> Rendered:
        assert request.prompt_ids is not None
        return Rendered(request.prompt_ids, stable, False)

    session.render = render  # type: ignore[assignment, method-assign]
    reply = ask(session, PROMPT, 20)
    goes_on = [*PROMPT, *reply.ids, 1, 2]
    (started,) = ask(session, goes_on, 5).find(Started)
    assert started.reused_tokens == len(PROMPT) + 19, "the present state"
    rewritten = [*PROMPT[:stable], 90, 91, 92]  # a template that rewrites the reply leaves the stable part
    session = new_session(HYBRID, oracle(HYBRID, 5))
    session.render = render  # type: ignore[assignment, method-assign]
    ask(session, PROMPT, 20)
    (started,) = (again := ask(session, rewritten, 20)).find(Started)
    assert started.reused_tokens == stable, "the snapshot before the generation prompt"
    assert again.ids == ask(new_session(HYBRID, None), rewritten, 20, mode="ar").ids


def test_a_snapshot_of_a_text_that_was_left_is_never_gone_back_to(new_session: Build) -> None:
    session, text = new_session(HYBRID, None), random_prompt(40, seed=2)
    for prompt in (random_prompt(20, seed=1), text):
        ask(session, prompt, 1, mode="ar")
    cut = [*text[:30], 1, 2]
    (started,) = (again := ask(session, cut, 20, mode="ar")).find(Started)
    assert started.reused_tokens == 0
    assert again.ids == ask(new_session(HYBRID, None), cut, 20, mode="ar").ids


@BOTH
def test_dflash_after_ar_processes_what_the_drafter_has_not_seen(new_session: Build, family: str) -> None:
    session = new_session(family, oracle(family, 5))
    first = ask(session, PROMPT, 20, mode="ar")
    goes_on = [*PROMPT, *first.ids]
    text = text_of(family, tuple(PROMPT))
    assert ask(session, goes_on, 20).ids == list(text[len(goes_on) : len(goes_on) + 20])
    assert session.runner.proposer is not None
    assert session.runner.proposer.length == session.runner.target.length == len(goes_on) + 19


def test_block_sizes_beyond_the_trained_one_and_modes_without_drafter_are_refused(new_session: Build) -> None:
    with pytest.raises(UsageError, match="larger than the trained one, 8"):
        ask(new_session("qwen3", RandomDrafts(VOCAB)), PROMPT, block_size=9)
    with pytest.raises(UsageError, match="without a drafter"):
        ask(new_session("qwen3", None), PROMPT)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        ask(new_session("qwen3", RandomDrafts(VOCAB)), [VOCAB])


def test_a_session_that_is_not_to_draft_answers_a_drafted_request_without(new_session: Build) -> None:
    for drafter in (None, RandomDrafts(VOCAB)):
        session = new_session("qwen3", drafter)
        session.drafts = False
        assert ask(session, PROMPT, block_size=9).finished.stats.mode == "ar"


def test_what_the_runner_tells_is_told_in_replies_without_drafts_too(
    new_session: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, told = new_session("qwen3", None), ["no CUDA graph"]
    monkeypatch.setattr(session.runner, "notice", lambda: told.pop() if told else "")
    assert ask(session, PROMPT, 3, mode="ar").find(Notice) == [Notice("no CUDA graph", "warning")]


def test_an_abandoned_generator_leaves_a_healthy_session(new_session: Build) -> None:
    session = new_session(HYBRID, oracle(HYBRID, 5))
    request = Request(prompt_ids=tuple(PROMPT), limits=Limits(max_new_tokens=40))
    events: Any = session.generate(request)
    for _ in range(5):
        next(events)
    events.close()
    assert ask(session, PROMPT, 40).ids == list(text_of(HYBRID, tuple(PROMPT)))[len(PROMPT) :][:40]
    assert target_of(HYBRID).length == len(PROMPT) + 39


@BOTH
@pytest.mark.parametrize("wrong_every", [0, 3])
def test_logprobs_are_the_targets_own_whoever_drafted(new_session: Build, family: str, wrong_every: int) -> None:
    """Every emitted token, the first included, with the raw log-softmax of a single forward over the text."""
    reply = ask(new_session(family, oracle(family, wrong_every)), PROMPT, 20, logprobs=3)
    found = [one for step in reply.find(Step) for one in step.logprobs]
    assert [one.token_id for one in found] == reply.ids
    whole = torch.tensor([*PROMPT, *reply.ids])
    target = target_of(family)
    target.clear()
    with torch.inference_mode():
        logits = target.head(target.prefill(whole, False).hidden[len(PROMPT) - 1 : -1])
    expected = logits.float().log_softmax(-1)
    for row, one in zip(expected, found, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert [token for token, _, _, _ in one.top] == row.topk(3).indices.tolist()
        assert one.top[0][2] == pytest.approx(float(row.max()), abs=1e-4)


def test_logprobs_are_raw_under_sampling_and_absent_when_not_asked_for(new_session: Build) -> None:
    hot = ask(new_session("qwen3", None), PROMPT, 8, mode="ar", logprobs=0, sampling=SamplingParams(2.0, seed=3))
    found = [one for step in hot.find(Step) for one in step.logprobs]
    assert len(found) == 8 and all(one.top == () for one in found)
    assert any(one.logprob < -2.0 for one in found), "temperature 2 picks unlikely tokens, and says how unlikely"
    assert not any(step.logprobs for step in ask(new_session("qwen3", None), PROMPT, 8, mode="ar").find(Step))
