"""A race: two replies to one request with one seed, each figure from their events."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from dflash_local.errors import ContextError, Interrupted, UsageError
from dflash_local.events import Mode, Piece, Step
from dflash_local.request import Limits, Request, SamplingParams, user_request
from dflash_local.service.race import WARM_UP_TOKENS, Racer
from dflash_local.service.service import Service
from tests.service.scripted import HELLO, PartingSession, ScriptedFacts, ScriptedSession


def test_both_are_warmed_up_and_share_prompt_and_seed() -> None:
    session, heard = ScriptedSession(), list[Mode]()
    with Service.over(session) as service:
        race = Racer(service, user_request("hi")).run(lambda mode, _event: heard.append(mode))
    assert [request.mode for request in session.requests] == ["ar", "ar", "dflash", "dflash"]
    assert {request.sampling.seed for request in session.requests} == {race.seed}
    assert [r.limits.max_new_tokens for r in session.requests] == [WARM_UP_TOKENS, 512, WARM_UP_TOKENS, 512]
    assert heard == sorted(heard) and set(heard) == {"ar", "dflash"}, "one after the other"


def test_the_figures_are_those_of_the_events() -> None:
    with Service.over(ScriptedSession()) as service:
        race = Racer(service, user_request("hi", limits=Limits(8))).run()
    content = race.as_dict()
    assert content["identical"] is True and race.verdict == "identical: yes"
    assert race.speed_up == 2.0 and race.wall_clock == pytest.approx(0.11 / 0.06)
    assert content["dflash"]["acceptance_lengths"] == [3, 2] and content["ar"]["seconds"] == pytest.approx(0.11)
    assert race.dflash.text == "Hello, world!\n" and race.ar.steps == HELLO


@pytest.mark.parametrize("ids, first", [((10, 9), 1), ((10,), 1), ((), 0)])
def test_the_first_difference_is_told(ids: tuple[int, ...], first: int) -> None:
    class Wrong(ScriptedSession):
        def generate(self, request: Request, *rest):  # type: ignore[no-untyped-def]
            bits = (10, 11, 12) if request.mode == "ar" else ids
            self.steps = [Step((Piece("x"),), bits, 0, 0, 0, 0.0)]
            yield from super().generate(request, *rest)

    with Service.over(Wrong()) as service:
        race = Racer(service, user_request("hi")).run()
    assert race.first_difference == first
    assert race.verdict.startswith(f"identical: no; first difference at token {first}, margin")


@pytest.mark.parametrize(
    "rival, margin, over, words",
    [
        (-0.53, 0.03, None, "margin 0.03; dflash certify says whether that is a near-tie"),
        (-0.5, 0.0, None, "margin 0; dflash certify says whether that is a near-tie"),
        (-1.7, 1.2, None, "margin 1.2: more than a near-tie; run dflash certify"),
        (None, None, 8.0, "margin over 8: more than a near-tie; run dflash certify"),
    ],
)
def test_the_first_difference_comes_with_its_margin(
    rival: float | None, margin: float | None, over: float | None, words: str
) -> None:
    session = PartingSession(rival=rival)
    with Service.over(session) as service:
        race = Racer(service, user_request("hi")).run()
    assert race.margin == pytest.approx(margin) and race.over == pytest.approx(over)
    assert race.verdict == f"identical: no; first difference at token 1, {words}"
    assert race.as_dict()["margin"] == race.margin and race.as_dict()["margin_over"] == race.over
    asked = session.requests[-1]
    assert (asked.mode, asked.limits.max_new_tokens, asked.sampling.seed) == ("ar", 2, race.seed)
    assert len(session.requests) == 5 and asked.logprobs


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.7), SamplingParams(repetition_penalty=1.1)], ids=["sampled", "penalised"]
)
def test_where_noise_or_penalties_decided_the_margin_is_left_to_certify(sampling: SamplingParams) -> None:
    session = PartingSession()
    with Service.over(session) as service:
        race = Racer(service, user_request("hi", sampling=sampling)).run()
    assert race.verdict == "identical: no; first difference at token 1, margin: dflash certify measures it"
    assert race.as_dict()["margin"] is None and len(session.requests) == 4


def test_a_machine_that_does_not_repeat_itself_tells_no_margin() -> None:
    class Unsteady(PartingSession):
        def generate(self, request: Request, *rest):  # type: ignore[no-untyped-def]
            for event in super().generate(request, *rest):
                moved = isinstance(event, Step) and request.logprobs and event.token_ids == (10,)
                yield replace(event, token_ids=(13,)) if isinstance(event, Step) and moved else event

    with Service.over(Unsteady()) as service:
        race = Racer(service, user_request("hi")).run()
    assert race.first_difference == 1 and race.margin is None is race.over


def test_a_seed_that_was_given_is_used() -> None:
    session = ScriptedSession()
    request = user_request("hi")
    with Service.over(session) as service:
        racer = Racer(service, request)
        again = Racer(service, racer._request)
        assert racer.seed == again.seed != Racer(service, request).seed


def test_it_can_be_stopped_before_and_within() -> None:
    gate = threading.Event()
    with Service.over(ScriptedSession(gate=gate)) as service:
        racer = Racer(service, user_request("hi"))
        threading.Timer(0.05, racer.cancel).start()
        with pytest.raises(Interrupted):
            racer.run()
        early = Racer(service, user_request("hi"))
        early.cancel()
        with pytest.raises(Interrupted):
            early.run()


def test_an_error_of_a_reply_is_the_races() -> None:
    with Service.over(ScriptedSession(faults=[None, None, None, ContextError("too long")])) as service:
        with pytest.raises(ContextError):
            Racer(service, user_request("hi")).run()


def test_without_a_drafter_there_is_no_race() -> None:
    with Service.over(ScriptedSession(ScriptedFacts(drafter=None))) as service:
        with pytest.raises(UsageError, match="needs a drafter"):
            Racer(service, user_request("hi"))
