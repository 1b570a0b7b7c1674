"""How much text one token can stand for at most: what makes a hopelessly long prompt known without its ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dflash_local.chat.detokenizer import byte_characters

# By how much a text's UTF-8 bytes can shrink at most (a test goes through all of Unicode).
NORMAL_FORMS = dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD"), 4)
_SPLITTERS = {"Split", "Digits", "Punctuation"}


class TokenLength:
    """A bound from below on the number of ids of a text.

    It holds where every byte of the text ends up in some token: a BPE model that knows all 256 bytes (byte-level,
    or with byte fallback), pre-tokenizers that throw nothing away, and normalizers that shrink a text by a known
    factor at most. Where one of them is anything else there is no bound, and ``at_least`` is 0.

    Args:
        spec: of tokenizer.json, with the texts of its added tokens as the text to be encoded spells them.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        added = [entry for entry in spec["added_tokens"] if isinstance(entry, dict)]
        # Added tokens may swallow the space around them, any amount of it.
        self._strips = any(entry.get("lstrip") or entry.get("rstrip") for entry in added)
        self._longest = _longest(spec, [str(entry["content"]) for entry in added])
        compared = [str(entry["content"]) for entry in added if entry.get("normalized")]
        for step in _steps(spec.get("normalizer"), "normalizers"):
            self._longest *= _shrinks(step)
            if compared and not (step.get("type") in NORMAL_FORMS and "".join(compared).isascii()):
                self._longest = 0  # such a token is looked for in a form whose length is not known here

    def at_least(self, text: str) -> int:
        """No fewer ids than this come of ``text`` (valid Unicode)."""
        if not self._longest:
            return 0
        size = len(("".join(text.split()) if self._strips else text).encode())
        return -(-size // self._longest)


def _longest(spec: dict[str, Any], added: Iterable[str]) -> int:
    """Most bytes of normalised text in one token; 0 where a token can stand for any number of them."""
    model = spec["model"]
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return 0
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return 0  # a byte in the vocabulary may then be unknown where it stands
    splits = list(_steps(spec.get("pre_tokenizer"), "pretokenizers"))
    kinds = {str(step.get("type")) for step in splits}
    if any(step.get("behavior") == "Removed" for step in splits) or kinds - _SPLITTERS - {"ByteLevel", "Metaspace"}:
        return 0
    if "ByteLevel" in kinds and byte_characters().keys() <= vocabulary.keys():
        sizes = [len(text) for text in vocabulary]
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        sizes = [len(text.encode("utf-8", "replace")) for text in vocabulary]
    else:
        return 0
    return max([*sizes, *(len(text.encode("utf-8", "replace")) for text in added)], default=0)


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, in order; sequences may hold sequences."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        for inner in part.get(name) or ():
            yield from _steps(inner, name)
    elif part is not None:
        yield part if isinstance(part, dict) else {}


def _shrinks(step: dict[str, Any]) -> int:
    """The factor by which a normalizer's step can shrink a text; 0 when it is not known."""
    kind = step.get("type")
    if kind == "Prepend":
        return 1
    if kind == "Replace":
        pattern, content = step.get("pattern"), step.get("content")
        before = pattern.get("String") if isinstance(pattern, dict) else None
        known = isinstance(before, str) and isinstance(content, str) and len(before.encode()) <= len(content.encode())
        return int(known)
    return NORMAL_FORMS.get(str(kind), 0)
