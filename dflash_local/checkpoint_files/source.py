"""A checkpoint as it lies on disk, in whatever format: its configuration, its tokenizer, and where its tensors are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dflash_local.errors import CheckpointError

if TYPE_CHECKING:
    from dflash_local.checkpoint_files.json_file import TokenizerParts
    from dflash_local.checkpoint_files.tensor_info import TensorInfo


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
        """Return the contents of ``config.json``; None where there is none."""

    def origins(self) -> tuple[str, ...]:
        """Return the names of the model and of what it was made of, in its files' own words."""

    def generation_config(self) -> dict[str, Any]:
        """Return the contents of ``generation_config.json``; empty where there is none."""

    def tokenizer(self) -> TokenizerParts | None:
        """Return the tokenizer's files; None where there is none."""

    def tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors by the names that transformers has for them."""

    def headers(self) -> dict[Path, int]:
        """Return the files that tensors lie in, and how many bytes at the head of each describe them. OSError."""


def needed_config(source: Source) -> dict[str, Any]:
    """Return the configuration of a checkpoint that must have one. CheckpointError: it has none, or it is damaged."""
    config = source.config()
    if config is None:
        raise CheckpointError(
            f"{source.config_file} does not exist", "a checkpoint folder holds config.json and model.safetensors"
        )
    return config


def is_on_disk(text: str) -> bool:
    """Return True where what a user typed is a folder or file rather than a name."""
    return os.path.exists(os.path.expanduser(text))  # os.path: a name that no path can be is simply not one


def given_path(text: str) -> Path:
    """Return the path that a user typed, absolute: the engine's process has another current folder."""
    return Path(os.path.expanduser(text)).absolute()


def open_source(path: Path) -> Source:
    """Return the checkpoint in a folder of safetensors files, or in a GGUF file."""
    if path.is_file():
        from dflash_local.checkpoint_files.gguf_file import GgufFile

        return GgufFile(path)
    from dflash_local.checkpoint_files.safetensors_folder import SafetensorsFolder

    return SafetensorsFolder(path)
