"""Tensors of softmax attention over a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dflash_local.config.features import AttentionConfig
from dflash_local.layout.buffer import Buffer, Group
from dflash_local.layout.cycle import CODED_CHUNK_MOST
from dflash_local.layout.linear import LinearSpec, MatrixPart
from dflash_local.layout.part_layout import EngineSpec, PartLayout, WeightSpec

CODES = "int8"  # of keys and values that have scales


class AttentionVectors(NamedTuple):
    """Small weights of one layer, those that it has.

    Attributes:
        qk_norms: of queries and keys, head by head. qkv_bias: rows of queries (and their gates), keys, values.
        sinks: [heads], float32 whatever the dtype, as softmax is.
    """

    qk_norms: tuple[Buffer, ...]
    qkv_bias: Buffer | None
    output_bias: Buffer | None
    sinks: Buffer | None

    def all(self) -> tuple[Buffer, ...]:
        return (*self.qk_norms, *(vector for vector in self[1:] if isinstance(vector, Buffer)))


@dataclass(frozen=True, slots=True)
class AttentionLayout(PartLayout):
    config: AttentionConfig
    module: str = "self_attn"
    title: str = "attention"

    def projections(self, at: str, hidden_size: int) -> tuple[LinearSpec, LinearSpec]:
        """Return queries, keys and values in one product; and the output's."""
        config = self.config
        sizes = (("q_proj", config.query_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
        qkv = LinearSpec(f"{at}.qkv_proj", hidden_size, tuple(MatrixPart(f"{at}.{name}", size) for name, size in sizes))
        output = MatrixPart(f"{at}.o_proj", hidden_size)
        return qkv, LinearSpec(output.module, config.output_size, (output,))

    def weights(self, at: str, spec: WeightSpec) -> Iterator[Buffer]:
        yield from spec.linear(*self.projections(at, spec.hidden_size))
        yield from self.vectors(at, spec).all()

    def vectors(self, at: str, spec: WeightSpec) -> AttentionVectors:
        config = self.config
        names = ("q_norm", "k_norm") if config.qk_norm else ()

        def vector(name: str, size: int, dtype: str, there: bool) -> Buffer | None:
            return Buffer(f"{at}.{name}", (size,), dtype, spec.group) if there else None

        return AttentionVectors(
            tuple(spec.norm(f"{at}.{name}", config.head_dim) for name in names),
            vector("qkv_proj.bias", config.qkv_size, spec.dtype, config.qkv_bias),
            vector("o_proj.bias", spec.hidden_size, spec.dtype, config.output_bias),
            vector("sinks", config.num_heads, "float32", config.sinks),
        )

    def cache_rows(self, spec: EngineSpec) -> int:
        return ring_rows(self.config.sliding_window, spec.capacity)

    def state(self, at: str, spec: EngineSpec) -> Iterator[Buffer]:
        shape = (self.config.num_kv_heads, self.cache_rows(spec), self.config.head_dim)
        yield from cache_buffers(at, shape, spec.cache_dtype, "target KV")

    def partials(self, owner: str, spec: EngineSpec) -> tuple[Buffer, Buffer]:
        config = self.config
        return partial_buffers(owner, config.num_heads, config.head_dim, spec.rows, spec.capacity, spec.exact)

    def activations(self, owner: str, spec: EngineSpec) -> Iterator[Buffer]:
        yield from block_buffers(owner, self.config, spec.rows, spec.dtype)
        yield from self.partials(owner, spec)
        yield from rotation_buffers(owner, self.config.rotary_dim, spec.capacity, spec.dtype)

    def prefill_bytes(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        """Sum projection, queries, what they attend to, and the result."""
        return rows * (self.config.qkv_size + 2 * self.config.output_size + hidden_size) * item_bytes

    def ring_bytes(self, spec: EngineSpec) -> int:
        config = self.config
        if config.sliding_window is None or self.cache_rows(spec) == spec.capacity:
            return 0
        return config.sliding_window * position_bytes(config, spec.cache_dtype)


def cache_buffers(at: str, shape: tuple[int, ...], dtype: str, group: Group) -> Iterator[Buffer]:
    """Return keys and values [..., head_dim]; where they are int8 codes also their scales, one for each row.

    Zeros: a masked key is never used, but NaN times nothing would be.
    """
    for name in ("keys", "values"):
        yield Buffer(f"{at}.{name}", shape, dtype, group, zeroed=True)
    if dtype == CODES:
        for name in ("key_scales", "value_scales"):
            yield Buffer(f"{at}.{name}", (*shape[:-1], 1), "float32", group, zeroed=True)


def position_bytes(config: AttentionConfig, dtype: str) -> int:
    """Count bytes of a position's keys and values in ``cache_buffers``."""
    return sum(
        buffer.nbytes for buffer in cache_buffers("", (config.num_kv_heads, config.head_dim), dtype, "target KV")
    )


def block_buffers(owner: str, config: AttentionConfig, rows: int, dtype: str) -> Iterator[Buffer]:
    """Return what a block's rows take on their way, for one layer after the other."""
    heads = (rows, config.num_heads, config.head_dim)
    yield Buffer(f"{owner}.qkv.{config.qkv_size}", (rows, config.qkv_size), dtype, "buffers")
    yield Buffer(f"{owner}.queries.{config.num_heads}x{config.head_dim}", heads, dtype, "buffers")
    yield Buffer(f"{owner}.attended.{config.output_size}", (rows, config.output_size), dtype, "buffers")


def partial_buffers(
    owner: str, num_heads: int, head_dim: int, rows: int, capacity: int, fixed: bool = False
) -> tuple[Buffer, Buffer]:
    """Split-KV partials, for one layer after the other: outputs, and each one's largest score and sum of weights.

    Args:
        capacity: rows of the cache. fixed: the splits follow from the position alone (exact mode).
    """
    splits = fixed_splits(capacity) if fixed else even_splits(capacity)
    size, of_heads = f"{num_heads}x{head_dim}", (splits, rows, num_heads)
    return (
        Buffer(f"{owner}.partial_outputs.{size}", (*of_heads, head_dim), "float32", "attention partials"),
        Buffer(f"{owner}.partial_stats.{size}", (*of_heads, 2), "float32", "attention partials"),
    )


def rotation_buffers(owner: str, rotary_dim: int, capacity: int, dtype: str) -> Iterator[Buffer]:
    """Return cos and sin of every position."""
    for name in ("cos", "sin"):
        yield Buffer(f"{owner}.{name}.{rotary_dim}", (capacity, rotary_dim), dtype, "rotation tables")


RING_SLACK = CODED_CHUNK_MOST  # rows of a ring beyond its window: a prompt's chunk is written at once


def ring_rows(window: int | None, capacity: int) -> int:
    """Count rows of a cache whose layer sees so many keys: row ``position % rows`` holds a position. None: all."""
    return capacity if window is None else min(capacity, window + RING_SLACK)


MAX_SPLITS = 64  # of an even cut; more would only be more to join
MIN_SPLIT_SIZE = 16  # keys of a split in any cut
FIXED_SPLIT_SIZE = 128  # keys of the fixed cut's smallest splits
SPLITS_PER_DOUBLING = 32  # of the fixed cut, from a length to its double


def even_splits(capacity: int) -> int:
    """Count splits that a cache of so many rows is cut into at most."""
    return min(-(-capacity // MIN_SPLIT_SIZE), MAX_SPLITS)


def fixed_splits(max_seq_len: int) -> int:
    """Count splits of the fixed cut below a position: of the smallest size up to the first doubling, then larger."""
    doublings = max((max(max_seq_len - 1, 0) // (SPLITS_PER_DOUBLING * FIXED_SPLIT_SIZE)).bit_length() - 1, 0)
    return doublings * SPLITS_PER_DOUBLING + -(-max_seq_len // (FIXED_SPLIT_SIZE << doublings))
