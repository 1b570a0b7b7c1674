"""A checkpoint as transformers saves it: a folder of JSON files and safetensors files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.checkpoint_files.json_file import (
    MAX_CONFIG_BYTES,
    MAX_JSON_BYTES,
    MAX_TEMPLATE_CHARS,
    TokenizerParts,
    read_bytes,
    read_object,
)
from dflash_local.checkpoint_files.safetensors_header import header_bytes, read_header
from dflash_local.checkpoint_files.tensor_info import AGAIN, TensorInfo
from dflash_local.errors import CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
MODELOPT_CONFIG = "hf_quant_config.json"  # beside a config.json in which older versions of ModelOpt say nothing
QUANTIZATION = "quantization_config"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
MAX_TEMPLATE_BYTES = 4 * MAX_TEMPLATE_CHARS
NAMED = 8  # tensor names listed in one message


def name_list(names: Iterable[str]) -> str:
    """Return tensor names for a message: the first few, then how many more."""
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(shown(name)[1:-1] for name in ordered[:NAMED]) + more


ORIGINS = ("_name_or_path", "base_model")  # keys of a config.json that may name what a fine-tune began as


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """A ``Source``."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG

    def config(self) -> dict[str, Any] | None:
        """Read it with its ``quantization_config``, which ModelOpt may have left to a file of its own."""
        if not os.path.lexists(self.config_file):
            return None
        config = self._object(CONFIG)
        beside = {} if config.get(QUANTIZATION) else self._object(MODELOPT_CONFIG)
        return {**config, QUANTIZATION: {"quant_method": "modelopt", **beside}} if beside else config

    def origins(self) -> tuple[str, ...]:
        config = self.config() or {}
        return tuple(str(config[key]) for key in ORIGINS if config.get(key))

    def generation_config(self) -> dict[str, Any]:
        return self._object(GENERATION_CONFIG)

    def tokenizer(self) -> TokenizerParts | None:
        if not (self.path / TOKENIZER).exists():
            return None
        config = self._object("tokenizer_config.json")
        return TokenizerParts(
            self._object(TOKENIZER),
            config,
            self._object("special_tokens_map.json"),
            self._object("added_tokens.json"),
            self._template(config),
        )

    def tensors(self) -> dict[str, TensorInfo]:
        if (self.path / SINGLE).exists():
            return read_header(self.path / SINGLE)
        if (self.path / INDEX).exists():
            return self._sharded()
        if any(self.path.glob("*.safetensors")):
            raise CheckpointError(f"{self.path} has shards but no {INDEX}", AGAIN)
        others = sorted(file.name for file in self.path.iterdir() if file.suffix in OTHER_FORMATS)
        if others:
            raise CheckpointError(
                f"{self.path} holds {name_list(others)} but no {SINGLE}: safetensors and GGUF only",
                "give a GGUF file by its own path; take a revision with safetensors in place of other formats",
            )
        raise CheckpointError(f"{self.path} has neither {SINGLE} nor {INDEX}", AGAIN)

    def headers(self) -> dict[Path, int]:
        return {file: header_bytes(file) for file in self.path.iterdir() if file.suffix == ".safetensors"}

    def _sharded(self) -> dict[str, TensorInfo]:
        """Return all headers an index names, checked against the index."""
        index = self.path / INDEX
        weight_map = read_object(index, AGAIN, limit=MAX_JSON_BYTES, unique=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map", AGAIN)
        for name, shard in weight_map.items():
            # A shard is a plain file name: a path could lead out of the folder.
            if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
                where = f"places {shown(name)} in {shown(shard)}"
                raise CheckpointError(f"{index} {where}, which is not a shard's name", AGAIN)
        tensors: dict[str, TensorInfo] = {}
        for shard in sorted(set(weight_map.values())):
            for name, info in read_header(self.path / shard).items():
                if name in tensors:
                    both = f"both {tensors[name].file} and {info.file}"
                    raise CheckpointError(f"tensor {shown(name)} is in {both}", AGAIN)
                tensors[name] = info
        for name, shard in weight_map.items():
            if name not in tensors or tensors[name].file.name != shard:
                lacking = f"{self.path / shard} lacks the tensor {shown(name)}"
                raise CheckpointError(f"{lacking} that {INDEX} places there", AGAIN)
        return tensors

    def _template(self, config: dict[str, Any]) -> object:
        """Return the chat template: its own file first (transformers 5), then the one inside the settings."""
        path = self.path / "chat_template.jinja"
        try:
            return read_bytes(path, MAX_TEMPLATE_BYTES, f"fetch {path} again").decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}", f"fetch {path} again") from error
        except FileNotFoundError:
            beside = config if "chat_template" in config else self._object("chat_template.json")
            return beside.get("chat_template")

    def _object(self, name: str) -> dict[str, Any]:
        path = self.path / name
        limit = MAX_JSON_BYTES if name == TOKENIZER else MAX_CONFIG_BYTES
        return read_object(path, f"fetch {path} again", limit=limit, optional=True)
