"""Ids to text through bytes: one table of token bytes and an incremental UTF-8 decoder.

Streamed text equals one-shot text by construction, in constant time per token; nothing is decoded twice.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any

from dflash_local.errors import CheckpointError

MAX_DEPTH = 8  # of sequences in sequences
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_characters() -> dict[str, int]:
    """Return the 256 printable stand-ins of byte-level BPE, character -> byte (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(b for b in range(256) if b not in set(printable)):
        table[chr(256 + offset)] = byte
    return table


_BYTES = byte_characters()


class TokenBytes:
    """The bytes of a token's vocabulary text under one of three rules.

    ``byte-level``: every character stands for a byte. ``sentencepiece``: ``▁`` is a space, ``<0xNN>`` a
    byte, and one space at the start of a text is dropped where the decoder says so. ``joined``: words
    with a space between them (tokenizers without a decoder).
    """

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        steps = _flatten(decoder)
        kinds = {str(step.get("type")) for step in steps}
        self.joined = not steps
        self.byte_level = "ByteLevel" in kinds
        unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if unknown:
            raise CheckpointError(
                f"tokenizer.json has a decoder of type {', '.join(sorted(unknown))}, which is not supported",
                "byte-level and sentencepiece tokenizers are; prompt ids work with any",
            )
        self.byte_fallback = "ByteFallback" in kinds
        self.drops_first_space = any(map(_drops_first_space, steps)) and not self.byte_level
        self._space = next((s["replacement"] for s in steps if isinstance(s.get("replacement"), str)), "▁")

    def __call__(self, text: str) -> bytes:
        if self.byte_level:
            mapped = [_BYTES.get(character, -1) for character in text]
            return text.encode("utf-8", "replace") if -1 in mapped else bytes(mapped)
        if self.joined:
            return text.encode("utf-8", "replace")
        match = _BYTE_TOKEN.fullmatch(text) if self.byte_fallback else None
        return bytes([int(match[1], 16)]) if match else text.replace(self._space, " ").encode("utf-8", "replace")

    def placed(self, data: bytes, first: bool) -> bytes:
        """Return what a token's bytes add to a text; ``first`` where no other token stands before it."""
        if first:
            return data[1:] if self.drops_first_space and data.startswith(b" ") else data
        return b" " + data if self.joined else data


def _flatten(decoder: object, depth: int = 0) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if not isinstance(decoder, dict) or depth > MAX_DEPTH:
        raise CheckpointError("tokenizer.json has a damaged decoder", "fetch the tokenizer's files again")
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or ()
        return [step for part in (parts if isinstance(parts, list) else (parts,)) for step in _flatten(part, depth + 1)]
    return [decoder]


def _drops_first_space(step: dict[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
    return step.get("type") == "Strip" and step.get("content") == " " and bool(step.get("start"))


class StreamDecoder:
    """Turns ids into text as they come; only whole characters leave, so U+FFFD never flickers.

    Bytes that cannot become a character any more are shown as U+FFFD (one for each maximal ill-formed
    part, as ``bytes.decode`` does); an incomplete character at the end becomes one in ``finish``.
    """

    def __init__(self, token_bytes: Callable[[int], bytes | None], rules: TokenBytes, goes_on: bool = False) -> None:
        """``goes_on``: text stands before, so that a space in front of the first word is one."""
        self._token_bytes = token_bytes
        self._rules = rules
        self._started = goes_on
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text completed by this id; empty for hidden and unknown ids."""
        data = self._token_bytes(token_id)
        if data is None:
            return ""
        data = self._rules.placed(data, not self._started)
        self._started = True
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Return what is left: U+FFFD when the ids ended inside a character. The decoder can go on after it."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
