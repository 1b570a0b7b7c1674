"""Say how positions rotate by a GGUF file's metadata, as ``rope_parameters`` of a config.json say it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from dflash_local.checkpoint_files.config_values import ConfigFields, shown
from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.errors import CheckpointError

FACTORS = "rope_freqs.weight"  # what Llama 3's frequencies are divided by, [half of a head's dimensions]
THETA = 10_000.0  # where a file does not say
MAX_FACTORS = 4096
CLOSE = 1e-4  # relative; factors are float32 numbers of float32 arithmetic
KINDS = ("none", "linear", "yarn")
YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def short(value: float) -> float:
    """Return the number of the fewest digits that is this one in float32: files keep 1e-5 as 9.999999747378752e-06."""
    if not abs(value) < 1e38:
        return value
    stored = struct.pack("<f", value)
    return next(
        (
            each
            for each in (float(f"{value:.{digits}g}") for digits in range(1, 9))
            if struct.pack("<f", each) == stored
        ),
        value,
    )


def rope_of(keys: ConfigFields, head_dim: int, factors: TensorInfo | None, partial: bool) -> dict[str, Any]:
    """Return ``rope_parameters``.

    Args:
        keys: metadata without the architecture's name. factors: the tensor ``rope_freqs``, where there is one. partial:
            whether only some of a head's dimensions may rotate.

    Raises:
        CheckpointError: a value is wrong, or its kind is not known.
    """
    theta = keys.optional_number("rope.freq_base", 1.0, 1e12)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": short(THETA if theta is None else theta)}
    kind = keys.word("rope.scaling.type", KINDS) if keys.present("rope.scaling.type") else "none"
    if kind != "none":
        rope |= {"rope_type": kind, "factor": short(keys.number("rope.scaling.factor", 1e-3, 1e6))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length", 1, 2**30)
        rope |= {name: short(keys.number(key, 0.0, 1e6)) for key, name in YARN.items() if keys.present(key)}
    if factors is not None:
        if kind != "none":
            raise CheckpointError(f"{keys.where}: {FACTORS} beside rope.scaling.type {kind} is not supported")
        rope |= _llama3(_read(factors, head_dim), rope["rope_theta"], head_dim, keys.where)
    turning = keys.optional_integer("rope.dimension_count", 2, head_dim) or head_dim
    if partial:
        rope["partial_rotary_factor"] = turning / head_dim
    elif turning != head_dim:
        raise CheckpointError(f"{keys.where}.rope.dimension_count {turning} of {head_dim} is not supported")
    sections = keys.optional_list("rope.dimension_sections", 4)
    if sections is not None and sum(1 for part in sections if part) > 1:
        rope |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return rope


def _read(factors: TensorInfo, head_dim: int) -> tuple[float, ...]:
    """Return the tensor's numbers."""
    if factors.dtype != "F32" or factors.shape != (head_dim // 2,) or head_dim // 2 > MAX_FACTORS:
        raise CheckpointError(
            f"{factors.file}: tensor {FACTORS} is {factors.dtype} {list(factors.shape)}, expected F32 [{head_dim // 2}]"
        )
    with open(factors.file, "rb") as stream:
        stream.seek(factors.offset)
        return struct.unpack(f"<{head_dim // 2}f", stream.read(factors.nbytes))


def _llama3(factors: Sequence[float], theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """Return the settings that these factors follow from. Raises CheckpointError: none are found."""
    factor = short(max(factors))
    if all(each == 1.0 for each in factors):
        return {}
    for low, high, original in _settings() if 1.0 < factor < 1e6 else ():
        expected = _factors(theta, head_dim, factor, low, high, original)
        if all(math.isclose(one, other, rel_tol=CLOSE) for one, other in zip(factors, expected)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(f"{where}: no known rope has the factors of {FACTORS}, {shown(list(factors))}")


def _settings() -> Iterator[tuple[float, float, int]]:
    """Yield low and high frequency factors and trained contexts: Llama 3's first, then others by powers of two. Only
    products of the three show in a file, so the low one is 1.
    """
    yield 1.0, 4.0, 8192
    for high in (4.0, 2.0, 8.0, 16.0, 32.0):
        for power in range(4, 21):
            yield 1.0, high, 2**power


def _factors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> Iterator[float]:
    for pair in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * pair / head_dim))
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1.0 / ((1.0 - share) / factor + share)
