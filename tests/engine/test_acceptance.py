"""One definition of acceptance: drafts the target accepted, uncut, and the bonus token, in all figures of a reply."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from dflash_local.api.metrics import Metrics
from dflash_local.api.reply import Tally
from dflash_local.engine import Session
from dflash_local.events import Step
from dflash_local.request import Request
from dflash_local.service.ticket import Ticket
from dflash_local.ui.readings import Readings
from tests.engine_sessions import BLOCK, Reply, ask, random_prompt, text_of
from tests.families import VOCAB
from tests.proposers import Oracle

Build = Callable[..., Session]
PROMPT = random_prompt(9)


def counters(reply: Reply) -> tuple[dict[str, int], list[int]]:
    """What ``/metrics`` says after the reply: counters, and accepted drafts by their place in the draft."""
    metrics = Metrics()
    for event in reply.events:
        metrics.observe(Request(prompt="x"), event)
    text = metrics.text("m", 0, 0)
    found = {
        name: int(value)
        for name, value in re.findall(r"^vllm:(\w+)_total\{engine=\"0\",model_name=\"m\"\} (\d+)\.0$", text, re.M)
    }
    return found, [int(n) for n in re.findall(r"per_pos_total\{.*position=\"\d+\"\} (\d+)\.0", text)]


def agree(reply: Reply) -> tuple[int, ...]:
    """Assert that every source of figures says the same of the reply; its acceptance lengths."""
    stats, usage = reply.finished.stats, reply.finished.usage
    lengths, mean = stats.acceptance_lengths, stats.mean_acceptance_length
    cycles = [event for event in reply.find(Step) if event.rows]
    drafting = [event for event in cycles if event.drafted]
    assert lengths == tuple(event.accepted + 1 for event in drafting)
    assert stats.undrafted_cycles == len(cycles) - len(drafting)
    assert mean == (sum(lengths) / len(lengths) if lengths else None)
    kept = [length - 1 for length in lengths]

    found, places = counters(reply)
    assert found["spec_decode_num_drafts"] == len(lengths)
    assert found["spec_decode_num_accepted_tokens"] == sum(kept) == sum(places)
    assert found["spec_decode_num_draft_tokens"] == sum(event.drafted for event in drafting)
    assert places == [sum(n > place for n in kept) for place in range(len(places))]
    for place, share in enumerate(stats.acceptance_per_position):
        assert share == places[place] / sum(event.drafted > place for event in drafting)

    tally = Tally(drafted=sum(event.drafted for event in reply.find(Step)))
    shown = tally.metrics(reply.finished)["speculative_decoding"]
    if lengths:
        assert shown["mean_acceptance_length"] == mean and shown["num_spec_steps"] == len(lengths)
        assert shown["num_accepted_draft_tokens"] == sum(kept)
        assert shown["num_draft_tokens"] == found["spec_decode_num_draft_tokens"]
        assert {n: count for n, count in enumerate(shown["acceptance_histogram"]) if count} == Counter(kept)
    else:
        assert shown is None

    both: tuple[list[Any], ...] = (reply.events, merged(reply))
    for events in both:
        readings = Readings()
        readings.begin(stats.mode)
        for event in events[:-1]:
            readings.take(event)
        assert readings.acceptance_mean == mean and readings.cycles == len(lengths), "before the end is known"

    assert len(reply.ids) == usage.completion_tokens == found["generation_tokens"]
    told = tally.usage(reply.finished)
    assert told is not None and told["completion_tokens"] == usage.completion_tokens
    if stats.decode_s and usage.completion_tokens > 1:
        assert stats.tokens_per_s == pytest.approx((usage.completion_tokens - 1) / stats.decode_s)
    if lengths:
        assert stats.turn_acceptance_length == usage.completion_tokens / len(cycles)
    return lengths


def merged(reply: Reply) -> list[object]:
    """The events as a reader gets them that is slower than the engine."""
    ticket = Ticket(Request(prompt_ids=tuple(PROMPT)), lambda _: None, capacity=2)
    for event in reply.events:
        ticket.publish(event)
    return list(ticket)


@pytest.mark.parametrize("at", [1, 4, BLOCK, BLOCK + 1])
def test_a_stop_id_cuts_the_text_and_not_the_figures(new_session: Build, at: int) -> None:
    """With an oracle a whole block is accepted in every cycle, wherever the text ends."""
    text = text_of("qwen3", tuple(PROMPT))[len(PROMPT) :]
    stop = text[at]
    end = text.index(stop) + 1
    reply = ask(new_session("qwen3", Oracle(VOCAB, text_of("qwen3", tuple(PROMPT)))), PROMPT, 40)
    stopped = new_session("qwen3", Oracle(VOCAB, text_of("qwen3", tuple(PROMPT))), stop_ids=frozenset({stop}))
    cut = ask(stopped, PROMPT, 40)
    assert cut.ids == reply.ids[:end] and cut.finished.reason == "stop"
    assert agree(cut) == (BLOCK,) * -(-(end - 1) // BLOCK)
    assert agree(reply) == (BLOCK,) * 5


@pytest.mark.parametrize("new", [1, 2, 10, 17])
def test_neither_does_a_limit(new_session: Build, new: int) -> None:
    reply = ask(new_session("qwen3", Oracle(VOCAB, text_of("qwen3", tuple(PROMPT)), 5)), PROMPT, new)
    lengths = agree(reply)
    assert sum(lengths) >= new - 1 and bool(lengths) == (new > 1)


def test_cycles_that_drafted_nothing_have_no_acceptance_length(new_session: Build) -> None:
    """The drafter is given up after 32 misses: what follows says nothing of it."""
    hopeless = ask(new_session("qwen3", Oracle(VOCAB, text_of("qwen3", tuple(PROMPT)), 1)), PROMPT, 50)
    lengths = agree(hopeless)
    assert set(lengths) == {1} and 32 <= len(lengths) <= 34, "two may be under way when that is found"
    assert len(lengths) + hopeless.finished.stats.undrafted_cycles == 49
    plain = ask(new_session("qwen3", None), PROMPT, 20, mode="ar")
    assert agree(plain) == () and plain.finished.stats.turn_acceptance_length is None
