"""What the soak asks: requests whose replies are compared, and requests that must be refused, each with its status."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def _chat(*turns: str, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(turns)]
    return CHAT, {"messages": messages, "temperature": 0, "max_tokens": 64, **more}


def _completion(prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETION, {"prompt": prompt, "temperature": 0, "max_tokens": 48, **more}


# name -> path and body; each is asked whole and as a stream
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": _chat("Count from 3 to 7."),
    "chat, code": _chat("Write a Python function that returns the sum of a list of numbers."),
    "chat, table": _chat("Make a table of the squares from 1 to 9.", max_tokens=120),
    "turns": _chat("Spell the word tree.", "T-R-E-E", "Count from 2 to 6.", "2, 3, 4, 5, 6", "Spell the word oak."),
    "seed": _chat("Sort these words: pear, apple, fig.", temperature=1.0, top_p=0.95, seed=11),
    "seed, top_k": _chat("Count from 10 to 30.", temperature=1.3, top_k=20, seed=2**40, presence_penalty=0.2),
    "stop": _chat("Count from 10 to 40.", stop=["21"], max_tokens=200),
    "logprobs": _chat("Spell the word leaf.", logprobs=True, top_logprobs=3),
    "tools": _chat("What is 2 + 3?", tools=[TOOL]),
    "no tools": _chat("Count from 4 to 9.", tools=[TOOL], tool_choice="none"),
    "completion": _completion("Count from 3 to 7."),
    "completion, logprobs": _completion("def add(a, b):", logprobs=2),
    "completion, seed": _completion("1, 2, 3,", temperature=0.9, seed=5),
}
LONG = _chat("Count from 1 to 99.", max_tokens=600)[1]  # there is time to leave


@dataclass(frozen=True, slots=True)
class Bad:
    """A request that must be refused. ``headers``: beside, or in place of, the usual ones."""

    path: str
    body: bytes
    status: int
    headers: tuple[tuple[str, str], ...] = ()


def _bad(status: int, **fields: Any) -> Bad:
    return Bad(CHAT, json.dumps({"model": "demo", **_chat("hi")[1], **fields}).encode(), status)


BAD: dict[str, Bad] = {
    "no JSON": Bad(CHAT, b"{", 400),
    "not UTF-8": Bad(CHAT, b'{"model": "\xff"}', 400),
    "a key twice": Bad(CHAT, b'{"model": "demo", "model": "demo"}', 400),
    "nested": Bad(CHAT, b'{"model": "demo", "messages": ' + b"[" * 50_000, 400),
    "other model": _bad(404, model="gpt-4"),
    "no message": _bad(400, messages=[]),
    "unknown field": _bad(400, temprature=1),
    "long unknown field": _bad(400, **{"x" * 5000: 1}),
    "wrong type": _bad(400, temperature="hot"),
    "out of range": _bad(400, top_p=7),
    "several replies": _bad(400, n=4),
    "wrong part": _bad(400, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    "too long": _bad(400, messages=[{"role": "user", "content": "word " * 5000}]),
    "far too long": _bad(400, messages=[{"role": "user", "content": "word " * 100_000}]),
    "too large": Bad(CHAT, b" " * (9 * 2**20), 413),
    "no token": Bad(CHAT, b"{}", 401, (("Authorization", ""),)),
    "wrong token": Bad(CHAT, b"{}", 401, (("Authorization", "Bearer wrong-horse-battery"),)),
    "other Host": Bad(CHAT, b"{}", 400, (("Host", "example.com"),)),
    "other Origin": Bad(CHAT, b"{}", 403, (("Origin", "http://example.com"),)),
    "no path": Bad("/v1/nothing", b"{}", 404),
    "form": Bad(CHAT, b"a=b", 415, (("Content-Type", "application/x-www-form-urlencoded"),)),
}
RARE = ("far too long", "too large")  # one in so many bad ones
RARE_ONE_IN = 5
WATCHED = ("/health", "/metrics", "/v1/models", "/dflash/v1/status")
