"""Random-weight checkpoints of true Qwen3.5-9B and Qwen3-8B shape, targets and drafters, in the published layout.

Values are drawn on the device and written tensor by tensor, so that 9 billion of them take seconds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

LOGIT_STD = 4.0  # spread of the logits of trained models; without it near-ties would decide everything
SHARD_BYTES = 4 * 2**30

Make = Callable[[str, tuple[int, ...]], torch.Tensor]
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}

# Text model, published values: registry facts of Qwen/Qwen3.5-9B and of the second-generation
# z-lab/Qwen3.5-9B-DFlash (its mask id 248077, rms_norm_eps and rope_theta are inferred there).
QWEN35_9B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "mrope_section": [11, 11, 10],
}
DRAFTER_9B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 4096,
    "max_position_embeddings": 262144,
    "block_size": 16,
    "mask_token_id": 248077,
    "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29],
}
# Qwen/Qwen3-8B and z-lab/Qwen3-8B-DFlash-b16: attention in every layer, a drafter of the first schema.
QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
DRAFTER_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "block_size": 16,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
}
TINY = QWEN35_9B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4096,
    "mrope_section": [2, 1, 1],
}
TINY_DRAFTER = DRAFTER_9B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "max_position_embeddings": 4096,
    "mask_token_id": 511,
    "target_layer_ids": [1, 3, 5],
}
TINY_DENSE = QWEN3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
TINY_DENSE_DRAFTER = {key: value for key, value in TINY_DRAFTER.items() if key != "sliding_window"}


def target_config(shape: dict[str, Any]) -> Any:
    """transformers' configuration of the published layout."""
    config = _hybrid_config(shape) if "linear_num_key_heads" in shape else _dense_config(shape)
    config.dtype = "bfloat16"
    return config


def _dense_config(shape: dict[str, Any]) -> Any:
    """Qwen3: attention in every layer."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e6}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.Qwen3Config(
        **shape, rope_parameters=rope, rms_norm_eps=1e-6, tie_word_embeddings=False, **none
    )
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def _hybrid_config(shape: dict[str, Any]) -> Any:
    """Qwen3.5: multimodal wrapper with a tiny vision tower."""
    import transformers

    text = {key: value for key, value in shape.items() if key != "mrope_section"}
    layers = shape["num_hidden_layers"]
    text |= {
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": shape["mrope_section"],
            "mrope_interleaved": True,
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "num_position_embeddings": 16}
    config = transformers.Qwen3_5Config(
        text_config=text,
        vision_config={**vision, "out_hidden_size": shape["hidden_size"]},
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    return config


def target_shapes(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of every tensor, asked of transformers itself without allocating one."""
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    return [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]


def build_target(folder: Path, shape: dict[str, Any], device: str) -> None:
    """Write a random target of this shape, its values drawn on ``device``."""
    config = target_config(shape)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(1)
    layers = shape["num_hidden_layers"]
    # Qwen3.5's norms are zero-centred, their gain is 1 + w; Qwen3's gain is w itself.
    centre = 0.0 if "linear_num_key_heads" in shape else 1.0
    save(folder, plain(target_shapes(config), values_of(generator, layers, centre)))


def values_of(generator: torch.Generator, layers: int, centre: float) -> Make:
    """What makes a tensor of a name and a shape.

    Args:
        layers: of the model, for the scale of what is added to the residual. centre: of the norms' weights.
    """
    return lambda name, shape: _tensor(name, shape, layers, centre, generator)


def _tensor(name: str, shape: tuple[int, ...], layers: int, centre: float, generator: torch.Generator) -> torch.Tensor:
    """Random values whose activations stay of order one through all layers."""
    out = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    if name.endswith("A_log"):
        return out.uniform_(0.0, 2.7, generator=generator)  # log of 1..15
    if name.endswith("dt_bias"):
        return out.normal_(-2.0, 1.0, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return out.fill_(1.0)
    if name.endswith("norm.weight") and "visual" not in name:
        return out.normal_(centre, 0.02, generator=generator)
    if name == "lm_head.weight":  # the final norm gives unit rows
        return out.normal_(0.0, LOGIT_STD / shape[-1] ** 0.5, generator=generator)
    if name.endswith("embed_tokens.weight"):
        return out.normal_(generator=generator)
    if name.endswith("conv1d.weight"):
        return out.normal_(0.0, 0.5, generator=generator)
    if len(shape) < 2:
        return out.zero_() if name.endswith("bias") else out.fill_(1.0)
    gain = (2 * layers) ** -0.5 if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
    return out.normal_(0.0, gain * shape[-1] ** -0.5, generator=generator)


def drafter_config(shape: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """A drafter's config.json: second schema, causal sliding layers and one full, if its shape has a window."""
    if "sliding_window" not in shape:
        return _first_schema(shape, target)
    nested = ("block_size", "mask_token_id", "target_layer_ids")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **{key: value for key, value in shape.items() if key not in nested},
        "dflash_config": {key: shape[key] for key in nested},
        "layer_types": ["sliding_attention"] * (shape["num_hidden_layers"] - 1) + ["full_attention"],
        "use_sliding_window": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
    }


def _first_schema(shape: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Block size and rope at the top level, full attention throughout."""
    nested = ("mask_token_id", "target_layer_ids")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **{key: value for key, value in shape.items() if key not in nested},
        "dflash_config": {key: shape[key] for key in nested},
        "layer_types": ["full_attention"] * shape["num_hidden_layers"],
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
    }


def build_drafter(folder: Path, shape: dict[str, Any], target: dict[str, Any], device: str) -> None:
    """Write a random drafter for this target."""
    from dflash_local.config.drafter_config import DrafterConfig

    config = drafter_config(shape, target)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generator = torch.Generator(device).manual_seed(2)
    shapes = DrafterConfig.from_json(config, folder / "config.json").tensor_shapes(target["hidden_size"])
    save(folder, plain(list(shapes.items()), values_of(generator, shape["num_hidden_layers"], 1.0)))


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file. dtype: as safetensors names it. make: draws it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def plain(shapes: Sequence[tuple[str, tuple[int, ...]]], make: Make) -> list[Stored]:
    """Tensors in bfloat16."""
    return [Stored(name, "BF16", shape, partial(make, name, shape)) for name, shape in shapes]


def save(folder: Path, tensors: Sequence[Stored]) -> None:
    """Shards with an index, written tensor by tensor: never more than one is held."""
    shards: list[list[Stored]] = [[]]
    held = 0
    for tensor in tensors:
        if held >= SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    files = [f"model-{number:05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, part in zip(files, shards):
        _save_shard(folder / file, part)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {tensor.name: file for file, part in zip(files, shards) for tensor in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _save_shard(file: Path, tensors: Sequence[Stored]) -> None:
    """One safetensors file: the header's length, the header, then the values in its order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            stream.write(tensor.make().contiguous().flatten().view(torch.uint8).cpu().numpy())
