"""Coding agents that speak to the endpoint: what each must be told, in which file of its own, and how it is started.

None of the user's own settings is touched: every client here reads a further file, or takes the same on its command
line. A token is never written down: the file names ``DFLASH_TOKEN``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TOKEN_VARIABLE = "DFLASH_TOKEN"
NO_TOKEN = "none"  # clients want one, also where the endpoint asks for none
OUTPUT_TOKENS = 32_000  # of a reply, at most; it gets a quarter of a small context
CLAUDE_WINDOW = 100_000  # the smallest that CLAUDE_CODE_AUTO_COMPACT_WINDOW takes
CLAUDE_RESERVE = 20_000  # of a reply's tokens that Claude Code keeps free of its window, at most
CLAUDE_TIERS = ("OPUS", "SONNET", "HAIKU", "FABLE")


@dataclass(frozen=True, slots=True)
class Served:
    """What is served.

    Attributes:
        url: without ``/v1``. token: that is asked for. context: tokens; None where a server does not tell.
    """

    url: str
    model: str
    token: str | None
    context: int | None

    @property
    def output(self) -> int:
        """Tokens that a reply may have."""
        return OUTPUT_TOKENS if self.context is None else min(OUTPUT_TOKENS, self.context // 4)


class AgentLaunch(NamedTuple):
    """How a client is started without a file."""

    arguments: list[str]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True)
class Agent:
    """One client.

    Attributes:
        program: on PATH. install: the command that installs it.
        file: its file of ours, by the environment and the home. text: what the file holds.
        start: the command by which it reads the file. launch: how it is started with a text and no file.
    """

    title: str
    program: str
    install: str
    file: Callable[[Mapping[str, str], Path], Path]
    text: Callable[[Served], str]
    start: Callable[[Path, Served], str]
    launch: Callable[[Served, str], AgentLaunch]


def _claude_text(served: Served) -> str:
    tiers = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": served.model for tier in CLAUDE_TIERS}
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        **({} if served.token else {"ANTHROPIC_AUTH_TOKEN": NO_TOKEN}),
        "ANTHROPIC_MODEL": served.model,
        **tiers,
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.output),
        **_claude_window(served),
    }
    return _json({"env": variables})


def _claude_window(served: Served) -> dict[str, str]:
    """Return when a conversation is summarised; of a window below the smallest, by a share of that one."""
    if served.context is None:
        return {}
    window = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(max(served.context, CLAUDE_WINDOW))}
    if served.context < CLAUDE_WINDOW:
        most = served.context - served.output - served.context // 10
        share = 100 * most // (CLAUDE_WINDOW - min(served.output, CLAUDE_RESERVE))
        window["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(max(1, share))
    return window


def _claude_start(file: Path, served: Served) -> str:
    token = f'ANTHROPIC_AUTH_TOKEN="${TOKEN_VARIABLE}" ' if served.token else ""
    return f"{token}claude --settings {file}"


def _claude_launch(served: Served, text: str) -> AgentLaunch:
    return AgentLaunch(["--settings", text], {"ANTHROPIC_AUTH_TOKEN": served.token} if served.token else {})


def _codex_text(served: Served) -> str:
    """Return a profile of keys with dots, each of which is an argument of ``-c`` as well.

    The list of models, which tells more of the model, is asked for where a command has the token.
    """
    provider = {
        "name": "dflash-local",
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "auth.command": "sh",
        "auth.args": ["-c", f"echo ${{{TOKEN_VARIABLE}:-{NO_TOKEN}}}"],
    }
    values: dict[str, Any] = {
        "model": served.model,
        "model_provider": "dflash",
        "model_context_window": served.context,
        "web_search": "disabled",
        **{f"model_providers.dflash.{name}": value for name, value in provider.items()},
    }
    # A string of JSON is one of TOML, too, and so is a list of them.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items() if value is not None)


def _codex_launch(_served: Served, text: str) -> AgentLaunch:
    return AgentLaunch([word for line in text.splitlines() for word in ("-c", line.replace(" = ", "=", 1))], {})


def _opencode_text(served: Served) -> str:
    model: dict[str, Any] = {"name": served.model, "tool_call": True}
    if served.context is not None:
        model["limit"] = {"context": served.context, "output": served.output}
    key = f"{{env:{TOKEN_VARIABLE}}}" if served.token else NO_TOKEN
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "dflash-local",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": key},
        "models": {served.model: model},
    }
    name = f"dflash/{served.model}"
    schema = "https://opencode.ai/config.json"
    return _json({"$schema": schema, "model": name, "small_model": name, "provider": {"dflash": provider}})


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


AGENTS = {
    "claude": Agent(
        "Claude Code",
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        lambda environ, home: Path(environ.get("CLAUDE_CONFIG_DIR") or home / ".claude") / "dflash.json",
        _claude_text,
        _claude_start,
        _claude_launch,
    ),
    "codex": Agent(
        "Codex",
        "codex",
        "npm install -g @openai/codex",
        lambda environ, home: Path(environ.get("CODEX_HOME") or home / ".codex") / "dflash.config.toml",
        _codex_text,
        lambda _file, _served: "codex --profile dflash",
        _codex_launch,
    ),
    "opencode": Agent(
        "OpenCode",
        "opencode",
        "npm install -g opencode-ai",
        lambda environ, home: Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "opencode" / "dflash.json",
        _opencode_text,
        lambda file, _served: f"OPENCODE_CONFIG={file} opencode",
        lambda _served, text: AgentLaunch([], {"OPENCODE_CONFIG_CONTENT": text}),
    ),
}
