"""How each server program is recognised, and how llama.cpp is asked.

Of those that were not run here (LM Studio, ollama, TabbyAPI, mistral.rs, mlx-lm) the answers are stand-ins, written
after their published API pages. llama.cpp's are those of its server of October 2026, and of 2025 by its README of then.
"""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.errors import UsageError
from dflash_local.events import Step
from dflash_local.remote.abilities import asked
from dflash_local.remote.endpoint import endpoint
from dflash_local.remote.openai_server import OpenAIServer, attach
from dflash_local.remote.programs import PROGRAMS
from dflash_local.remote.programs.server_program import SelfReport
from dflash_local.remote.server_checks import WantedModel
from dflash_local.request import Limits, SamplingParams, user_request
from tests.remote.scripted_server import ScriptedServer, scripted

OLD = {"default_generation_settings": {"n_ctx": 2048, "speculative": True}, "build_info": "b5000-abc"}
NEW = {"default_generation_settings": {"n_ctx": 4096, "params": {"speculative.types": "none"}}, "endpoint_slots": True}
NAMED = {"default_generation_settings": {"params": {"speculative.types": "draft-dflash"}}}
LM_STUDIO = {
    "data": [{"id": "a", "state": "not-loaded"}, {"id": "b", "state": "loaded", "loaded_context_length": 8192}]
}
STATUS = {"model": "demo", "state": "ready", "version": "0.2.0", "facts": {"drafter": "d", "block_size": 8}}
TABBY = {"id": "m", "parameters": {"max_seq_len": 4096, "draft": {"id": "small"}}}


@pytest.mark.parametrize(
    ("program", "answers", "report"),
    [
        ("llama.cpp", {"/props": OLD}, SelfReport("b5000-abc", True, context=2048)),
        (
            "llama.cpp",
            {"/props": NEW, "/slots": {"entries": [{"speculative": True}]}},
            SelfReport("", True, context=4096),
        ),
        ("llama.cpp", {"/props": NEW, "/slots": {"entries": [7]}}, SelfReport("", None, context=4096)),
        ("llama.cpp", {"/props": NAMED}, SelfReport("", True, "draft-dflash")),
        ("dflash", {"/dflash/v1/status": STATUS}, SelfReport("0.2.0", True, block_size=8)),
        ("lm-studio", {"/api/v0/models": LM_STUDIO}, SelfReport(context=8192)),
        ("ollama", {"/api/version": {"version": "0.30.0"}}, SelfReport("0.30.0")),
        ("tabbyapi", {"/v1/model": TABBY}, SelfReport(drafts=True, drafter="small", context=4096)),
        ("mistral.rs", {"/api-doc/openapi.json": {"paths": {"/re_isq": {}}, "info": {}}}, SelfReport()),
        ("mlx-lm", {"/health": {"status": "ok"}, "/v1/models": {"data": [{"id": "m", "created": 1}]}}, SelfReport()),
    ],
)
def test_a_program_is_known_by_its_own_paths(program: Any, answers: dict[str, Any], report: SelfReport) -> None:
    found = [(one.name, told) for one in PROGRAMS.values() if (told := one.report(answers.get)) is not None]
    assert found == [(program, report)]


def test_an_answer_to_every_path_is_no_program() -> None:
    """LM Studio answers so to a path that it does not have."""
    assert [one.name for one in PROGRAMS.values() if one.report(lambda _path: {"error": "Unexpected endpoint"})] == []


def attached(fake: ScriptedServer) -> OpenAIServer:
    return attach(endpoint(fake.url), WantedModel())


def test_llama_cpp_is_asked_in_its_own_dialect_where_tokens_are_to_be_named() -> None:
    asks = user_request("hi", limits=Limits(5), sampling=SamplingParams(repetition_penalty=1.5))
    with scripted(ScriptedServer()) as fake:
        server = attached(fake)
        answer = server.answer(asks)
        assert answer.token_ids == () and fake.requests[-1]["path"] == "/v1/chat/completions"
        assert fake.requests[-1]["repeat_penalty"] == 1.5 and "repetition_penalty" not in fake.requests[-1]
        named = attached(fake).answer(user_request("hi", limits=Limits(5), return_token_ids=True))
    template, own = fake.requests[-2:]
    assert (
        len(named.token_ids) == 5 and named.finished.usage.completion_tokens == 5 and named.finished.reason == "length"
    )
    assert template["path"] == "/apply-template" and own["prompt"] == "hi" and "messages" not in own
    assert (own["n_predict"], own["n_probs"], own["return_tokens"], own["cache_prompt"]) == (5, 0, True, False)
    assert named.acceptance is not None and named.acceptance.counts == (4, 5, 0) and named.acceptance.block is None


def test_drafting_is_switched_off_by_a_request_where_the_server_takes_that() -> None:
    plain = user_request("hi", limits=Limits(2), mode="ar", logprobs=2, return_token_ids=True)
    with scripted(ScriptedServer(takes_off=True)) as fake:
        server = attached(fake)
        with pytest.raises(UsageError, match="no request can switch that off"):
            server.answer(plain)
        server.switch_off("a hint")
        rows = [row for event in server.generate(plain) if isinstance(event, Step) for row in event.logprobs]
        assert fake.requests[-1]["speculative.n_max"] == 0 and [len(row.top) for row in rows] == [2, 2]
        assert rows[0].top[0][0] == rows[0].token_id and "switched off by request" in server.facts.loaded_as
    with scripted(ScriptedServer()) as fake:
        server = attached(fake)
        with pytest.raises(UsageError, match="drafts for every request"):
            server.switch_off("a hint")


def test_what_replies_can_hold_is_found_by_asking() -> None:
    with scripted(ScriptedServer(drafts=False)) as fake:
        found = asked(attached(fake), plain=True)
    assert (found.token_ids, found.logprobs, found.raw_prompts, found.seeds) == (True, True, True, True)
    with scripted(ScriptedServer()) as fake:
        assert asked(attached(fake), plain=False).logprobs is None
