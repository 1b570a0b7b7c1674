"""Text to ids with the ``tokenizers`` library, in a process of its own: a checkpoint's rules can hang or abort it.

A handler of ``worker.child``: imports the standard library and tokenizers only, nothing of the package. A request
is one line of JSON and, after it, bytes; so is an answer.
"""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any

import tokenizers

_HELD: list[Any] = []  # the one tokenizer, after ``load``


def answer(request: bytes) -> bytes:
    """Do what the line asks for: ``load`` a tokenizer.json, or ``encode`` UTF-8 text."""
    head, _, data = request.partition(b"\n")
    command = json.loads(head)
    if command["do"] == "load":
        return json.dumps(load(data, command["tokens"])).encode()
    return encode(data.decode("utf-8"), command["limit"])


def load(data: bytes, tokens: list[str]) -> dict[str, Any]:
    """Return the ids of these tokens (null for none) and of the empty text with the special tokens around it."""
    try:
        library = tokenizers.Tokenizer.from_buffer(data)
    except ValueError as error:
        return {"error": str(error)}
    _HELD[:] = [library]
    return {"ids": [library.token_to_id(token) for token in tokens], "around": library.encode("").ids}


def encode(text: str, limit: int | None) -> bytes:
    """Return the count of ids and, unless there are more than ``limit``, the ids as 32-bit little-endian numbers."""
    # The fast form leaves out the offsets, which nobody here asks for and which take most of the memory.
    ids = array("I", _HELD[0].encode_batch_fast([text], add_special_tokens=False)[0].ids)
    if sys.byteorder == "big":
        ids.byteswap()
    sent = ids.tobytes() if limit is None or len(ids) <= limit else b""
    return json.dumps({"count": len(ids)}).encode() + b"\n" + sent
