"""Describe the head that drafts are computed with, where it is not the target's own: a copy of it in eight bits, or of
the rows of a few ids.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_local.config.features import ModelConfig
from dflash_local.layout.buffer import Buffer, Group
from dflash_local.layout.linear import UNQUANTIZED, WeightFormat, eight_bits, stored_formats
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.layout.target import head_format
from dflash_local.load_config import FREQUENT

GROUP: Group = "head for drafting"


def drafted_ids(spec: EngineSpec, vocab_size: int) -> int:
    """Count ids that can be drafted."""
    return min(vocab_size, FREQUENT) if spec.precision.head == "frequent" else vocab_size


def draft_head_format(model: ModelConfig, spec: EngineSpec) -> WeightFormat:
    """Return what drafts are computed with: what is stored, or eight bits. Rows that are copied out of codes are coded
    anew, since their tiles and blocks lie apart.
    """
    stored, precision = head_format(model, stored_formats(model.quantization)), spec.precision
    if precision.head == "frequent":
        coarse = stored != UNQUANTIZED or precision.weights == "8bit"
    else:
        coarse = stored == UNQUANTIZED and precision.head == "8bit"
    return eight_bits(model.hidden_size) if coarse else stored


def draft_head_buffers(model: ModelConfig, spec: EngineSpec) -> Iterator[Buffer]:
    """Return what a head for drafting takes beside the target's."""
    form, frequent = draft_head_format(model, spec), spec.precision.head == "frequent"
    if frequent or form != head_format(model, stored_formats(model.quantization)):
        count = drafted_ids(spec, model.vocab_size)
        yield from form.buffers("draft_head", count, model.hidden_size, spec.dtype, GROUP)
        if frequent:
            yield head_ids_buffer(count)


def head_ids_buffer(count: int) -> Buffer:
    """Describe the ids that a head's rows stand for."""
    return Buffer("draft_head.ids", (count,), "int32", GROUP)
