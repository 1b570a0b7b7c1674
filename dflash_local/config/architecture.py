"""Check whether two targets are alike in all that shapes a layer, as a model and its fine-tunes are."""

from __future__ import annotations

from dataclasses import fields

from dflash_local.config.features import ModelConfig
from dflash_local.config.rope_parameters import RopeParameters

PADDING_MULTIPLE = 64
MAX_PADDING_ROWS = 1024
EXACT = ("hidden_size", "tie_word_embeddings", "norm_plus_one", "embedding_scale", "final_logit_softcap")


def same_architecture(one: ModelConfig, other: ModelConfig) -> bool:
    """Compare layers, norms, head, positions and, but for padding, vocabularies; names, formats and context may differ.
    ``rms_norm_eps`` and ``rope`` need to agree where both are known.
    """
    return not differences(one, other)


def differences(one: ModelConfig, other: ModelConfig) -> tuple[str, ...]:
    """List in what ``one`` is another architecture than ``other``: ``hidden_size 2048 instead of 4096``."""
    found = [_fact(name, getattr(one, name), getattr(other, name)) for name in EXACT]
    if not padding_only(one.vocab_size, other.vocab_size):
        found.append(_fact("vocab_size", one.vocab_size, other.vocab_size))
    if one.num_layers != other.num_layers:
        found.append(_fact("num_hidden_layers", one.num_layers, other.num_layers))
    elif one.layers != other.layers:
        found += _of_layers(one, other)
    if None not in (one.rms_norm_eps, other.rms_norm_eps):
        found.append(_fact("rms_norm_eps", one.rms_norm_eps, other.rms_norm_eps))
    found.append(_fact("rope_type", one.rope_type, other.rope_type))
    if one.rope is not None and other.rope is not None and one.rope_type == other.rope_type:
        found += [
            _fact(name, mine, known)
            for name, mine, known in zip(ANGLES, _angles(one.rope), _angles(other.rope), strict=True)
        ]
    return tuple(filter(None, found))


def _fact(name: str, mine: object, known: object) -> str:
    return "" if mine == known else f"{name} {mine} instead of {known}"


def _of_layers(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Return the facts of the first layer that is another."""
    at, mine, known = next(
        (at, mine, known) for at, (mine, known) in enumerate(zip(one.layers, other.layers)) if mine != known
    )
    found = []
    for part in ("mixer", "mlp"):
        here, there = getattr(mine, part), getattr(known, part)
        if type(here) is not type(there):
            found.append(f"layer {at} of another kind")
        else:
            found += [
                _fact(field.name, getattr(here, field.name), getattr(there, field.name)) for field in fields(here)
            ]
    return found


def padding_only(one: int, other: int) -> bool:
    """Return True for sizes that padding sets apart: at most 1024 rows and 1 %, to a multiple of 64 (Qwen3's)."""
    small, large = sorted((one, other))
    gap = large - small
    return gap == 0 or (gap <= MAX_PADDING_ROWS and 100 * gap <= large and large % PADDING_MULTIPLE == 0)


ANGLES = ("rope_theta", "rope kind", "rope factor")


def _angles(rope: RopeParameters) -> tuple[float, str, float]:
    """Return what every source quotes; copies of the registry lack the finer settings of scaled kinds."""
    return rope.theta, rope.kind, rope.factor
