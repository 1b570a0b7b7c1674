"""Weight formats that the reference engine keeps a target in, and the bytes each takes.

Which family can be loaded in which format, and why not; nothing of contexts or caches.
"""

from __future__ import annotations

from dflash_local.config.features import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig
from dflash_local.config.quantization import MXFP4, WHOLE, Quantization, StoredInt
from dflash_local.layout.quantized import quantize_refusal
from dflash_local.planner.parameters import target_parameters

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# bitsandbytes nf4 with double quantisation: 4 bits, an 8-bit scale per 64 weights, float32 per 256 scales.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
INT8_BYTES = 1.0  # and one float32 per output row, far below a thousandth
MXFP4_BYTES = 0.5 + 1 / 32  # of gpt-oss: four bits, and a scale of one byte per 32
SMALL = 50_000_000  # weights below which the caches hold them: fewer bytes gain nothing
SCALE_BYTES = 2  # of groups of integer codes


def resolved_dtype(dtype: str, kind: str) -> str:
    """Resolve a dtype, ``auto`` being bfloat16, or float32 on a CPU where ``cpu_dtype`` has not been asked."""
    if dtype != "auto":
        return dtype
    return "float32" if kind == "cpu" else "bfloat16"


def cpu_dtype(target: ModelConfig, bitsandbytes: str | None, native: bool) -> str:
    """Return the dtype that ``auto`` means on a CPU: bfloat16 where that is faster, rounds no weight that is stored in
    bits, and a verify's rows are single steps in every bit (``models.row_attention``), so that drafting changes no
    text.

    Args:
        native: the CPU computes in bfloat16 itself.
    """
    stored = target.quantization
    coded = bitsandbytes is not None or (stored is not None and stored.bitsandbytes is not None)
    taken = native and not coded and target.stored_dtype == "bfloat16" and target_parameters(target).total >= SMALL
    return "bfloat16" if taken and all(map(_is_plain, target.layer_kinds)) else "float32"


def _is_plain(layer: LayerConfig) -> bool:
    """Say whether no row's bits depend on the others in a layer: no state, no experts, torch's attention."""
    return isinstance(layer.mixer, AttentionConfig) and layer.mixer.fits_sdpa and isinstance(layer.mlp, MLPConfig)


def refusal(model: ModelConfig, quantize: str | None) -> str:
    """Say why this target cannot be loaded in this format; empty when it can."""
    stored = model.quantization
    by_others = stored is not None and (stored.method == MXFP4 or stored.bitsandbytes)
    if stored is not None and stored.unread and not by_others:
        return f"published in {stored.unread}, which is not read yet"
    return quantize_refusal(model, quantize)


def weight_bytes(model: ModelConfig, dtype: str, bitsandbytes: str | None) -> int:
    """Return bytes of the target on the device, without a head of its own; what this program quantises is decoded
    again.

    MXFP4 experts are decoded at load, so they count like any other weight.
    """
    counts, size = target_parameters(model), DTYPE_BYTES[dtype]
    body = counts.total - counts.head
    if bitsandbytes is None:
        return body * size
    each = INT8_BYTES if bitsandbytes == "bnb-int8" else NF4_BYTES
    return round(counts.quantisable * each) + (body - counts.quantisable) * size


def head_bytes(model: ModelConfig, dtype: str) -> int:
    """Return bytes of the head, which is never quantised; 0 when it is the embedding."""
    return target_parameters(model).head * DTYPE_BYTES[dtype]


def published_bytes(model: ModelConfig) -> int | None:
    """Return the bytes of the text model's weights as they are published; None for a format not known here."""
    counts = target_parameters(model)
    size = DTYPE_BYTES.get(model.stored_dtype, 2)
    if model.quantization is None:
        return counts.total * size
    each = _expert_weight_bytes(model.quantization)
    if each is None or not counts.experts:
        return None
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoEConfig) and layer.mlp.expert_bias]
    biases = sum(part.num_experts * (2 * part.intermediate_size + model.hidden_size) for part in mixtures)
    weights = counts.experts - biases
    return round(weights * each) + (counts.total - weights) * size


def _expert_weight_bytes(stored: Quantization) -> float | None:
    """Return the bytes of a routed expert's weight, with its share of a scale, where these alone are quantised."""
    if stored.method == MXFP4:
        return MXFP4_BYTES
    match stored.formats:
        case (StoredInt(group_size=group, zeros=False, bits=bits),) if group != WHOLE:
            return bits / 8 + SCALE_BYTES / group
    return None


def largest_matrix(model: ModelConfig) -> int:
    """Return elements of the largest matrix of a layer, which quantising holds whole for a moment.

    Gate and up of all of a layer's experts count as one: files may have them so.
    """
    parts = (layer.mlp for layer in model.layer_kinds)
    return model.hidden_size * max(
        part.intermediate_size * (2 * part.num_experts if isinstance(part, MoEConfig) else 1) for part in parts
    )
