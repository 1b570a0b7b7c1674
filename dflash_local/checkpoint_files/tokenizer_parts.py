"""A checkpoint's tokenizer as its files say it, before they are merged into one description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_TEMPLATE_CHARS = 1_000_000


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a checkpoint says of its tokenizer, file by file, as transformers names the files.

    Attributes:
        spec: ``tokenizer.json``. config: ``tokenizer_config.json``. special_tokens: ``special_tokens_map.json``.
        added_tokens: ``added_tokens.json``, text to id. template: the chat template, or several by their names.
    """

    spec: dict[str, Any]
    config: Mapping[str, Any]
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    added_tokens: Mapping[str, Any] = field(default_factory=dict)
    template: object = None
