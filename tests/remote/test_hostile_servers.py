"""Whatever a server at ``--url`` sends, a probe and a reply end in time, and the next request is answered."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from dflash_local.errors import DFlashError
from dflash_local.remote import openai_server, serve_status, server_checks, server_metrics
from dflash_local.remote.event_stream import Patience
from dflash_local.service.service import Service
from tests.remote.hostile import CLOSED, DRIP_S, MALFORMED, PROBES, STREAMS, TAKEN, Mode, drip, event, once
from tests.remote.openai_fake import Fake, running
from tests.remote.test_openai_server import ASK, PATIENT, events_of, finished_of, session_of, text_of
from tests.service.scripted import ScriptedFacts

CHAT = "/v1/chat/completions"
IMPATIENT = Patience(first=0.15, silence=0.15, notice=60.0)
ALLOWED_S = 30  # a test that takes longer hangs

pytestmark = pytest.mark.timeout(ALLOWED_S)


@contextmanager
def impatience() -> Iterator[None]:
    """Within, nothing is waited for as long as usual; an honest server may need more on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_checks, "PROBE_S", 0.2)
        for module in (openai_server, serve_status, server_metrics):
            patch.setattr(module, "ANSWER_S", 0.2)
        yield


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server counts no reply that it sends raw: nobody waits until it has."""
    monkeypatch.setattr(server_metrics, "SETTLE_S", 0.1)


@pytest.fixture
def fake(unsettled: None) -> Iterator[Fake]:
    with running(Fake()) as server:
        yield server


def each(modes: Iterable[str], check: Callable[[Fake, str], None]) -> None:
    """Check every mode with a server of its own: most are waited for, so eight at a time."""

    servers = {mode: Fake(pause_s=0) for mode in modes}

    def failure(mode: str) -> str | None:
        with running(servers[mode]) as server:
            try:
                check(server, mode)
            except (AssertionError, DFlashError, pytest.fail.Exception) as error:
                return f"{mode}: {error!r}"
        return None

    with ThreadPoolExecutor(8) as pool:
        try:
            failures = [found for found in pool.map(failure, servers) if found]
        finally:
            for server in servers.values():
                server.released.set()  # what is still read after the test's time ends
    assert not failures, "\n".join(failures)


def answers_again(fake: Fake, session: openai_server.OpenAIServer) -> None:
    fake.raw.clear()
    events, error = events_of(session)
    assert error is None and text_of(events) == "Hello, world!\n"


def is_one_line_about(fake: Fake, error: DFlashError | None) -> bool:
    return error is not None and fake.url in error.message and "\n" not in str(error) and len(error.message) < 300


def test_a_probe_ends_with_one_line() -> None:
    def check(fake: Fake, mode: str) -> None:
        fake.raw["/v1/models"] = PROBES[mode]
        with pytest.raises(DFlashError) as caught:
            session_of(fake)
        assert is_one_line_about(fake, caught.value)

    with impatience():
        each(PROBES, check)


def test_a_server_that_was_refused_is_attached_to_once_it_answers(fake: Fake) -> None:
    fake.raw["/v1/models"] = PROBES["a length of 400 digits"]
    with pytest.raises(DFlashError), impatience():
        session_of(fake)
    fake.raw.clear()
    answers_again(fake, session_of(fake))


def test_an_answer_without_end_is_given_up_by_its_size(fake: Fake) -> None:
    fake.raw["/v1/models"] = PROBES["a body without end"]
    with pytest.raises(DFlashError, match="sends more than 4 MiB for /v1/models"):
        session_of(fake)


def test_a_chunk_larger_than_can_be_counted_is_not_waited_for(fake: Fake) -> None:
    session = session_of(fake, PATIENT)
    fake.raw[CHAT] = STREAMS["a chunk larger than can be counted"]
    assert events_of(session)[1] is not None


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info", "/version", "/metrics"])
def test_one_deadline_is_for_all_that_a_probe_asks(fake: Fake, path: str) -> None:
    """Each answer alone would come in time."""
    fake.raw[path] = lambda: drip(CLOSED, b" ")
    with pytest.raises(DFlashError, match="no answer in time"), impatience():
        session_of(fake)


PAGES = (
    *("silence", "a body byte by byte", "lines without end", "samples without end"),
    *("no JSON", "no HTTP", "an error without end"),
)


@pytest.mark.parametrize("mode", PAGES)
def test_a_metrics_page_costs_one_request_at_most(fake: Fake, mode: str) -> None:
    session = session_of(fake)
    fake.raw["/metrics"] = PROBES[mode]
    with impatience():
        events, error = events_of(session)
    assert error is not None or finished_of(events).stats.mean_acceptance_length is None
    answers_again(fake, session)


def test_a_reply_ends_with_one_line_and_the_next_request_is_answered(unsettled: None) -> None:
    def check(fake: Fake, mode: str) -> None:
        session = session_of(fake, IMPATIENT)
        fake.raw[CHAT] = STREAMS[mode]
        assert is_one_line_about(fake, events_of(session)[1])
        session._patience = PATIENT
        answers_again(fake, session)

    each(STREAMS, check)


TEXTLESS = (
    *("comments without end", "comments behind text", "blank lines without end"),
    *("lines that are no events without end", "empty deltas without end", "an end without end"),
)
ENDLESS = {
    **dict.fromkeys(TEXTLESS, "sends line after line without any text"),
    "a line without end": "sends without end",
    **dict.fromkeys(
        ("text without end", "ids without end", "long texts without end"),
        "sends more than the 512 tokens that were asked for",
    ),
}


def test_a_reply_without_end_is_given_up_by_its_size(unsettled: None) -> None:
    def check(fake: Fake, mode: str) -> None:
        session = session_of(fake, PATIENT)
        fake.raw[CHAT] = STREAMS[mode]
        error = events_of(session)[1]
        assert error is not None and error.message.endswith(ENDLESS[mode])

    each(ENDLESS, check)


@pytest.mark.parametrize("mode", ["silence", "100 Continue without end"])
def test_a_cancel_ends_a_reply_that_never_comes(fake: Fake, mode: str) -> None:
    fake.raw[CHAT] = STREAMS[mode]
    with Service.over(session_of(fake, PATIENT)) as service:
        ticket = service.submit(ASK)
        assert fake.asked.wait(60)
        ticket.cancel()
        assert finished_of(list(ticket)).reason == "cancelled"


def test_keep_alives_of_a_long_prompt_are_waited_for(fake: Fake) -> None:
    """Longer than between two texts."""
    whole = event({"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]})
    session = session_of(fake, Patience(first=60.0, silence=5 * DRIP_S, notice=60.0))
    fake.raw[CHAT] = lambda: itertools.chain(itertools.islice(drip(CLOSED, b": x\n\n"), 8), [whole])
    events, error = events_of(session)
    assert error is None and text_of(events) == "Hi"


def test_a_malformed_event_is_one_line_of_its_request(unsettled: None) -> None:
    def check(fake: Fake, name: str) -> None:
        session = session_of(fake)
        fake.raw[CHAT] = replying(MALFORMED[name])
        assert is_one_line_about(fake, events_of(session)[1])
        answers_again(fake, session)

    each(MALFORMED, check)


def test_what_an_event_lacks_costs_the_reply_nothing_else(unsettled: None) -> None:
    def check(fake: Fake, name: str) -> None:
        fake.raw[CHAT] = replying(TAKEN[name])
        events, error = events_of(session_of(fake))
        assert error is None and finished_of(events).reason == "stop" and text_of(events) in ("lo", "Hello")
        assert text_of(events).encode()

    each(TAKEN, check)


def replying(odd: bytes) -> Mode:
    """A reply with an odd event in front of its text."""
    rest = [{"delta": {"content": "lo"}}, {"delta": {}, "finish_reason": "stop"}]
    return lambda: once(CLOSED + event(odd) + b"".join(event({"choices": [one]}) for one in rest))


def test_what_only_looks_like_a_dflash_process_is_none() -> None:
    def check(fake: Fake, mode: str) -> None:
        fake.raw = {"/dflash/v1/status": PROBES[mode]}
        assert serve_status.status_of(fake.url, None) is None

    with impatience():
        each(
            ("silence", "a body byte by byte", "a body without end", "no HTTP", "a deep list", "an error byte by byte"),
            check,
        )


@pytest.mark.parametrize("odd", [{"model": 7}, {"state": None}, {"state": ["ready"]}])
def test_a_status_with_other_values_is_none(fake: Fake, odd: dict[str, object]) -> None:
    content = json.dumps({"model": "demo", "state": "ready", **odd}).encode()
    fake.raw["/dflash/v1/status"] = lambda: once(CLOSED + content)
    assert serve_status.status_of(fake.url, None) is None


@pytest.mark.parametrize(
    "facts", [7, {}, {"target": 7}, {"notices": [7]}, {"block_size": 10**400}, {"checks": [[]]}, {"context": 10**400}]
)
def test_facts_with_other_values_are_those_of_another_version(facts: Any) -> None:
    known = ScriptedFacts().as_dict()
    assert serve_status.facts_of({"facts": known}) is not None
    assert serve_status.facts_of({"facts": known | facts if facts and isinstance(facts, dict) else facts}) is None
