"""Replies with tool calls in every format, made of pieces that parsers stumble over, and what they mean."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from dflash_local.chat.tool_calls import CallFormat

PROPERTIES = {
    "path": {"type": "string"},
    "content": {"type": "string"},
    "count": {"type": "integer"},
    "deep": {"type": "boolean"},
    "extra": {"type": "object"},
    "tags": {"type": "array"},
}
NAMES = ("write", "now", "mcp__list-files.v2")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in NAMES
]
Call = tuple[str, dict[str, Any]]

WORDS = (
    "I look. ",
    "a < b",
    "<tool",
    "<",
    "{",
    '"',
    "é",
    "🙂",
    "\n\n",
    " ",
    "名",
    "to=",
    "functions",
    "<|",
    "</",
    "\\",
    "}",
)
# Each may stand in a value of every format: what would also end a parameter there is not among them.
IN_STRINGS = (
    *(
        "</tool_call>",
        "<tool_call>",
        "</function>",
        "</parameter>\n</tool_call>",
        "</parameter>.",
        "</arg_value>.",
        "<|tool_call_end|>",
        "</invoke>",
    ),
    *("<tool_call|>", "</minimax:tool_call>", '"', "'", "\\", "\\n", '\\"', "{", "}", "]", ":", ",", "\n", "\t", "  "),
    *(
        "é",
        "🙂",
        "名前",
        "\u2028",
        "<",
        ">",
        "&lt;",
        "a",
        "0",
        "null",
        "<|tool_calls_section_end|>",
        "to=functions.x {}",
    ),
    "<|close|>tools<|sep|>",
    "<tool_call>\n<function=now>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    '<invoke name="now">\n<parameter name="path">x</parameter>\n</invoke>',
    "<arg_key>path</arg_key><arg_value>x</arg_value>",
)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(call: Call, index: int) -> str:
    return f"<tool_call>\n{_json({'name': call[0], 'arguments': call[1]})}\n</tool_call>"


def _function(call: Call) -> str:
    values = "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in call[1].items())
    return f"<function={call[0]}>\n{values}</function>"


def _xml(call: Call, index: int) -> str:
    return f"<tool_call>\n{_function(call)}\n</tool_call>"


def _glm(call: Call, index: int) -> str:
    values = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_raw(v)}</arg_value>\n" for k, v in call[1].items())
    return f"<tool_call>{call[0]}\n{values}</tool_call>"


def _kimi(call: Call, index: int) -> str:
    inner = f"functions.{call[0]}:{index}<|tool_call_argument_begin|>{_json(call[1])}"
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{inner}<|tool_call_end|><|tool_calls_section_end|>"


def _minimax(call: Call, index: int) -> str:
    values = "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in call[1].items())
    return f'<minimax:tool_call>\n<invoke name="{call[0]}">\n{values}</invoke>\n</minimax:tool_call>'


def _kimi_k3(call: Call, index: int) -> str:
    values = "".join(
        f'<|open|>argument key="{key}" type="x"<|sep|>{_raw(value)}<|close|>argument<|sep|>'
        for key, value in call[1].items()
    )
    inner = f'<|open|>call tool="{call[0]}" index="{index}"<|sep|>{values}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def _in_gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_in_gemma(inner)}" for key, inner in value.items()) + "}"
    return "[" + ",".join(map(_in_gemma, value)) + "]" if isinstance(value, list) else _json(value)


def _gemma(call: Call, index: int) -> str:
    return f"<|tool_call>call:{call[0]}{_in_gemma(call[1])}<tool_call|>"


def _llama(call: Call, index: int) -> str:
    return _json({"name": call[0], "parameters": call[1]})


def _harmony(call: Call, index: int) -> str:
    return f"to=functions.{call[0]} {_json(call[1])}"


def _server(call: Call, index: int) -> str:
    return f"{call[0]} {_json(call[1])}"


WRITERS: dict[CallFormat, Callable[[Call, int], str]] = {
    "hermes": _hermes,
    "xml": _xml,
    "glm": _glm,
    "kimi": _kimi,
    "kimi-k3": _kimi_k3,
    "minimax": _minimax,
    "gemma": _gemma,
    "llama": _llama,
    "harmony": _harmony,
    "server": _server,
}
WHOLE_REPLIES = ("llama", "server")  # a reply is words or calls


def _value(rng: random.Random, key: str) -> Any:
    if key in ("path", "content"):
        return "".join(rng.choices(IN_STRINGS, k=rng.randint(0, 3)))
    nested = {"a": [1, -2.5, None, True, {"b": "}]"}], "c": {}}
    return {"count": rng.randint(-9, 9), "deep": rng.random() < 0.5, "extra": rng.choice([{}, nested])}.get(
        key, ["x", []]
    )


def _call(rng: random.Random) -> Call:
    keys = rng.sample(sorted(PROPERTIES), rng.randint(0, 2))
    return rng.choice(NAMES), {key: _value(rng, key) for key in keys}


def _words(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 4)))


def whole(form: CallFormat, rng: random.Random) -> tuple[str, list[Call]]:
    """Return a reply whose calls are whole, and these."""
    calls = [_call(rng) for _ in range(rng.randint(1, 2))]
    texts = [WRITERS[form](call, index) for index, call in enumerate(calls)]
    if form in WHOLE_REPLIES:
        return "\n".join(texts), calls
    if form == "harmony":
        return rng.choice(["", "I look. "]) + "".join(texts), calls
    return _words(rng) + "".join(text + rng.choice(["", "\n", " \n "]) for text in texts) + rng.choice(
        ["", "done"]
    ), calls


def broken(form: CallFormat, rng: random.Random) -> str:
    """Return a reply with something lost, doubled or put in."""
    text = whole(form, rng)[0]
    for _ in range(rng.randint(1, 2)):
        at, end = sorted(rng.choices(range(len(text) + 1), k=2))
        end = min(end, at + rng.choice((1, 3, 12, 40)))
        put = rng.choice(("", text[at:end] * 2, rng.choice(IN_STRINGS), rng.choice(WORDS)))
        text = text[:at] + put + text[end:]
    return text[: rng.randint(0, len(text))] if rng.random() < 0.3 else text


def events(parts: Sequence[Any]) -> list[Any]:
    """Return the parts with neighbouring texts as one, and calls as name and arguments."""
    merged: list[Any] = []
    for part in parts:
        if not isinstance(part, str):
            merged.append((part.name, json.loads(part.arguments)))
        elif merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged
