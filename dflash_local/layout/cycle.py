"""Tensors of the decoding loop: what a cycle is at, the records of the last cycles, and the choice of tokens."""

from __future__ import annotations

from typing import NamedTuple

from dflash_local.config.features import ModelConfig
from dflash_local.layout.buffer import Buffer

PREFILL_CHUNK = 1024  # of a prompt's tokens that are processed at once
CODED_CHUNK_NUMBERS = 2048 * 4096  # of hidden states in a chunk of a quantised target
CODED_CHUNK_MOST = 2048  # tokens of such a chunk
LARGER_CHUNKS = (8192, 4096)  # that a plan takes where they fit, the first of them
SNAPSHOT_EVERY = 4096  # tokens of a prompt, of a target that cannot be cut back: its chunks end there
CHUNK_STEP = 256  # rows of a tile of the library's products
MAX_STOP_IDS = 32
RECORDS = 8  # cycles whose records the device keeps
RECORD_HEADER = 4  # words of a record before ids and margins: cycle, ids emitted, drafts accepted, rows verified
ROWS_TOGETHER = 4  # rows that are filtered and sorted at once: a float of a sort takes 44 bytes
CHOICE_BLOCK = 2048  # logits of one program that looks for the largest


def prompt_chunk(target: ModelConfig, context: int, given: int | None = None) -> int:
    """Count tokens of a prompt that a load processes at once, at most its context.

    Args:
        given: of the load; without one it is the model's own, more where each chunk decodes quantised weights.
    """
    return min(_own_chunk(target) if given is None else given, context)


def _own_chunk(target: ModelConfig) -> int:
    if target.quantization is None:
        return PREFILL_CHUNK
    rows = CODED_CHUNK_NUMBERS // target.hidden_size // CHUNK_STEP * CHUNK_STEP
    return min(max(rows, PREFILL_CHUNK), CODED_CHUNK_MOST)


def choice_buffers(owner: str, rows: int, vocab_size: int) -> tuple[Buffer, ...]:
    """Return the largest score of each block of the vocabulary, its id, and the next score."""
    return best_buffers(owner, rows, -(-vocab_size // CHOICE_BLOCK))


def best_buffers(owner: str, *shape: int) -> tuple[Buffer, ...]:
    """Return what ``kernels.choose.BlockBest`` holds of blocks of the vocabulary."""
    kinds = {"values": "float32", "ids": "int32", "next_values": "float32"}
    return tuple(Buffer(f"{owner}.{name}", shape, dtype, "buffers") for name, dtype in kinds.items())


class CycleBuffers(NamedTuple):
    """Hold the buffers of the decoding loop.

    Attributes:
        choice, draft_choice: of the target's rows, and of the drafts'. progress: what ``kernels.accept.Progress`` has
            of its own: limit, done, chosen, stop ids, margins, records. sampling: the request's temperature and seed.
    """

    choice: tuple[Buffer, ...]
    draft_choice: tuple[Buffer, ...]
    progress: tuple[Buffer, ...]
    sampling: tuple[Buffer, Buffer]

    def all(self) -> tuple[Buffer, ...]:
        return (*self.choice, *self.draft_choice, *self.progress, *self.sampling)


def progress_buffers(rows: int, records: int = RECORDS) -> tuple[Buffer, ...]:

    def number(name: str, *shape: int, dtype: str = "int32") -> Buffer:
        return Buffer(f"progress.{name}", shape, dtype, "buffers", zeroed=True)

    return (
        number("limit", 1),
        number("done", 1),
        number("chosen", rows, dtype="int64"),
        number("stop_ids", MAX_STOP_IDS),
        number("margins", rows, dtype="float32"),
        number("records", records, RECORD_HEADER + 2 * rows),
    )


def cycle_buffers(rows: int, vocab_size: int) -> CycleBuffers:
    """Return everything that a runner adds to its models. ``rows``: of a block."""
    return CycleBuffers(
        choice_buffers("choice", rows, vocab_size),
        choice_buffers("draft_choice", rows, vocab_size),
        progress_buffers(rows),
        (Buffer("temperature", (1,), "float32", "buffers"), Buffer("seed", (1,), "int64", "buffers")),
    )
