"""Writes a target of true shapes, or its DFlash drafter, as a GGUF file, its blocks of random bits.

Coded matrices of one shape and type hold the same numbers, so that a file of 5 GB takes seconds. The vocabulary is made
up, for llama.cpp opens no file without one; prompts are to be ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import torch

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.checkpoint_files.gguf_config import TARGETS
from dflash_local.checkpoint_files.gguf_drafter import DFLASH
from dflash_local.checkpoint_files.gguf_keys import COMMON
from dflash_local.checkpoint_files.gguf_names import DRAFTER_LAYERS, DRAFTER_OUTSIDE, LAYERS, OUTSIDE, WHOLE
from dflash_local.checkpoint_files.tensor_info import BLOCKS
from dflash_local.config.quantization import StoredGguf
from dflash_local.config.quantizers import USUAL, read_quantization
from dflash_local.drafters.kinds import read_drafter
from dflash_local.kernels.gguf_blocks import FLOAT16_AT, decode_blocks

if TYPE_CHECKING:
    from benchmarks.random_checkpoint import Values

PLAIN = "bf16"  # of a file without coded matrices
FORMATS = (*(name for name, each in USUAL.items() if each["quant_method"] == "gguf"), PLAIN)
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
    keys, found = _keys(text, architecture), list(shapes)
    if getattr(text, "mtp_num_hidden_layers", 0):
        keys |= {"block_count": text.num_hidden_layers + 1, "nextn_predict_layers": 1}
        found += _mtp_layer(shapes, text.num_hidden_layers, text.hidden_size)
    _write(file, architecture, text.vocab_size, keys, _tensors(found, architecture, stored), values)


def _mtp_layer(shapes: Shapes, layers: int, hidden: int) -> Shapes:
    """What predicts one token further ahead: one more layer like the last, and what joins hidden state and token."""
    last = f"layers.{layers - 1}."
    at = next(name for name, _ in shapes if last in name).partition(last)[0] + f"layers.{layers}."
    joined = {"eh_proj": (hidden, 2 * hidden), **dict.fromkeys(("enorm", "hnorm", "shared_head_norm"), (hidden,))}
    return [
        *((at + name.partition(last)[2], shape) for name, shape in shapes if last in name),
        *((f"{at}nextn.{name}.weight", shape) for name, shape in joined.items()),
    ]


def write_drafter(file: Path, config: Mapping[str, Any], text: Mapping[str, Any], dtype: str, values: Values) -> None:
    """Write a DFlash drafter by its config.json and that of its target's text model; ``dtype``: of its matrices, a word
    of ``BLOCKS``.
    """
    drafter = read_drafter(config, file)
    rope = config.get("rope_parameters") or config
    keys = {key: each for key, name in COMMON.items() if (each := config.get(name, text.get(name))) is not None}
    keys |= {"block_count": config["num_hidden_layers"], "rope.freq_base": float(rope["rope_theta"])}
    keys |= dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])
    # llama.cpp counts the embedding's output as layer 0.
    keys |= {"block_size": drafter.block_size, "target_layers": [tap + 1 for tap in drafter.taps]}
    if config.get("use_sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if "mrope_section" in (text.get("rope_parameters") or {}):  # a drafter turns by the position alone
        keys["rope.dimension_sections"] = [config["head_dim"] // 2, 0, 0, 0]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        outside, inside = ({hf: own for own, hf in names.items()} for names in (DRAFTER_OUTSIDE, DRAFTER_LAYERS))
        for name, shape in drafter.tensors(config["hidden_size"]).items():
            _, _, within = name.partition("layers.")
            layer, _, module = within.removesuffix(".weight").partition(".")
            own = f"blk.{layer}.{inside[module]}.weight" if within else outside[name]
            yield name, Tensor(own, shape, dtype if len(shape) > 1 else "F32")

    mask = config["dflash_config"]["mask_token_id"]
    _write(file, DFLASH, text["vocab_size"], keys, tensors(), values, mask)


def _write(
    file: Path,
    architecture: str,
    vocabulary: int,
    keys: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    values: Values,
    mask: int | None = None,
) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in keys.items():
        add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_array if isinstance(value, list) else add)(f"{architecture}.{key}", value)
    # Pieces of which two make a third: a list of merges must not be empty.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["t", "0", *(f"t{number}" for number in range(vocabulary - 2))])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocabulary)
    writer.add_token_merges(["t 0"])
    if mask is not None:
        writer.add_mask_token_id(mask)
    drawn: dict[Any, torch.Tensor] = {}
    for source, tensor in tensors:
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
    quantization = None if stored == PLAIN else read_quantization(ConfigFields(USUAL[stored], stored))
    for name, shape in shapes:
        module, _, kind = name.replace("language_model.", "").removeprefix("model.").rpartition(".")
        for own, of_rule, size in _named(module, kind, shape, architecture):
            rule = quantization.rule(of_rule) if quantization is not None and len(size) > 1 else None
            # What chooses experts is float32 in all files of llama.cpp's converter.
            plain = "F32" if len(size) < 2 or "conv1d" in own or "ffn_gate_inp" in own else "BF16"
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
    elif words[2] == "nextn":
        yield f"{at}.{inner}.{kind}", module, shape
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
    if "mrope_section" in rope:
        found["rope.dimension_sections"] = [*rope["mrope_section"], 0]
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
