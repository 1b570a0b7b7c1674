"""A checkpoint in one GGUF file, or in several that were split from one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_local.checkpoint_files.gguf_config import config_of, generation_of
from dflash_local.checkpoint_files.gguf_header import GgufHeader, open_gguf
from dflash_local.checkpoint_files.gguf_names import hf_tensors
from dflash_local.checkpoint_files.gguf_quantization import quantization_config
from dflash_local.checkpoint_files.gguf_tokenizer import tokenizer_of
from dflash_local.checkpoint_files.json_file import TokenizerParts
from dflash_local.checkpoint_files.tensor_info import TensorInfo, check_types

NAMES = ("general.name", "general.basename")
BASES = re.compile(r"general\.base_model\.\d+\.(name|repo_url)")


@dataclass(frozen=True)
class GgufFile:
    """A ``Source``."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path

    @cached_property
    def header(self) -> GgufHeader:
        return open_gguf(self.path)

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    @cached_property
    def _config(self) -> dict[str, Any]:
        """Read it once: it looks at every token of the vocabulary and at every tensor."""
        found = config_of(self.header)
        quantization = quantization_config(self._tensors)
        return found if quantization is None else {**found, "quantization_config": quantization}

    def origins(self) -> tuple[str, ...]:
        keys = [key for key in self.header.metadata if key in NAMES or BASES.fullmatch(key)]
        return tuple(str(self.header.metadata[key]) for key in keys)

    def generation_config(self) -> dict[str, Any]:
        return generation_of(self.header)

    def tokenizer(self) -> TokenizerParts | None:
        found = tokenizer_of(self.header.metadata)
        if found is None:
            return None
        spec, config = found
        return TokenizerParts(spec, config, template=config.get("chat_template"))

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def headers(self) -> dict[Path, int]:
        found: dict[Path, int] = {}
        for tensor in self.header.tensors.values():
            found[tensor.file] = min(tensor.offset, found.get(tensor.file, tensor.offset))
        return found

    @cached_property
    def _tensors(self) -> dict[str, TensorInfo]:
        check_types(self.header.tensors.values())  # first: such weights have tensors of their own beside them
        return hf_tensors(self.header)
