"""The ids that end a reply: the union of what every file of a checkpoint says. Works without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dflash_local.chat.tokenizer_files import token_text
from dflash_local.checkpoint_files.json_file import TokenizerParts
from dflash_local.checkpoint_files.source import Source
from dflash_local.errors import CheckpointError

# gpt-oss ends a message with <|end|> and goes on; these two hand the turn back (harmony format).
HARMONY_STOPS = ("<|return|>", "<|call|>")
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>")


def config_stop_ids(source: Source) -> frozenset[int]:
    """Return ``eos_token_id`` of config.json, of its ``text_config`` and of generation_config.json.

    Raises CheckpointError for an id that is not a whole number of zero or more.
    """
    config = source.config() or {}
    text_config = config.get("text_config")
    found = set(_ids(config.get("eos_token_id"), "config.json"))
    if isinstance(text_config, dict):
        found.update(_ids(text_config.get("eos_token_id"), "config.json (text_config)"))
    found.update(_ids(source.generation_config().get("eos_token_id"), "generation_config.json"))
    return frozenset(found)


def tokenizer_stop_ids(parts: TokenizerParts, tokens: dict[str, int]) -> frozenset[int]:
    """Return the tokenizer's ``eos_token`` and, where all harmony tags exist, ``<|return|>`` and ``<|call|>``."""
    texts = {text for file in (parts.config, parts.special_tokens) if (text := token_text(file.get("eos_token")))}
    if all(tag in tokens for tag in HARMONY_TAGS):
        texts.update(HARMONY_STOPS)
    return frozenset(tokens[text] for text in texts if text in tokens)


def _ids(value: object, source: str) -> Iterator[int]:
    entries: Iterable[object] = value if isinstance(value, list) else () if value is None else (value,)
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
            raise CheckpointError(f"{source}: eos_token_id {entry!r} is not a token id", "it must be a whole number")
        yield entry
