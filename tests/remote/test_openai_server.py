"""A session in a vLLM or SGLang server: events, figures, and every way in which a server goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from dflash_local.errors import BusyError, DFlashError, ServerError, UnknownModelError, UsageError
from dflash_local.events import Event, Finished, Notice, Started, Step, TokenLogprob, Usage
from dflash_local.remote import openai_server
from dflash_local.remote.endpoint import endpoint
from dflash_local.remote.event_stream import Patience
from dflash_local.remote.logprobs import rows_of
from dflash_local.remote.openai_body import body_of
from dflash_local.remote.openai_server import OpenAIServer, attach
from dflash_local.remote.server_checks import WantedModel
from dflash_local.request import Constraint, Limits, Message, Request, SamplingParams, user_request
from dflash_local.service.service import Service
from tests.remote import openai_fake
from tests.remote.openai_fake import IDS, PROMPT_IDS, Fake, running

DEMO = WantedModel("demo", ("demo",))
ASK = user_request("hi", sampling=SamplingParams(seed=7))
PATIENT = Patience(first=60.0, silence=60.0, notice=60.0)
SHORT = {"hangs": replace(PATIENT, silence=0.5), "silent": replace(PATIENT, first=0.3)}
SUMMARY = {
    "num_spec_steps": 3,
    "num_draft_tokens": 21,
    "num_accepted_draft_tokens": 4,
    "acceptance_histogram": [0, 2, 1, 0, 0, 0, 0, 0],
    "num_spec_tokens": 7,
}


@pytest.fixture
def fake() -> Iterator[Fake]:
    with running(Fake()) as server:
        yield server


def session_of(fake: Fake, patience: Patience = PATIENT) -> OpenAIServer:
    return attach(endpoint(fake.url, fake.token), DEMO, patience=patience)


def events_of(session: OpenAIServer, request: Request = ASK) -> tuple[list[Event], DFlashError | None]:
    """What a service over the session publishes, and the error it ended with; the service must stay usable."""
    found: list[Event] = []
    with Service.over(session) as service:
        try:
            found.extend(service.submit(request))
        except DFlashError as error:
            assert service.fault is None
            return found, error
    return found, None


def text_of(events: list[Event], channel: str = "final") -> str:
    pieces = [piece for event in events if isinstance(event, Step) for piece in event.pieces]
    return "".join(piece.text for piece in pieces if piece.channel == channel)


def finished_of(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def notices_of(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Notice)]


def test_a_reply_of_vllm_comes_as_todays_events(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "SHORTEST_S", 0.0)  # a busy machine may read the reply in one piece
    events, error = events_of(session_of(fake), replace(ASK, return_token_ids=True))
    assert error is None and text_of(events) == "Hello, world!\n" and not notices_of(events)
    started = next(event for event in events if isinstance(event, Started))
    assert (started.prompt_tokens, started.prompt_ids) == (5, PROMPT_IDS)
    steps = [event for event in events if isinstance(event, Step)]
    assert tuple(step.token_ids for step in steps) == IDS
    assert not any((step.drafted, step.accepted, step.rows, step.drafts) != (0, 0, 0, 0) for step in steps)
    finished = finished_of(events)
    assert finished.reason == "stop" and finished.usage.completion_tokens == 8
    stats = finished.stats
    assert (stats.engine, stats.mode, stats.seed, stats.block_size) == ("vllm", "dflash", 7, 8)
    assert 0 < stats.ttft_s < steps[-1].t_s and stats.end_to_end_tokens_per_s > 0
    assert stats.tokens_per_s == pytest.approx(7 / stats.decode_s)  # the first token is excluded


def test_acceptance_is_the_difference_of_the_servers_counters(fake: Fake) -> None:
    fake.count()  # an earlier request of another client
    stats = finished_of(events_of(session_of(fake))[0]).stats
    assert stats.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.acceptance_per_position == pytest.approx((1.0, 1 / 3, 0, 0, 0, 0, 0))
    assert stats.acceptance_lengths == () and stats.turn_acceptance_length is None


def test_acceptance_is_absent_where_other_requests_ran(fake: Fake) -> None:
    fake.others = 1
    events, _ = events_of(session_of(fake))
    assert finished_of(events).stats.mean_acceptance_length is None
    assert ["other requests ran at the same time" in line for line in notices_of(events)] == [True]


@pytest.mark.parametrize("steps", [None, [2, 1, 1], [2, 2, 2]])
def test_a_replys_own_figures_come_before_the_counters(fake: Fake, steps: list[int] | None) -> None:
    """Ordered lengths are taken where they agree with the sums beside them."""
    fake.others = 1
    detailed = {} if steps is None else {"per_step_accepted": steps}
    fake.figures = {"metrics": {"speculative_decoding": {**SUMMARY, **detailed}}}
    events, _ = events_of(session_of(fake))
    stats = finished_of(events).stats
    assert stats.mean_acceptance_length == pytest.approx(1 + 4 / 3) and not notices_of(events)
    assert stats.acceptance_lengths == ((3, 2, 2) if steps == [2, 1, 1] else ())
    assert stats.acceptance_per_position[:3] == pytest.approx((1.0, 1 / 3, 0.0))


@pytest.mark.parametrize(
    ("own", "known"),
    [
        ({"plain_step_ms": 8.0, "plain_from": "at load\x1b[2J"}, (0.008, "at load␛[2J, by the server")),
        ({"plain_step_ms": None, "plain_from": None}, (None, "")),
        ({"plain_step_ms": True, "plain_from": "x"}, (None, "")),
        ({"plain_step_ms": -1.0, "plain_from": "x"}, (None, "")),
        ([], (None, "")),
    ],
)
def test_our_own_server_tells_the_plain_step_that_a_ratio_needs(
    fake: Fake, own: Any, known: tuple[float | None, str]
) -> None:
    fake.figures = {"metrics": {"speculative_decoding": SUMMARY, "dflash": own}}
    stats = finished_of(events_of(session_of(fake))[0]).stats
    assert (stats.plain_step_s, stats.plain_from) == known


def test_sglang_reports_its_drafts_in_the_reply() -> None:
    details = {"spec_verify_ct": 4, "spec_num_proposed_drafts": 28, "spec_num_correct_drafts": 9}
    fake = Fake(
        program="sglang", version="0.5.19", figures={"sglext": {"spec_tokens_details": details}}, thinking="Hm."
    )
    with running(fake):
        events, error = events_of(session_of(fake))
    assert error is None and text_of(events) == "Hello, world!\n" and text_of(events, "thinking") == "Hm."
    stats = finished_of(events).stats
    assert stats.mean_acceptance_length == pytest.approx(1 + 9 / 4) and stats.engine == "sglang"
    assert fake.bodies[-1][1]["return_spec_tokens_details"] is True
    assert "return_token_ids" not in fake.bodies[-1][1]  # a 400 there when streamed


def test_sglangs_gauge_is_no_figure_of_a_request() -> None:
    with running(Fake(program="sglang", version="0.5.19")) as fake:
        events, _ = events_of(session_of(fake))
    assert finished_of(events).stats.mean_acceptance_length is None
    assert "its own mean of lately is 3.25" in notices_of(events)[0]


def test_a_server_that_does_not_draft_replies_plainly() -> None:
    with running(Fake(speculative=False)) as fake:
        session = session_of(fake)
        assert "without speculative decoding" in session.facts.notices[0]
        events, error = events_of(session, replace(ASK, mode="ar"))
    assert error is None and finished_of(events).stats.mode == "ar" and not notices_of(events)


def test_a_reply_without_token_counts_has_no_speed(fake: Fake) -> None:
    fake.usage = False
    events, _ = events_of(session_of(fake))
    finished = finished_of(events)
    assert finished.usage.completion_tokens == 0 and finished.stats.tokens_per_s == 0
    assert any("no token counts" in line for line in notices_of(events))


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": None, "completion_tokens": None}])
def test_counts_stay_where_the_last_event_has_none(fake: Fake, usage: dict[str, None]) -> None:
    fake.figures = {"usage": usage}
    events, _ = events_of(session_of(fake))
    assert finished_of(events).usage == Usage(5, 8)


@pytest.mark.parametrize(("limit", "sent"), [(1018, [1018]), (1020, [1020, None]), (1024, [None])])
def test_a_limit_beyond_the_context_is_the_room_that_there_is(fake: Fake, limit: int, sent: list[int | None]) -> None:
    """vLLM and SGLang refuse a limit that the prompt leaves no room for; our engines end the reply there."""
    events, error = events_of(session_of(fake), replace(ASK, limits=Limits(limit)))
    assert error is None and text_of(events) == "Hello, world!\n"
    assert [body["max_tokens"] for _, body in fake.bodies] == sent


def test_prompt_ids_and_text_go_to_completions(fake: Fake) -> None:
    session = session_of(fake)
    for request in (Request(prompt_ids=(3, 1, 4)), Request(prompt="Once")):
        events, error = events_of(session, request)
        assert error is None and text_of(events) == "Hello, world!\n"
    assert [(path, body["prompt"]) for path, body in fake.bodies] == [
        ("/v1/completions", [3, 1, 4]),
        ("/v1/completions", "Once"),
    ]


def test_calls_of_tools_are_text_of_their_own_channel(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"object": "chat.completion.chunk"}
    calls: list[list[dict[str, Any]]] = [
        [{"index": 0, "id": "call_1", "function": {"name": "sum", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"a": 1'}}],
        [{"index": 0, "function": {"arguments": "}"}}],
        [{"index": 1, "id": "call_2", "function": {"name": "now", "arguments": "{}"}}],
    ]
    chunks = [{**head, "choices": [{"delta": {"tool_calls": call}}]} for call in calls]
    chunks.append({**head, "choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    monkeypatch.setattr(fake, "chunks", lambda _path, _body: iter(chunks))
    events, error = events_of(session_of(fake))
    assert error is None and text_of(events, "tool") == 'sum {"a": 1}\nnow {}'


def test_thoughts_that_come_as_text_are_named(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_fake, "WORDS", ("Hm.", "\n</think>\n", "Hi", "!"))
    events, _ = events_of(session_of(fake))
    assert text_of(events) == "Hm.\n</think>\nHi!"
    assert notices_of(events) == ["the reply holds </think>: the server was started without a reasoning parser"]


def test_tokens_are_not_counted_here(fake: Fake) -> None:
    with Service.over(session_of(fake)) as service, pytest.raises(UsageError, match="chat template"):
        service.count(ASK)


def test_cancelling_hangs_up(fake: Fake) -> None:
    fake.fault = "hangs"
    session = attach(endpoint(fake.url), DEMO)
    with Service.over(session) as service:
        ticket = service.submit(ASK)
        events: list[Event] = []
        for event in ticket:
            events.append(event)
            if isinstance(event, Step):
                ticket.cancel()
    assert finished_of(events).reason == "cancelled" and text_of(events).startswith("Hel")
    assert fake.hung_up.wait(60)


def test_requests_are_handed_on_and_do_not_wait_for_each_other(fake: Fake) -> None:
    fake.fault_of = lambda body: "hangs" if body["seed"] == 8 else ""
    with Service.over(session_of(fake)) as service:
        long = service.submit(replace(ASK, sampling=SamplingParams(seed=8)))
        while not isinstance(next(long), Step):
            pass
        events = list(service.submit(ASK))
        long.cancel()
        assert finished_of(list(long)).reason == "cancelled"
    assert finished_of(events).reason == "stop" and text_of(events) == "".join(openai_fake.WORDS)
    assert not any("restarted" in text for text in notices_of(events))


def test_a_cancel_before_the_first_token_ends_it_at_once() -> None:
    with running(Fake(fault="silent")) as fake:
        events = list(attach(endpoint(fake.url), DEMO).generate(ASK, lambda: True))
    assert finished_of(events).reason == "cancelled" and finished_of(events).usage.completion_tokens == 0


FAULTS: dict[str, tuple[type[DFlashError], str]] = {
    "dies": (ServerError, "broke off in the middle of the reply"),
    "hangs": (ServerError, "s in the middle of a reply"),
    "silent": (ServerError, "s and has not begun the reply"),
    "error": (ServerError, "ended the reply: EngineCore died"),
    "500": (ServerError, "answers with status 500: EngineCore encountered an issue.␛[2J See stack trace"),
    "400": (UsageError, "refuses the request: This model's maximum context length is 1024 tokens."),
    "404": (ServerError, "no longer has what was asked of it: The model `demo` does not exist."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_keeps_what_came_and_ends_nothing(fake: Fake, fault: str) -> None:
    kind, line = FAULTS[fault]
    session = session_of(fake, SHORT.get(fault, PATIENT))
    fake.fault = fault
    events, error = events_of(session)
    assert type(error) is kind and line in error.message and "\n" not in error.message
    begun = fault in ("dies", "hangs", "error")
    assert text_of(events) == ("Hello, " if begun else "") and not any(isinstance(one, Finished) for one in events)
    fake.fault = ""
    fake.released.set()
    session._patience = PATIENT
    events, error = events_of(session)
    assert error is None and text_of(events) == "Hello, world!\n"


def test_a_slow_first_token_is_waited_for_with_a_line(fake: Fake) -> None:
    session = session_of(fake, Patience(first=60.0, silence=60.0, notice=0.05))
    fake.fault = "silent"
    with Service.over(session) as service:
        events: list[Event] = []
        for event in service.submit(ASK):
            events.append(event)
            if isinstance(event, Notice):
                fake.released.set()
    assert finished_of(events).reason == "stop" and text_of(events) == "Hello, world!\n"
    assert notices_of(events)[0] == f"waiting for the first token of the server at {fake.url}"


def test_a_line_that_is_no_event_is_left_out_and_named_once(fake: Fake) -> None:
    fake.fault = "garbage"
    events, error = events_of(session_of(fake))
    assert error is None and text_of(events) == "Hello, world!\n"
    assert [line for line in notices_of(events) if "no event" in line] == [
        "the server sent what is no event, which is left out: data: {not json ␛[31m"
    ]


def test_a_server_that_sends_without_end_is_hung_up_on(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(fake)
    monkeypatch.setattr("dflash_local.remote.endpoint.MAX_REPLY", 300)
    events, error = events_of(session)
    assert isinstance(error, ServerError) and error.message.endswith("it sends without end")


PAGES: dict[str, tuple[Callable[[], str], str]] = {
    "not a page": (lambda: "<html>\x00 vllm:spec_decode_num_drafts_total{ NaN 12 12 12", "cannot be read"),
    "not numbers": (lambda: "vllm:num_requests_running 0\nvllm:spec_decode_num_drafts_total -1", "count no drafts"),
    "empty": (lambda: "", "cannot be read"),
}


@pytest.mark.parametrize("page", PAGES)
def test_metrics_that_cannot_be_read_cost_the_acceptance_alone(fake: Fake, page: str) -> None:
    session = session_of(fake)
    fake.metrics, why = PAGES[page]
    events, error = events_of(session)
    assert error is None and text_of(events) == "Hello, world!\n"
    assert finished_of(events).stats.mean_acceptance_length is None
    assert why in notices_of(events)[0]


def test_a_restart_between_requests_is_noticed_and_checked(fake: Fake) -> None:
    session = session_of(fake)
    assert events_of(session)[1] is None
    fake.restart()
    fake.version = "0.33.0"
    events, error = events_of(session)
    assert error is None and text_of(events) == "Hello, world!\n"
    assert "was restarted: vLLM 0.33.0" in notices_of(events)[0]
    assert finished_of(events).stats.mean_acceptance_length == pytest.approx(1 + 4 / 3)

    fake.restart()
    fake.model, fake.root = "other", "/models/other"
    events, error = events_of(session)
    assert isinstance(error, UnknownModelError) and "serves other, not demo" in error.message


def test_a_server_that_comes_back_on_its_port_answers_again() -> None:
    with running(Fake()) as fake:
        session = session_of(fake)
        port = int(fake.url.rpartition(":")[2])
    events, error = events_of(session)
    assert isinstance(error, ServerError) and error.message.startswith(f"no server answers at {fake.url}: ")
    with running(Fake(), port):
        events, error = events_of(session)
    assert error is None and text_of(events) == "Hello, world!\n"


def test_a_server_that_is_full_is_busy(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(fake)
    monkeypatch.setattr(
        "tests.remote.openai_fake.Handler._stream", lambda self, _body: self._error(503, "Service Unavailable")
    )
    error = events_of(session)[1]
    assert isinstance(error, BusyError) and "is busy (status 503): Service Unavailable" in error.message


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (replace(ASK, mode="ar"), "no request can switch that off"),
        (replace(ASK, block_size=4), "no request can set the block size"),
        (replace(ASK, logprobs=2), "without drafts only, from vLLM or llama.cpp or dflash"),
        (replace(ASK, sampling=SamplingParams(seed=2**63)), "the largest that servers take"),
    ],
)
def test_what_a_server_decides_is_refused_before_it_is_asked(fake: Fake, request_: Request, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        session_of(fake).generate(request_)
    assert not fake.bodies


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint("json_schema", '{"type": "array"}'), {"json": '{"type": "array"}'}),
        (Constraint("json_object"), {"json_object": True}),
        (Constraint("regex", "a+"), {"regex": "a+"}),
        (Constraint("lark", 'start: "a"'), {"grammar": 'start: "a"'}),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_constraint_is_passed_on_in_the_field_that_vllm_has(
    fake: Fake, constraint: Constraint, field: dict[str, Any]
) -> None:
    facts, request = session_of(fake).facts, replace(ASK, constraint=constraint)
    assert body_of(request, facts, 1)[1]["structured_outputs"] == field
    with pytest.raises(UsageError, match="cannot be constrained from here"):
        body_of(request, replace(facts, program="sglang"), 1)


@pytest.mark.parametrize("names", [("a", "b"), ("b",)])
def test_a_forced_call_is_passed_on(fake: Fake, names: tuple[str, ...]) -> None:
    tools = tuple({"type": "function", "function": {"name": name}} for name in "ab")
    body = body_of(replace(ASK, tools=tools, must_call=names), session_of(fake).facts, 1)[1]
    assert body["tool_choice"] == ("required" if len(names) > 1 else {"type": "function", "function": {"name": "b"}})


def test_no_limit_and_no_sampling_parameter_is_kept_from_the_server(fake: Fake) -> None:
    def changed(given: Any, name: str) -> Any:
        before = getattr(given, name)
        after: dict[type, Any] = {float: 0.3, int: 9, tuple: ("END",)}
        return replace(given, **{name: after[type(before)]})

    facts, request = session_of(fake).facts, replace(ASK, sampling=SamplingParams(temperature=0.7))
    asked = [replace(request, limits=changed(request.limits, field.name)) for field in fields(Limits)]
    for field in fields(SamplingParams):
        if field.name != "seed":  # an argument of its own
            asked.append(replace(request, sampling=changed(request.sampling, field.name)))
    plain = body_of(request, facts, 1)
    assert all(body_of(each, facts, 1) != plain for each in asked)


def test_sampling_that_is_off_is_left_to_the_server(fake: Fake) -> None:
    session = session_of(fake)
    bodies = []
    for sampling in (
        SamplingParams(seed=1),
        SamplingParams(temperature=0.7, top_k=20, min_p=0.1, repetition_penalty=1.1, seed=1),
        SamplingParams(temperature=0.7, top_p=0.0, presence_penalty=0.5, seed=1),
    ):
        request = Request((Message("user", "hi"),), sampling=sampling, limits=Limits(9, ("END",)), thinking=True)
        assert events_of(session, request)[1] is None
        bodies.append(fake.bodies[-1][1])
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    assert [{name: body[name] for name in names if name in body} for body in bodies] == [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1},
        {"temperature": 0.7, "top_k": 1, "presence_penalty": 0.5},
    ]
    assert bodies[0]["stop"] == ["END"] and bodies[0]["max_tokens"] == 9 and bodies[0]["seed"] == 1
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert bodies[0]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("request_", [ASK, Request(prompt_ids=(3, 1), sampling=SamplingParams(seed=7))])
def test_a_plain_vllm_tells_how_likely_its_tokens_were(fake: Fake, request_: Request) -> None:
    fake.speculative, fake.likely = False, {9: -0.53, 8: -9.0}
    events, error = events_of(session_of(fake), replace(request_, mode="ar", logprobs=2))
    rows = [row for event in events if isinstance(event, Step) for row in event.logprobs]
    assert error is None and [row.token_id for row in rows] == [token for ids in IDS for token in ids]
    assert rows[0].logprob == -0.5 and [(one, value) for one, _, value, _ in rows[0].top] == [
        (10, -0.5),
        (9, -0.53),
        (8, -9.0),
    ]
    assert (rows[0].text, rows[0].bytes) == (("x", (120,)) if request_.messages else ("token_id:10", None))


@pytest.mark.parametrize(
    "found",
    [
        None,
        {"content": [None, 3, {"token": "a", "logprob": -1.0}, {"token": "token_id:5", "logprob": "x"}]},
        {"tokens": ["token_id:5"], "token_logprobs": [None], "top_logprobs": [None]},
        {"tokens": "token_id:5", "token_logprobs": [-1.0], "top_logprobs": [{}]},
        {"content": [{"token": f"token_id:{'9' * 40}", "logprob": -1.0, "top_logprobs": [None]}]},
    ],
)
def test_log_probabilities_that_are_none_are_left_out(found: Any) -> None:
    assert rows_of({"logprobs": found}) == ()


def test_odd_alternatives_cost_themselves_alone() -> None:
    top = [{"token": "token_id:6", "logprob": float("nan")}, {"token": 7, "logprob": -1.0}, {"token": "token_id:8"}]
    entry = {"token": "token_id:5", "logprob": -1.0, "bytes": [300], "top_logprobs": top}
    assert rows_of({"logprobs": {"content": [entry]}}) == (TokenLogprob(5, "token_id:5", -1.0, ()),)


def test_a_reply_that_was_cut_off_goes_on_at_a_server(fake: Fake) -> None:
    facts = session_of(fake).facts
    begun = replace(ASK, messages=(*ASK.messages, Message("assistant", "Once")), continues=True)
    vllm, sglang = body_of(begun, facts, 1)[1], body_of(begun, replace(facts, program="sglang"), 1)[1]
    assert vllm["continue_final_message"] and sglang["continue_final_message"]
    assert vllm["add_generation_prompt"] is False and "add_generation_prompt" not in sglang
    thought = replace(begun, messages=(*ASK.messages, Message("assistant", "", "a plan")))
    with pytest.raises(UsageError, match="while the model thought"):
        body_of(thought, facts, 1)
