"""Writes a target of true shapes as a GGUF file, its blocks of random bits: for ``random_checkpoint.py``.

Coded matrices of one shape and type hold the same numbers, so that a file of 5 GB takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import torch

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.checkpoint_files.gguf_config import TARGETS
from dflash_local.checkpoint_files.gguf_keys import COMMON
from dflash_local.checkpoint_files.gguf_names import LAYERS, OUTSIDE, WHOLE
from dflash_local.checkpoint_files.tensor_info import BLOCKS
from dflash_local.config.quantization import StoredGguf
from dflash_local.config.quantizers import USUAL, read_quantization
from dflash_local.kernels.gguf_blocks import FLOAT16_AT, decode_blocks

if TYPE_CHECKING:
    from benchmarks.random_checkpoint import Values

FORMATS = tuple(name for name, each in USUAL.items() if each["quant_method"] == "gguf")
Shapes = Sequence[tuple[str, tuple[int, ...]]]  # of transformers' tensors, by name


class Tensor(NamedTuple):
    """``name``: in the file. ``shape``: outermost axis first."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def write_target(file: Path, shapes: Shapes, text: Any, stored: str, values: Values) -> None:
    """Write a target of these tensors and transformers' text configuration. SystemExit: its family has no GGUF here."""
    architecture = next((name for name, each in TARGETS.items() if each.model_type == text.model_type), None)
    if architecture is None:
        raise SystemExit(f"no GGUF file of {text.model_type} is written here")
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in _keys(text, architecture).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    drawn: dict[Any, torch.Tensor] = {}
    for source, tensor in _tensors(shapes, architecture, stored):
        size = values.gain(source.removesuffix(".weight")) * tensor.shape[-1] ** -0.5
        key = tensor.shape, tensor.dtype, size
        if BLOCKS[tensor.dtype][0] == 1:
            plain = values.draw(source, tensor.shape)
            plain = -plain.float().exp() if tensor.name.endswith("ssm_a") else plain
            found = (plain if tensor.dtype == "BF16" else plain.float()).cpu()
        elif (found := drawn.get(key)) is None:
            found = drawn[key] = _blocks(tensor.dtype, prod(tensor.shape), size, values.generator).cpu()
        data = found.view(torch.uint8).view(*tensor.shape[:-1], -1).numpy()
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(shapes: Shapes, architecture: str, stored: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the file, each with the name of transformers' that it is taken from."""
    quantization = read_quantization(ConfigFields(USUAL[stored], stored))
    assert quantization is not None
    for name, shape in shapes:
        module, _, kind = name.replace("language_model.", "").removeprefix("model.").rpartition(".")
        for own, of_rule, size in _named(module, kind, shape, architecture):
            rule = quantization.rule(of_rule) if len(size) > 1 else None
            plain = "BF16" if len(size) > 1 and "conv1d" not in own else "F32"
            yield name, Tensor(own, size, rule.type if isinstance(rule, StoredGguf) and plain == "BF16" else plain)


def _named(
    module: str, kind: str, shape: tuple[int, ...], architecture: str
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """A tensor as the file calls it, the module that decides its type, and its shape; none of what is left out."""
    outside = {hf.removeprefix("model."): own for own, hf in OUTSIDE.items()}
    if f"{module}.{kind}" in outside:
        yield outside[f"{module}.{kind}"], module, shape
    words = module.split(".")
    if words[0] != "layers":
        return
    at, inner = f"blk.{words[1]}", ".".join(words[2:])
    stems, whole = ({hf: own for own, hf in names.items()} for names in (LAYERS[architecture], WHOLE))
    if f"{inner}.{kind}" in whole:
        yield f"{at}.{whole[f'{inner}.{kind}']}", module, shape
    elif inner == "mlp.experts":
        experts, rows, columns = shape
        halves = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        for each in halves:
            size = experts, rows // len(halves), columns
            yield f"{at}.ffn_{each}_exps.weight", f"{module}.0.{each}_proj", size
    elif inner in stems:
        yield f"{at}.{stems[inner]}.{kind}", module, (shape[0], shape[2]) if len(shape) == 3 else shape


def _keys(text: Any, architecture: str) -> dict[str, Any]:
    """The metadata that a reader asks for, beside the architecture."""
    values = {**COMMON, **TARGETS[architecture].keys}
    found = {key: each for key, name in values.items() if (each := getattr(text, name, None)) is not None}
    rope = text.rope_parameters
    found |= {"block_count": text.num_hidden_layers, "rope.freq_base": float(rope["rope_theta"])}
    found |= dict.fromkeys(("attention.key_length", "attention.value_length"), text.head_dim)
    found["rope.dimension_count"] = int(text.head_dim * rope.get("partial_rotary_factor", 1.0))
    if TARGETS[architecture].recurrent:
        found["ssm.inner_size"] = text.linear_num_value_heads * text.linear_value_head_dim
        found["full_attention_interval"] = text.layer_types.index("full_attention") + 1
    return found


def _blocks(dtype: str, weights: int, size: float, generator: torch.Generator) -> torch.Tensor:
    """uint8. Every bit is random but for those of the blocks' floats, which give weights of about that size."""
    device, (each, length) = generator.device, BLOCKS[dtype]
    blocks = torch.empty(weights // each, length, dtype=torch.uint8, device=device)
    blocks.random_(0, 256, generator=generator)

    def with_floats(blocks: torch.Tensor, factor: float) -> torch.Tensor:
        for at in FLOAT16_AT[dtype]:
            floats = torch.rand(len(blocks), 1, generator=generator, device=device) + 0.5
            blocks[:, at : at + 2] = (floats * factor).half().view(torch.uint8)
        return blocks

    spread = decode_blocks(with_floats(blocks[:4096].clone(), 1.0), dtype).square().mean().sqrt()
    return with_floats(blocks, size / float(spread)).flatten()
