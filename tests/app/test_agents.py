"""What coding agents are told: every tier of models, the context, an address, and never the token itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.app.agents import AGENTS, CLAUDE_TIERS, CLAUDE_WINDOW, NO_TOKEN, Served

SERVED = Served("http://127.0.0.1:8000", "owner/model", None, 131_072)
SECRET = replace(SERVED, token="a-secret-of-mine")


def claude(served: Served) -> dict[str, str]:
    env: dict[str, str] = json.loads(AGENTS["claude"].text(served))["env"]
    return env


@pytest.mark.parametrize("name", AGENTS)
def test_the_token_is_named_and_not_written(name: str) -> None:
    agent = AGENTS[name]
    text, start = agent.text(SECRET), agent.start(Path("f"), SECRET)
    assert "a-secret" not in text + start and "DFLASH_TOKEN" in text + start
    assert "a-secret" not in " ".join(agent.launch(SECRET, text).arguments)
    assert NO_TOKEN in agent.text(SERVED), "clients want one"


def test_claude_code_asks_for_no_model_of_anthropics() -> None:
    env = claude(SERVED)
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000", "it adds /v1 itself"
    models = {env[f"ANTHROPIC_DEFAULT_{tier}_MODEL"] for tier in CLAUDE_TIERS}
    assert models | {env["ANTHROPIC_MODEL"], env["CLAUDE_CODE_SUBAGENT_MODEL"]} == {"owner/model"}
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert AGENTS["claude"].launch(SECRET, "").variables == {"ANTHROPIC_AUTH_TOKEN": "a-secret-of-mine"}


@pytest.mark.parametrize("context", [16_384, 32_768, 65_536, 99_999, 100_000, 262_144])
def test_claude_code_summarises_before_the_context_is_full(context: int) -> None:
    """By its own arithmetic: a window less what a reply takes, 13,000 less or a share of it (2.1.197)."""
    env = claude(replace(SERVED, context=context))
    output = int(env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"])
    window = min(200_000, max(CLAUDE_WINDOW, int(env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"])))
    free = window - min(output, 20_000)
    share = float(env.get("CLAUDE_AUTOCOMPACT_PCT_OVERRIDE", 100))
    begins = min(free * share // 100, free - 13_000)
    assert begins + output <= context and begins > context / 2


def test_a_context_that_nobody_tells_is_left_to_the_client() -> None:
    told = "".join(agent.text(replace(SERVED, context=None)) for agent in AGENTS.values()).lower()
    assert "context" not in told and "compact" not in told and "limit" not in told


@pytest.mark.parametrize("served", [SERVED, SECRET])
def test_codex_reads_a_profile(served: Served) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    agent = AGENTS["codex"]
    text = agent.text(served)
    profile = tomllib.loads(text)
    provider = profile["model_providers"][profile["model_provider"]]
    assert (profile["model"], profile["model_context_window"]) == ("owner/model", 131_072)
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8000/v1", "responses")
    flags, pairs = agent.launch(served, text).arguments[::2], agent.launch(served, text).arguments[1::2]
    assert set(flags) == {"-c"} and tomllib.loads("\n".join(pairs)) == profile


def test_opencode_reads_a_provider() -> None:
    agent = AGENTS["opencode"]
    config = json.loads(agent.text(SECRET))
    provider, _, model = config["model"].partition("/")
    told = config["provider"][provider]
    assert model == "owner/model" and config["small_model"] == config["model"]
    assert told["options"] == {"baseURL": "http://127.0.0.1:8000/v1", "apiKey": "{env:DFLASH_TOKEN}"}
    assert told["models"][model]["limit"] == {"context": 131_072, "output": 32_000}
    assert agent.launch(SECRET, "{}").variables == {"OPENCODE_CONFIG_CONTENT": "{}"}
