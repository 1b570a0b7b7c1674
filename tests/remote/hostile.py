"""Answers that never end, or are none: what a hostile server sends in place of one, head included.

Each mode is an endless or short iterator of bytes. ``PROBES`` answer a GET, ``STREAMS`` a request for a reply.
"""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

Mode = Callable[[], Iterator[bytes]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CLOSED = OK + b"Connection: close\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
BLOCK = 64 * 2**10
DRIP_S = 0.05
BOMB = gzip.compress(b"0" * 100_000_000)


def once(data: bytes) -> Iterator[bytes]:
    yield data


def flood(head: bytes, unit: bytes) -> Iterator[bytes]:
    """As fast as the reader reads."""
    yield head
    yield from itertools.repeat(unit * max(1, BLOCK // len(unit)))


def drip(head: bytes, unit: bytes) -> Iterator[bytes]:
    """Just often enough for a reader that waits for each byte alone."""
    yield head
    while True:
        time.sleep(DRIP_S)
        yield unit


def stall(data: bytes) -> Iterator[bytes]:
    yield data
    while True:
        time.sleep(DRIP_S)
        yield b""


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(content: object) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def delta(**more: object) -> bytes:
    return event({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": more, "finish_reason": None}]})


HEADS: Mapping[str, Mode] = {
    "silence": partial(stall, b""),
    "a head byte by byte": partial(drip, b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "a status line without end": partial(flood, b"HTTP/1.1 200 ", b"a"),
    "a header without end": partial(flood, b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "headers without end": partial(flood, b"HTTP/1.1 200 OK\r\n", b"X: a\r\n"),
    "100 Continue without end": partial(flood, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "100 Continue now and then": partial(drip, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "100 Continue with headers": partial(flood, b"", b"HTTP/1.1 100 Continue\r\n" + b"X: a\r\n" * 90 + b"\r\n"),
    "103 Early Hints without end": partial(flood, b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "no HTTP": partial(once, b"SSH-2.0-OpenSSH_9.6\r\n"),
    "no HTTP without end": partial(flood, b"", bytes(range(256))),
    "nothing at all": partial(once, b""),
    "half a head": partial(once, b"HTTP/1.1 200 OK\r\nContent-Le"),
    "a redirect": partial(once, b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
    "a chunk size without end": partial(flood, CHUNKED, b"0"),
    "a chunk larger than can be counted": partial(stall, CHUNKED + b"f" * 300 + b"\r\n{}"),
    "a chunk size that is none": partial(once, CHUNKED + b"-1\r\n{}"),
    "a chunk extension without end": partial(flood, CHUNKED + b"2;", b"x"),
    "trailers without end": partial(flood, CHUNKED + chunk(b"{}") + b"0\r\n", b"X: a\r\n"),
    "a length of 400 digits": partial(stall, OK + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n{}"),
    "a length of 5,000 digits": partial(stall, OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}"),
    "a length below zero": partial(stall, OK + b"Content-Length: -1\r\n\r\n{}"),
    "a body that stops": partial(stall, OK + b"Content-Length: 99\r\n\r\n{}"),
    "a body that breaks off": partial(once, OK + b"Content-Length: 99\r\n\r\n{}"),
    "an error without end": partial(flood, b"HTTP/1.1 500 Oh\r\nConnection: close\r\n\r\n", b"no "),
    "an error byte by byte": partial(drip, b"HTTP/1.1 500 Oh\r\nConnection: close\r\n\r\n", b"n"),
}
PROBES: Mapping[str, Mode] = {
    **HEADS,
    "a body byte by byte": partial(drip, CLOSED + b'{"data": [', b" "),
    "chunks byte by byte": partial(drip, CHUNKED, chunk(b" ")),
    "a body without end": partial(flood, CLOSED + b'{"data": [', b'{"id": "demo"},'),
    "chunks without end": partial(flood, CHUNKED, chunk(b" " * 1000)),
    "chunks of a byte without end": partial(flood, CHUNKED, chunk(b" ")),
    "lines without end": partial(flood, CLOSED, b"vllm:num_requests_running 1\n"),
    "samples without end": partial(flood, CLOSED, b'vllm:a{x="1"} 1e400\n'),
    "a gzip bomb": partial(once, OK + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n" + BOMB),
    "a deep list": partial(once, CLOSED + b"[" * 200_000),
    "a deep object": partial(once, CLOSED + b'{"data":' * 200_000),
    "a number of a million digits": partial(once, CLOSED + b'{"data": ' + b"9" * 1_000_000 + b"}"),
    "many empty lists": partial(once, CLOSED + b'{"data": [' + b"[]," * 1_000_000 + b"[]]}"),
    "no JSON": partial(once, CLOSED + b"\xff\xfe\x00<html>"),
    "a list": partial(once, CLOSED + b"[1, 2]"),
    "data that is a number": partial(once, CLOSED + b'{"data": 7}'),
}
STREAMS: Mapping[str, Mode] = {
    **HEADS,
    "comments without end": partial(flood, CLOSED, b": x\n\n"),
    "comments now and then": partial(drip, CLOSED, b": x\n\n"),
    "blank lines without end": partial(flood, CLOSED, b"\n"),
    "blank lines now and then": partial(drip, CHUNKED, chunk(b"\r\n")),
    "a line without end": partial(flood, CLOSED + b"data: ", b"a"),
    "a line byte by byte": partial(drip, CLOSED + b"data: ", b"a"),
    "a comment without end": partial(flood, CLOSED + b": ", b"a"),
    "names without values without end": partial(flood, CLOSED, b"retry: 1\nid: 7\nevent: x\n"),
    "lines that are no events without end": partial(flood, CLOSED, b"what is this\n"),
    "events that are no objects without end": partial(flood, CLOSED, event([1])),
    "empty deltas without end": partial(flood, CLOSED, delta()),
    "empty deltas now and then": partial(drip, CHUNKED, chunk(delta(content=""))),
    "roles without end": partial(flood, CLOSED, delta(role="assistant", content=None)),
    "no choices without end": partial(flood, CLOSED, event({"choices": []})),
    "usage without end": partial(flood, CLOSED, event({"choices": [], "usage": {"completion_tokens": 1}})),
    "text without end": partial(flood, CLOSED, delta(content="a")),
    "thoughts without end": partial(flood, CLOSED, delta(reasoning="a")),
    "long texts without end": partial(flood, CLOSED, delta(content="a" * 1_000_000)),
    "ids without end": partial(flood, CLOSED, event({"choices": [{"delta": {}, "token_ids": list(range(1000))}]})),
    "calls without end": partial(flood, CLOSED, delta(tool_calls=[{"function": {"name": "a", "arguments": "{"}}])),
    "comments behind text": partial(flood, CLOSED + delta(content="Hel"), b": x\n\n"),
    "comments behind text now and then": partial(drip, CLOSED + delta(content="Hel"), b": x\n\n"),
    "silence behind text": partial(stall, CLOSED + delta(content="Hel")),
    "an end without end": partial(flood, CLOSED, event({"choices": [{"delta": {}, "finish_reason": "stop"}]})),
    "a break behind text": partial(once, CLOSED + delta(content="Hel")),
    "no event at all": partial(once, CLOSED + b"data: [DONE]\n\n"),
    "a gzip bomb": partial(flood, OK + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n", BOMB),
}


def big(text: str) -> bytes:
    """An event with the number of 401 digits where ``text`` has HUGE."""
    return text.replace("HUGE", "1" + "0" * 400).encode()


TEXT = '"choices": [{"delta": {"content": "Hel"}}]'


def likely(logprobs: str) -> bytes:
    return big(f'{{"choices": [{{"delta": {{"content": "Hel"}}, "logprobs": {logprobs}}}]}}')


def drafted(figures: str) -> bytes:
    return big(f'{{"choices": [], "metrics": {{"speculative_decoding": {figures}}}}}')


MALFORMED: Mapping[str, bytes] = {
    "choices is a number": b'{"choices": 7}',
    "choices is an object": b'{"choices": {"0": {}}}',
    "a choice is a list": b'{"choices": [[]]}',
    "delta is a number": b'{"choices": [{"delta": 7}]}',
    "delta is a list": b'{"choices": [{"delta": ["a"]}]}',
    "content is a number": b'{"choices": [{"delta": {"content": 7}}]}',
    "content is a list": b'{"choices": [{"delta": {"content": ["a"]}}]}',
    "reasoning is true": b'{"choices": [{"delta": {"reasoning": true}}]}',
    "text is an object": b'{"choices": [{"text": {}}]}',
    "finish_reason is a list": b'{"choices": [{"delta": {}, "finish_reason": ["stop"]}]}',
    "finish_reason is an object": b'{"choices": [{"delta": {}, "finish_reason": {}}]}',
    "finish_reason is unknown": b'{"choices": [{"delta": {}, "finish_reason": "abort"}]}',
    "tool_calls is a number": b'{"choices": [{"delta": {"tool_calls": 7}}]}',
    "a call is a list": b'{"choices": [{"delta": {"tool_calls": [[]]}}]}',
    "a function is a text": b'{"choices": [{"delta": {"tool_calls": [{"function": "f"}]}}]}',
    "arguments is an object": b'{"choices": [{"delta": {"tool_calls": [{"function": {"arguments": {}}}]}}]}',
    "usage is a list": b'{"choices": [], "usage": [1]}',
    "prompt_tokens is huge": big('{"choices": [], "usage": {"prompt_tokens": HUGE}}'),
    "completion_tokens is huge": big(f'{{{TEXT}, "usage": {{"completion_tokens": HUGE}}}}'),
    "completion_tokens is below zero": b'{"choices": [], "usage": {"completion_tokens": -1}}',
    "completion_tokens is half": b'{"choices": [], "usage": {"completion_tokens": 0.5}}',
    "completion_tokens is 1e400": b'{"choices": [], "usage": {"completion_tokens": 1e400}}',
    "completion_tokens is NaN": b'{"choices": [], "usage": {"completion_tokens": NaN}}',
    "completion_tokens is a text": b'{"choices": [], "usage": {"completion_tokens": "8"}}',
    "cached_tokens is huge": big('{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": HUGE}}}'),
    "prompt_tokens_details is a text": b'{"choices": [], "usage": {"prompt_tokens_details": "x"}}',
    "token_ids is a number": b'{"choices": [{"delta": {}, "token_ids": 7}]}',
    "a token id is huge": big('{"choices": [{"delta": {}, "token_ids": [HUGE]}]}'),
    "a token id is beyond int64": b'{"choices": [{"delta": {}, "token_ids": [9223372036854775808]}]}',
    "a token id is below zero": b'{"choices": [{"delta": {}, "token_ids": [-1]}]}',
    "a token id is a text": b'{"choices": [{"delta": {}, "token_ids": ["7"]}]}',
    "prompt_token_ids is an object": b'{"choices": [], "prompt_token_ids": {}}',
    "an error of depth": b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}",
    "an error that is a number": b'{"error": 7}',
    "an error without a message": b'{"object": "error"}',
}
# What of an event is of use stands although the rest of it is odd.
TAKEN: Mapping[str, bytes] = {
    "delta is null": b'{"choices": [{"delta": null}]}',
    "choices is null": b'{"choices": null}',
    "a choice is null": b'{"choices": [null]}',
    "usage is null": b'{"choices": [], "usage": null}',
    "top_logprobs is a number": likely('{"content": [{"token": "token_id:1", "logprob": -1, "top_logprobs": 7}]}'),
    "a log probability is huge": likely('{"content": [{"token": "token_id:1", "logprob": HUGE}]}'),
    "logprobs is a number": likely("7"),
    "metrics are huge": drafted(
        '{"num_spec_steps": 1, "num_draft_tokens": HUGE, "num_accepted_draft_tokens": HUGE}'
    ),
    "metrics is a number": b'{"choices": [], "metrics": 7, "sglext": [7]}',
    "half of a surrogate pair": b'{"choices": [{"delta": {"content": "\\ud800"}}]}',
    "a surrogate as bytes": b'{"choices": [{"delta": {"content": "\xed\xa0\x80"}}]}',
    "a key that is half a pair": b'{"\\udc00": 1, "choices": []}',
    "depth": b'{"choices": ' * 100_000,
    "some depth": b'{"choices": [], "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a number of 5,000 digits": b'{"choices": [], "x": ' + b"9" * 5000 + b"}",
    "a list": b"[1]",
    "null": b"null",
    "nothing": b"",
}  # fmt: skip
