"""Tiny GGUF targets of a width that every type of blocks divides: the golden ones made larger, with random matrices."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS
from tests.quantized_weights import gguf_blocks

GOLDEN = Path(__file__).parent / "golden" / "gguf"
WIDTH = 256
MODELS = ("llama", "qwen3", "qwen35", "qwen3next", "qwen3moe", "qwen35moe", "gpt-oss")
SCALED = re.compile(
    r".*[.](embedding_length|(expert_|expert_shared_)?feed_forward_length|attention[.](key|value)_length|"
    r"rope[.]dimension_(count|sections)|ssm[.](state|inner)_size)"
)
# Axes that do not grow with the width: vocabulary, experts, heads, taps of the convolution.
FIXED = {
    0: re.compile(r"(token_embd|output)[.]|.*[.](ffn_gate_inp|ssm_(a|dt|alpha|beta|ba)\b|attn_sinks|ffn_\w+_exps)"),
    1: re.compile(r".*[.]ssm_conv1d"),
}
TypeOf = Callable[[str], str | None]  # of a matrix by its name in the file; None: bfloat16


def all_of(dtype: str) -> TypeOf:
    """Every matrix that a quantizer takes."""
    return lambda name: None if re.search(r"ffn_gate_inp|ssm_(alpha|beta|ba)", name) else dtype


def mixed(name: str) -> str | None:
    """As files mix types; two of the projections of a layer differ."""
    if "attn_v" in name or "attn_gate" in name or "ffn_down" in name:
        return "Q6_K"
    return "Q8_0" if "token_embd" in name or "attn_output" in name or "ssm_alpha" in name else all_of("Q4_K")(name)


def write_model(file: Path, name: str, type_of: TypeOf, tied: bool = False) -> Path:
    """The model of ``tests/golden/gguf/NAME.gguf``, wider, its matrices of random blocks; ``tied``: without a head."""
    reader = gguf.GGUFReader(GOLDEN / f"{name}.gguf")
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = fields["general.architecture"].contents()
    factor = WIDTH // int(fields[f"{architecture}.embedding_length"].contents())
    writer = gguf.GGUFWriter(file, architecture)
    for key, field in fields.items():
        if key != "general.architecture":
            value, kinds = field.contents(), field.types
            if SCALED.fullmatch(key):
                value = [each * factor for each in value] if isinstance(value, list) else value * factor
            writer.add_key_value(key, value, kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for number, tensor in enumerate(reader.tensors):
        if tied and tensor.name == "output.weight":
            continue
        shape = [int(size) for size in reversed(tensor.shape)]
        wide = [
            size * (1 if axis in FIXED and FIXED[axis].match(tensor.name) else factor)
            for axis, size in enumerate(shape)
        ]
        if "_exps.weight" in tensor.name:
            wide = [shape[0], *(size * factor for size in shape[1:])]
        _add(writer, tensor, wide, number, type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, tensor: Any, shape: list[int], number: int, type_of: TypeOf) -> None:
    coded = len(shape) > 1 and tensor.tensor_type.name != "F32"
    dtype = type_of(tensor.name) if coded else None
    if dtype is not None:
        blocks = sized_blocks(dtype, int(np.prod(shape[:-1])), shape[-1], number)
        writer.add_tensor(tensor.name, blocks.view(*shape[:-1], -1).numpy(), raw_dtype=gguf.GGMLQuantizationType[dtype])
        return
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(list(reversed(tensor.shape)))
    for axis, size in enumerate(shape):
        values = np.repeat(values, size // values.shape[axis], axis)
    if tensor.name == "rope_freqs.weight":
        values = np.ones(shape)
    if coded:
        values = np.random.default_rng(number).standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5
        half = gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(tensor.name, half, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, dtype=np.float32))


def sized_blocks(dtype: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    """Random rows of blocks, uint8, whose weights keep the scale of what they are multiplied with."""
    blocks = gguf_blocks(dtype, rows, columns, seed=seed, floats=1.0)
    weights = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[dtype])
    spread = float(np.sqrt(np.mean(np.square(weights))))
    assert rows * columns % BLOCKS[dtype][0] == 0
    return gguf_blocks(dtype, rows, columns, seed=seed, floats=1.5 * columns**-0.5 / spread)
