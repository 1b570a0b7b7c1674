"""Requests as coding agents send them: each is answered, and what cannot act is named once in the log and in the reply.

Written after the clients' documentation and recorded runs: Claude Code 2.1.328, Codex 0.169.0, OpenCode 1.18.33 (over
@ai-sdk/openai-compatible), Cline 3.0.65, VS Code's own models 1.122, qwen-code 0.24.4.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from tests.api.conftest import Running, Serve
from tests.service.scripted import ScriptedSession

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "additionalProperties": False,
}
FUNCTION = {"name": "bash", "description": "Run it.", "parameters": SCHEMA}


class AgentRequest(NamedTuple):
    """What is sent, and the fields of it that have no effect."""

    path: str
    body: dict[str, Any]
    named: str
    headers: dict[str, str] = {}


AGENTS = {
    "claude-code": AgentRequest(
        "/v1/messages?beta=true",
        {
            "max_tokens": 32_000,
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                       {"type": "text", "text": "You are Claude Code.", **CACHED}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]}],
            "tools": [{"name": "bash", "description": "Run it.", "input_schema": SCHEMA, "eager_input_streaming": True,
                       "defer_loading": True, "strict": True, **CACHED}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 31_999},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": "user_1"},
            "betas": ["interleaved-thinking-2025-05-14"],
            "service_tier": "auto",
            "speed": "fast",
            "temperature": 1,
            "stream": True,
        },
        "system[].cache_control messages[].content[].cache_control tools[].eager_input_streaming tools[].defer_loading "
        "tools[].strict tools[].cache_control tool_choice.disable_parallel_tool_use thinking.budget_tokens "
        "context_management metadata betas service_tier speed",
        {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,context-management-2025-06-27"},
    ),
    "codex": AgentRequest(
        "/v1/responses",
        {
            "instructions": "You are Codex.",
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "tools": [{"type": "function", "strict": False, **FUNCTION}, {"type": "web_search"}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "5f3a",
            "client_metadata": {"session": "1"},
            "service_tier": "priority",
            "text": {"verbosity": "low"},
        },
        "tools[].strict tools parallel_tool_calls reasoning.summary store include prompt_cache_key client_metadata "
        "service_tier text.verbosity",
    ),
    "opencode": AgentRequest(
        "/v1/chat/completions",
        {
            "max_tokens": 32_000,
            "temperature": 0.55,
            "top_p": 1,
            "messages": [{"role": "system", "content": "You are opencode."}, {"role": "system", "content": "Be brief."},
                         {"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]},
                         {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [
                             {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]},
                         {"role": "tool", "tool_call_id": "c1", "content": "ok"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "medium",
            "prompt_cache_key": "ses_1",
            "store": True,
            "verbosity": "low",
        },
        "messages[].content[].cache_control prompt_cache_key store verbosity",
    ),
    "cline": AgentRequest(
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": "You are Cline."},
                         {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "temperature": 0,
            "max_completion_tokens": 8192,
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
            "metadata": {"taskId": "1"},
            "transforms": ["middle-out"],
        },
        "tools[].function.strict stream_options.include_obfuscation parallel_tool_calls metadata transforms",
    ),
    "vs-code": AgentRequest(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi", "name": "me"}],
            "tools": [{"type": "function", "function": {"name": "run"}}],
            "n": 1,
            "top_p": 1,
            "temperature": 0.1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "parallel_tool_calls": True,
            "intent": True,
            "snippy": {"enabled": False},
        },
        "parallel_tool_calls intent snippy",
    ),
    "qwen-code": AgentRequest(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "metadata": {"sessionId": "1", "promptId": "2"},
            "vl_high_resolution_images": True,
        },
        "metadata vl_high_resolution_images",
    ),
}  # fmt: skip


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_an_agents_request_is_answered_and_what_has_no_effect_is_named(
    server: Running, agent: AgentRequest, lines: list[str]
) -> None:
    for _ in range(2):
        answer = server.call("POST", agent.path, {"model": "scripted", **agent.body}, agent.headers)
        assert answer.status == 200, answer.body
        ends = [
            json.loads(line.removeprefix("data: ")) for line in answer.body.decode().split("\n") if "metrics" in line
        ]
        notices = ends[-1].get("response", ends[-1])["metrics"]["dflash"]["notices"]
        assert {notice.removeprefix("taken without effect: ").partition(":")[0] for notice in notices} == set(
            agent.named.split()
        )
    for field in agent.named.split():
        assert sum(f"taken without effect: {field}: " in line for line in lines) == 1, field


def test_several_system_messages_are_one(serve: Serve) -> None:
    """OpenCode sends two; most chat templates take one, and only as the first."""
    session = ScriptedSession()
    server = serve(session)
    said = [("system", "A."), ("developer", "B."), ("user", "hi"), ("system", "C."), ("user", "hi")]
    server.call("POST", "/v1/chat/completions", {
        "model": "scripted", "messages": [{"role": role, "content": text} for role, text in said],
    })  # fmt: skip
    turns = [(turn.role, turn.content) for turn in session.requests[0].messages]
    assert turns == [("system", "A.\n\nB."), ("user", "hi"), ("user", "C."), ("user", "hi")]
