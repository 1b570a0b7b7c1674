"""GGUF models in several files, joined into one header. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.checkpoint_files.gguf_header import GgufHeader, read_gguf
from dflash_local.checkpoint_files.weight_file import AGAIN
from dflash_local.errors import CheckpointError

MAX_PARTS = 500
NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def open_gguf(file: Path) -> GgufHeader:
    """The header of a model whose only file, or any part, is ``file``; metadata are those of the first part.

    Raises:
        CheckpointError: as of ``read_gguf`` for any part; and, naming the file, a part that is missing, is another one
            than its name says, belongs to another model, or holds a tensor that an earlier one has.
    """
    header = read_gguf(file)
    count = header.metadata.get(COUNT, 1)
    if count in (0, 1):
        return header
    parts = [header if part == file else read_gguf(part) for part in _names(file, count)]
    first = parts[0].metadata
    tensors = dict(parts[0].tensors)
    for number, part in enumerate(parts):
        if part.metadata.get(NUMBER) != number:
            text = f"{part.file} is part {number + 1} by its name, by its header {NUMBER} is"
            raise CheckpointError(f"{text} {shown(part.metadata.get(NUMBER))}", AGAIN)
        for key in (COUNT, TENSORS):
            if part.metadata.get(key) != first.get(key):
                raise CheckpointError(f"{part.file} is a part of another model: its {key} differs", AGAIN)
        twice = next((name for name in part.tensors if number and name in tensors), None)
        if twice is not None:
            raise CheckpointError(f"{part.file} holds the tensor {shown(twice)}, which an earlier part has", AGAIN)
        tensors |= part.tensors
    if len(tensors) != first.get(TENSORS):
        text = f"{file} and its other parts hold {len(tensors)} tensors, {TENSORS} is {shown(first.get(TENSORS))}"
        raise CheckpointError(text, AGAIN)
    return GgufHeader(first, tensors, parts[0].file)


def _names(file: Path, count: object) -> list[Path]:
    """The files of all ``count`` parts, which lie beside each other."""
    named = NAME.fullmatch(file.name)
    if type(count) is not int or not 1 < count <= MAX_PARTS:
        raise CheckpointError(f"{file}: {COUNT} {shown(count)} is no number up to {MAX_PARTS}", AGAIN)
    if not named or int(named["count"]) != count:
        hint = f"parts are named like NAME-00001-of-{count:05}.gguf and lie in one folder"
        raise CheckpointError(f"{file} is one of {count} parts, which its name does not say", hint)
    return [file.with_name(f"{named['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
