"""The ids that end a reply: the union of what every file of a checkpoint says. Works without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dflash_local.chat.tokenizer_files import id_of, read_json, token_text
from dflash_local.errors import CheckpointError

# gpt-oss ends a message with <|end|> and goes on; these two hand the turn back (harmony format).
HARMONY_STOPS = ("<|return|>", "<|call|>")
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>")


def stop_ids(folder: Path) -> frozenset[int]:
    """Ids of config.json (also its ``text_config``), generation_config.json and the tokenizer's eos.

    Raises CheckpointError for an id that is not a whole number of zero or more.
    """
    return config_stop_ids(folder) | tokenizer_stop_ids(folder, _known_tokens(folder))


def config_stop_ids(folder: Path) -> frozenset[int]:
    """``eos_token_id`` of config.json, of its ``text_config`` and of generation_config.json."""
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    found = set(_ids(config.get("eos_token_id"), "config.json"))
    if isinstance(text_config, dict):
        found.update(_ids(text_config.get("eos_token_id"), "config.json (text_config)"))
    generation = read_json(folder / "generation_config.json")
    found.update(_ids(generation.get("eos_token_id"), "generation_config.json"))
    return frozenset(found)


def tokenizer_stop_ids(folder: Path, tokens: dict[str, int]) -> frozenset[int]:
    """The tokenizer's ``eos_token`` and, where all harmony tags exist, ``<|return|>`` and ``<|call|>``."""
    files = (read_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    texts = {text for file in files if (text := token_text(file.get("eos_token")))}
    if all(tag in tokens for tag in HARMONY_TAGS):
        texts.update(HARMONY_STOPS)
    return frozenset(tokens[text] for text in texts if text in tokens)


def _ids(value: object, source: str) -> Iterator[int]:
    entries: Iterable[object] = value if isinstance(value, list) else () if value is None else (value,)
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
            raise CheckpointError(f"{source}: eos_token_id {entry!r} is not a token id", "it must be a whole number")
        yield entry


def _known_tokens(folder: Path) -> dict[str, int]:
    """Text -> id of the added tokens, and of the vocabulary for an eos that is not one of them."""
    spec = read_json(folder / "tokenizer.json")
    model = spec.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    entries = vocabulary.items() if isinstance(vocabulary, dict) else ()
    tokens = {text: token_id for text, token_id in entries if isinstance(token_id, int)}
    listed = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for key, entry in (listed if isinstance(listed, dict) else {}).items():
        if (text := token_text(entry)) and (token_id := id_of(key)) is not None:
            tokens[text] = token_id
    added = spec.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and (text := token_text(entry)) and isinstance(entry.get("id"), int):
            tokens[text] = entry["id"]
    return tokens
