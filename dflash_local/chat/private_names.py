"""A tokenizer.json whose control tokens carry names that no text can spell."""

from __future__ import annotations

from typing import Any


def renamed_spec(spec: dict[str, Any], private: dict[str, str]) -> dict[str, Any]:
    """A tokenizer.json in which every control token has its private name and plain text reaches none of them.

    Args:
        private: control text -> private name.
    """
    model = dict(spec["model"])
    entries = [{**entry, "content": private.get(entry["content"], entry["content"])} for entry in spec["added_tokens"]]
    model["vocab"], renamed = _renamed(model.get("vocab"), private)
    if renamed and isinstance(model.get("merges"), list):
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, renamed)]
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in renamed:
        model["unk_token"] = private[unknown]
    return {**spec, "model": model, "added_tokens": entries}


def _renamed(vocabulary: Any, private: dict[str, str]) -> tuple[Any, set[str]]:
    """The model's vocabulary (a map, or the list of a Unigram model) without the controls' own texts."""
    if isinstance(vocabulary, dict):
        present = private.keys() & vocabulary.keys()
        return {private.get(text, text): token_id for text, token_id in vocabulary.items()}, set(present)
    if isinstance(vocabulary, list) and all(isinstance(row, list) and len(row) == 2 for row in vocabulary):
        present = private.keys() & {row[0] for row in vocabulary}
        return [[private.get(row[0], row[0]), row[1]] for row in vocabulary], set(present)
    return vocabulary, set()


def _touches(pair: object, texts: set[str]) -> bool:
    """True for a BPE merge that needs or makes one of ``texts``: plain text could reach a control token."""
    parts = pair.split(" ") if isinstance(pair, str) else pair
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return False
    return "".join(parts) in texts or not texts.isdisjoint(parts)
