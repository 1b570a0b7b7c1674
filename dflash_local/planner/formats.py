"""Weight formats the reference engine can run a target in, and the bytes each takes.

Which family can be loaded in which format, and why not; nothing of contexts or caches.
"""

from __future__ import annotations

from dflash_local.planner.parameters import Parameters, Unknown, known, target_parameters
from dflash_local.planner.shape import TargetShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# bitsandbytes nf4 with double quantisation: 4 bits, an 8-bit scale per 64 weights, float32 per 256 scales.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
INT8_BYTES = 1.0  # and one float32 per output row, far below a thousandth
# Native formats pack the routed experts: four bits, and a scale of one byte (mxfp4) or two (int4) per 32.
NATIVE_BYTES = {"mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 2 / 32}


def default_dtype(kind: str) -> str:
    """The dtype ``auto`` means on a kind of machine: float32 on a CPU, bfloat16 elsewhere."""
    return "float32" if kind == "cpu" else "bfloat16"


def resolved_dtype(dtype: str, kind: str) -> str:
    """A dtype, ``auto`` being what it means on a kind of machine."""
    return default_dtype(kind) if dtype == "auto" else dtype


def refusal(shape: TargetShape, quantize: str | None) -> str:
    """Why this target cannot be loaded in this format; empty when it can."""
    if shape.family is None:
        return "its architecture is not one the reference engine knows"
    if shape.native_format is not None and shape.native_format != "mxfp4":
        return f"published in {shape.native_format}, which the reference engine cannot run yet"
    if quantize is None:
        return ""
    if shape.native_format == "mxfp4":
        return f"published in mxfp4; {quantize} on top of it is not supported"
    if not shape.dense:
        return f"{quantize} leaves fused experts in 16 bits (bitsandbytes issue 1849): dense targets only"
    return ""


def weight_bytes(shape: TargetShape, dtype: str, quantize: str | None) -> int | None:
    """Bytes of the target on the device, without a head of its own."""
    counts = target_parameters(shape)
    if counts is None:
        return None
    return _weights(counts, DTYPE_BYTES[dtype], quantize)


def head_bytes(shape: TargetShape, dtype: str) -> int | None:
    """Bytes of the head, which is never quantised; 0 when it is the embedding."""
    counts = target_parameters(shape)
    return None if counts is None else counts.head * DTYPE_BYTES[dtype]


def _weights(counts: Parameters, size: int, quantize: str | None) -> int:
    """MXFP4 experts are decoded at load, so they count like any other weight."""
    body = counts.total - counts.head
    if quantize is None:
        return body * size
    each = NF4_BYTES if quantize == "nf4" else INT8_BYTES
    return round(counts.quantisable * each) + (body - counts.quantisable) * size


def published_bytes(shape: TargetShape) -> int | None:
    """Bytes of the text model's weights as its publisher stores them."""
    counts = target_parameters(shape)
    if counts is None:
        return None
    size = DTYPE_BYTES.get(shape.stored_dtype, 2)
    packed = NATIVE_BYTES.get(shape.native_format or "")
    if packed is None:
        return None if shape.native_format else counts.total * size
    weights = counts.experts - _expert_biases(shape)
    return round(weights * packed) + (counts.total - weights) * size


def _expert_biases(shape: TargetShape) -> int:
    if shape.family != "gpt_oss" or shape.experts is None or shape.hidden is None:
        return 0
    return shape.layers * shape.experts.count * (2 * shape.experts.width + shape.hidden)


def largest_matrix(shape: TargetShape) -> int | None:
    """Elements of the largest matrix of a dense layer, which quantising holds whole for a moment."""
    try:
        return known(shape.hidden) * known(shape.width)
    except Unknown:
        return None
