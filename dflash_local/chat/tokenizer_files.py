"""The files of a tokenizer as transformers 4 and 5 write them, merged into one description.

Owns their precedence; refuses to know how text is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_local.checkpoint_files.json_file import MAX_TEMPLATE_CHARS, TokenizerParts
from dflash_local.errors import CheckpointError

MAX_ID_DIGITS = 10
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token outside the learned vocabulary.

    Attributes:
        special: hidden when a reply is decoded.
        control: never produced from plain text: every special token, and every tag-like one
            (``<think>``, ``[INST]``). Others (runs of spaces, extra words) are ordinary vocabulary.
    """

    id: int
    text: str
    special: bool

    @property
    def control(self) -> bool:
        """Return whether user text that spells this token must not become it."""
        return self.special or (len(self.text) > 2 and self.text[0] + self.text[-1] in ("<>", "[]"))


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """``tokenizer.json`` (with the added tokens of the other files merged in) and the settings beside it."""

    spec: dict[str, Any]
    config: Mapping[str, Any]
    added: tuple[AddedToken, ...]
    template: str | None


def token_text(value: object) -> str | None:
    """Return the text of a token written as ``"<s>"`` or ``{"content": "<s>", ...}``; None for anything else."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def id_of(key: str) -> int | None:
    """Return the id that a key of ``added_tokens_decoder`` spells; None for what is none or too long for one."""
    return int(key) if key.isdecimal() and len(key) <= MAX_ID_DIGITS else None


def merged(parts: TokenizerParts) -> TokenizerFiles:
    """Merge all files into one description. CheckpointError: tokenizer.json has no model, or a token no id."""
    spec, config = parts.spec, parts.config
    if not isinstance(spec.get("model"), dict):
        raise CheckpointError("tokenizer.json has no model section", "fetch it again")
    special = set(_special_texts(config)) | set(_special_texts(parts.special_tokens))
    entries = _merged_entries(spec, config, parts.added_tokens, special)
    # A saved truncation would cut prompts silently; transformers switches both off per call as well.
    spec = {**spec, "added_tokens": entries, "truncation": None, "padding": None}
    added = tuple(AddedToken(e["id"], e["content"], bool(e.get("special"))) for e in entries)
    return TokenizerFiles(spec, config, added, chat_template(parts))


def _special_texts(source: Mapping[str, Any]) -> Iterator[str]:
    """Return the texts of the tokens that a settings file names as special, in both layouts (v4 lists, v5 maps)."""
    values: list[object] = [source.get(name) for name in SPECIAL_NAMES]
    for name in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
        extra = source.get(name)
        values.extend(extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ())
    for value in values:
        if text := token_text(value):
            yield text


def _merged_entries(
    spec: Mapping[str, Any], config: Mapping[str, Any], extra: Mapping[str, Any], special: set[str]
) -> list[dict[str, Any]]:
    """Return the added tokens of all files in id order; ``tokenizer.json`` wins, a text is kept once."""
    found: list[dict[str, Any]] = []
    own = spec.get("added_tokens")
    found.extend(dict(entry) for entry in (own if isinstance(own, list) else ()) if isinstance(entry, dict))
    listed = config.get("added_tokens_decoder")
    for key, entry in (listed if isinstance(listed, dict) else {}).items():
        if isinstance(entry, dict) and (token_id := id_of(key)) is not None:
            found.append({**entry, "id": token_id})
    found.extend({"id": token_id, "content": text} for text, token_id in extra.items())
    unique: dict[str, dict[str, Any]] = {}
    for entry in found:
        text, token_id = entry.get("content"), entry.get("id")
        if not isinstance(text, str) or not text or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise CheckpointError(f"added token {text!r} has the id {token_id!r}", "fetch the tokenizer's files again")
        flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        marked = bool(entry.get("special")) or text in special
        unique.setdefault(text, {"id": token_id, "content": text, **flags, "special": marked})
    return sorted(unique.values(), key=lambda entry: entry["id"])


def chat_template(parts: TokenizerParts) -> str | None:
    """Return the chat template, of several the default one; None for a base model. CheckpointError: it is too long."""
    value = parts.template
    if isinstance(value, list):
        named = {
            row.get("name"): row.get("template")
            for row in value
            if isinstance(row, dict) and isinstance(row.get("name"), str)
        }
        value = named.get("default")
    if not isinstance(value, str) or not value:
        return None
    if len(value) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(f"the chat template has {len(value)} characters, {MAX_TEMPLATE_CHARS} allowed")
    return value


def takes_effort(template: str | None) -> bool:
    """Return whether a template reads ``reasoning_effort``."""
    return "reasoning_effort" in (template or "")
