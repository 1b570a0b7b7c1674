"""Whether two targets are alike in all that shapes a layer, as a model and its fine-tunes are."""

from __future__ import annotations

from dflash_local.config.features import ModelConfig
from dflash_local.config.rope_parameters import RopeParameters

PADDING_MULTIPLE = 64
MAX_PADDING_ROWS = 1024
EXACT = ("hidden_size", "tie_word_embeddings", "layers", "norm_plus_one", "embedding_scale", "final_logit_softcap")


def same_architecture(one: ModelConfig, other: ModelConfig) -> bool:
    """True for equal layers, norms, head and positions (names, formats and context may differ) and one vocabulary but
    for padding. ``rms_norm_eps`` and ``rope`` need to agree where both are known.
    """
    return (
        all(getattr(one, name) == getattr(other, name) for name in EXACT)
        and padding_only(one.vocab_size, other.vocab_size)
        and (None in (one.rms_norm_eps, other.rms_norm_eps) or one.rms_norm_eps == other.rms_norm_eps)
        and one.rope_type == other.rope_type
        and (one.rope is None or other.rope is None or _angles(one.rope) == _angles(other.rope))
    )


def padding_only(one: int, other: int) -> bool:
    """True for sizes that padding sets apart: at most 1024 rows and 1 %, to a multiple of 64 (Qwen3's)."""
    small, large = sorted((one, other))
    gap = large - small
    return gap == 0 or (gap <= MAX_PADDING_ROWS and 100 * gap <= large and large % PADDING_MULTIPLE == 0)


def _angles(rope: RopeParameters) -> tuple[float, str, float]:
    """What every source quotes; copies of the registry lack the finer settings of scaled kinds."""
    return rope.theta, rope.kind, rope.factor
