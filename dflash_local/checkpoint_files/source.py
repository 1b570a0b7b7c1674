"""A checkpoint as it lies on disk, in whatever format: its configuration, its tokenizer, and where its tensors are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dflash_local.errors import CheckpointError

if TYPE_CHECKING:
    from dflash_local.checkpoint_files.tensor_info import TensorInfo
    from dflash_local.checkpoint_files.tokenizer_parts import TokenizerParts


class Source(Protocol):
    """Reads nothing until it is asked. Every method raises CheckpointError, naming the file that is damaged.

    Attributes:
        path: the folder or file. config_file: what messages about a value of the configuration name.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config_file(self) -> Path: ...

    def config(self) -> dict[str, Any] | None:
        """The contents of ``config.json``; None where there is none."""

    def origins(self) -> tuple[str, ...]:
        """What the model is called and what it was made of, in its files' own words; no names where nothing says so."""

    def generation_config(self) -> dict[str, Any]:
        """The contents of ``generation_config.json``; empty where there is none."""

    def tokenizer(self) -> TokenizerParts | None:
        """None where there is none."""

    def tensors(self) -> dict[str, TensorInfo]:
        """By the names that transformers has for them."""


def needed_config(source: Source) -> dict[str, Any]:
    """The configuration of a checkpoint that must have one. CheckpointError: it has none, or it is damaged."""
    config = source.config()
    if config is None:
        raise CheckpointError(
            f"{source.config_file} does not exist", "a checkpoint folder holds config.json and model.safetensors"
        )
    return config


def is_on_disk(text: str) -> bool:
    """True where what a user typed is a folder or file rather than a name."""
    return os.path.exists(os.path.expanduser(text))  # os.path: a name that no path can be is simply not one


def open_source(path: Path) -> Source:
    """The checkpoint in a folder of safetensors files, or in a GGUF file."""
    if path.is_file():
        from dflash_local.checkpoint_files.gguf_file import GgufFile

        return GgufFile(path)
    from dflash_local.checkpoint_files.safetensors_folder import SafetensorsFolder

    return SafetensorsFolder(path)
