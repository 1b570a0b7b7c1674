"""Log probabilities as vLLM streams them, tokens named by id (``return_tokens_as_token_ids``: ``token_id:42``).

llama.cpp has an ``id`` beside each token, in the form of chats, also in completions.

Chat: https://github.com/vllm-project/vllm, entrypoints/openai/chat_completion/serving.py; completions beside it. The
text of an emitted token comes as bytes in a chat, and nowhere else: there the name by id stands for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dflash_local.events import TokenLogprob
from dflash_local.request import MAX_TOP_LOGPROBS

MAX_SIZE = 1e6  # of a log probability; servers write -9999 where it is minus infinity
_NAME = re.compile(r"token_id:(\d{1,10})")


def rows_of(choice: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """The log probabilities of a streamed choice, in order; what cannot be read is left out."""
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        return ()
    if isinstance(found.get("content"), list):
        return tuple(_chat_rows(found["content"]))
    lists = [found.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")]
    tokens, values, tops = (one if isinstance(one, list) else [] for one in lists)
    return tuple(_rows(tokens, values, tops))


def _chat_rows(content: list[Any]) -> Iterator[TokenLogprob]:
    for entry in content:
        if not isinstance(entry, dict):
            continue
        top = entry.get("top_logprobs")
        pairs = (
            [(_name(one), one.get("logprob")) for one in top if isinstance(one, dict)] if isinstance(top, list) else []
        )
        row = _row(_name(entry), entry.get("logprob"), pairs)
        if row is not None:
            raw = entry.get("bytes")
            if isinstance(raw, list) and all(isinstance(one, int) and 0 <= one < 256 for one in raw):
                row = replace(row, text=bytes(raw).decode("utf-8", "backslashreplace"), bytes=tuple(raw))
            yield row


def _rows(tokens: list[Any], values: list[Any], tops: list[Any]) -> Iterator[TokenLogprob]:
    for token, value, top in zip(tokens, values, tops):
        row = _row(token, value, top.items() if isinstance(top, dict) else ())
        if row is not None:
            yield row


def _row(token: Any, value: Any, top: Iterable[tuple[Any, Any]]) -> TokenLogprob | None:
    chosen, logprob = _id(token), _number(value)
    if chosen is None or logprob is None:
        return None
    known = {one: number for one, number in ((_id(name), _number(given)) for name, given in top) if one is not None}
    best = sorted(((one, number) for one, number in known.items() if number is not None), key=lambda item: -item[1])
    rows = tuple((one, f"token_id:{one}", number, None) for one, number in best[: MAX_TOP_LOGPROBS + 1])
    return TokenLogprob(chosen, f"token_id:{chosen}", logprob, rows)


def _name(entry: Mapping[str, Any]) -> Any:
    own = entry.get("id")
    return f"token_id:{own}" if type(own) is int else entry.get("token")


def _id(name: Any) -> int | None:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    return int(match[1]) if match is not None else None


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_SIZE <= value <= MAX_SIZE
    return float(value) if good else None
