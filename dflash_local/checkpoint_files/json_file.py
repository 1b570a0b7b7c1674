"""JSON files that came with a checkpoint: plain files only, of a bounded size, one object each. Torch-free."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.errors import CheckpointError
from dflash_local.json_text import parse_json

MAX_CONFIG_BYTES = 16 * 2**20  # the longest are those that list what was left out of a quantisation
MAX_TEMPLATE_CHARS = 1_000_000
MAX_JSON_BYTES = 100_000_000  # tokenizer.json and weight indices: 33 MB are published
# A device or a pipe must not be waited for; Windows has neither flag and neither kind of file.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


class RepeatedKeyError(CheckpointError):
    """An object that holds a key twice; ``key`` is that one."""

    def __init__(self, message: str, hint: str, key: str) -> None:
        super().__init__(message, hint)
        self.key = key

    @property
    def kind(self) -> str:
        return CheckpointError.__name__


def open_plain(file: Path, hint: str = "") -> BinaryIO:
    """Open a file for reading that is a plain one, itself or at the end of its links.

    Raises:
        FileNotFoundError: there is none, or a folder on its way is a file.
        CheckpointError: it is a folder, a pipe or a device, or cannot be opened; names it.
    """
    try:
        descriptor = os.open(file, _FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(file)) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", hint) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{file} is not a plain file", hint or "a checkpoint holds files, no pipes or devices")
    return os.fdopen(descriptor, "rb")


def read_bytes(file: Path, limit: int, hint: str = "") -> bytes:
    """Read a plain file of at most ``limit`` bytes. FileNotFoundError, CheckpointError: as of ``open_plain``."""
    with open_plain(file, hint) as stream:
        try:
            raw = stream.read(limit + 1)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}", hint) from error
    if len(raw) > limit:
        raise CheckpointError(f"{file} is larger than {limit} bytes", hint)
    return raw


def read_object(
    file: Path, hint: str = "", *, limit: int = MAX_CONFIG_BYTES, optional: bool = False, unique: bool = False
) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        limit: in bytes. optional: a file that is not there reads as an empty object.
        unique: refuse an object that holds a key twice.

    Raises:
        CheckpointError: naming the file; missing, no plain file, too large, no JSON, or no object.
    """
    try:
        raw = read_bytes(file, limit, hint)
    except FileNotFoundError:
        if optional:
            return {}
        raise CheckpointError(f"{file} does not exist", hint) from None
    return parse_object(raw, str(file), hint, unique=unique)


def parse_object(raw: bytes, what: str, hint: str = "", *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in ``raw``; errors as ``read_object``, calling it ``what``."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise RepeatedKeyError(f"{what} holds {shown(twice)} twice", hint, twice)
        return result

    try:
        value = parse_json(raw, once if unique else None)
    except ValueError as error:
        raise CheckpointError(f"{what} is not valid JSON: {shown(str(error))}", hint) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} must hold a JSON object, it holds {shown(value)}", hint)
    return value


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Hold what a checkpoint says of its tokenizer, file by file, as transformers names the files.

    Attributes:
        spec: ``tokenizer.json``. config: ``tokenizer_config.json``. special_tokens: ``special_tokens_map.json``.
        added_tokens: ``added_tokens.json``, text to id. template: the chat template, or several by their names.
    """

    spec: dict[str, Any]
    config: Mapping[str, Any]
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    added_tokens: Mapping[str, Any] = field(default_factory=dict)
    template: object = None
