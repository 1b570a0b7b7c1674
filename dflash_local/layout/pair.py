"""All tensors of a pair in the fused engine."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.features import ModelConfig
from dflash_local.layout import cycle, drafter, target
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.linear import stored_formats
from dflash_local.layout.spec import EngineSpec


def buffers(model: ModelConfig, draft: DrafterConfig | None, spec: EngineSpec, vocab_size: int = 0) -> Iterator[Buffer]:
    """What stands from load to close.

    Args:
        vocab_size: rows of embedding and head, padding included, where a checkpoint told them.
    """
    vocab_size = vocab_size or model.vocab_size
    yield from target.weight_buffers(model, "model.", vocab_size, spec.dtype, stored_formats(model.quantization))
    yield from target.run_buffers(model, vocab_size, spec)
    yield from cycle.cycle_buffers(spec.rows, vocab_size).all()
    if draft is not None:
        yield from drafter.weight_buffers(draft, model.hidden_size, spec.dtype, drafter.matrix_format(spec))
        yield from drafter.head_buffers(vocab_size, model.hidden_size, spec)
        yield from drafter.run_buffers(draft, vocab_size, spec)
