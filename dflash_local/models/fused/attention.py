"""Softmax attention over a cache of keys and values: a block's rows by split-KV, a prompt's by tiles of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dflash_local.config.features import AttentionConfig
from dflash_local.kernels.allocate import on_host
from dflash_local.kernels.decode_attention import AttentionMask, SplitKV, decode_attention
from dflash_local.kernels.prefill_attention import prefill_attention
from dflash_local.kernels.qk_norm_rope_cache import Cache, HeadLayout, qk_norm_rope_cache
from dflash_local.layout import attention as layout
from dflash_local.layout.attention import AttentionLayout
from dflash_local.layout.linear import matrix_rows
from dflash_local.models.fused.linear import JoinedLinear
from dflash_local.models.fused.part import PartWeights, RunState
from dflash_local.models.fused.weight_tensors import RMSNorm, WeightTensors
from dflash_local.models.place import Places

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionWeights(PartWeights["Attention"]):
    """The loaded weights of one layer.

    Attributes:
        qkv: rows of queries (and their gates), keys, values. qk_norms: of queries and of keys; none of either is ().
        eps, plus_one: of these norms. qkv_bias: [rows of qkv]. output_bias: [H]. sinks: [heads] float32.
    """

    config: AttentionConfig
    qkv: JoinedLinear
    output: JoinedLinear
    qk_norms: tuple[RMSNorm, ...]
    eps: float
    plus_one: bool = False
    places: Places = field(default_factory=dict)
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, config: AttentionConfig, at: str, source: WeightTensors) -> AttentionWeights:
        """Build it over the tensors of ``AttentionLayout.weights``."""
        spec, layout = source.spec, AttentionLayout(config)
        products = layout.projections(at, spec.hidden_size)
        qkv, output = (JoinedLinear.of(product, source) for product in products)
        vectors = layout.vectors(at, spec)
        qkv_bias, output_bias, sinks = (None if each is None else source.tensors[each.name] for each in vectors[1:])
        places = {**qkv.places, **output.places, **{each.name: source.tensors[each.name] for each in vectors.all()}}
        if vectors.qkv_bias is not None and qkv_bias is not None:
            del places[vectors.qkv_bias.name]  # stored in parts
            places |= {f"{part.module}.bias": qkv_bias[rows] for part, rows in matrix_rows(products[0].parts)}
        norms = tuple(map(source.norm, vectors.qk_norms))
        return cls(config, qkv, output, norms, source.eps, spec.norm_plus_one, places, qkv_bias, output_bias, sinks)

    @property
    def joined(self) -> tuple[JoinedLinear, JoinedLinear]:
        return self.qkv, self.output

    def finish(self) -> None:
        PartWeights.finish(self)
        for norm in self.qk_norms:
            norm.finish()

    def randomize(self, generator: torch.Generator) -> None:
        """Fill random matrices, norms of one, biases and sinks of zero."""
        PartWeights.randomize(self, generator)
        for norm in self.qk_norms:
            norm.reset()
        for vector in (self.qkv_bias, self.output_bias, self.sinks):
            if vector is not None:
                vector.zero_()

    def bind(self, at: str, run: RunState) -> Attention:
        """Return the layer over caches of its own, ``at`` their name."""
        config, spec, owner = self.config, run.spec, run.owner
        cache = run.tensors.take(AttentionLayout(config).state(at, spec))
        cos, sin = run.tensors.take(layout.rotation_buffers(owner, config.rotary_dim, spec.capacity, spec.dtype))
        outputs, softmax_stats = run.tensors.take(AttentionLayout(config).partials(owner, spec))
        partials = SplitKV(outputs, softmax_stats, spec.exact)
        scratch = run.tensors.take(layout.block_buffers(owner, config, spec.rows, spec.dtype))
        mask = AttentionMask(sliding_window=config.sliding_window or 0)
        return Attention(self, cache, (cos, sin), partials, scratch, run.start, mask)


def rows_on_host(cache: Cache, first: int, end: int) -> tuple[torch.Tensor, ...]:
    """Copy keys and values [key heads, end - first, head_dim] of some positions to the host, with their scales."""
    at = torch.arange(first, end, device=cache[0].device) % cache[0].shape[1]
    return tuple(on_host(part.index_select(1, at)) for part in cache)


def put_rows(cache: Cache, rows: Sequence[torch.Tensor], end: int) -> None:
    """Write back what ``rows_on_host`` gave of the positions before ``end``."""
    at = torch.arange(end - rows[0].shape[1], end, device=cache[0].device) % cache[0].shape[1]
    for part, given in zip(cache, rows, strict=True):
        part.index_copy_(1, at, given.to(part.device))


def hold_rows(cache: Cache, end: int) -> tuple[torch.Tensor, ...]:
    """Copy keys and values [key heads, end, head_dim] of the first positions to the host, with their scales.

    Head by head: a copy of many rows on the device, as ``rows_on_host`` makes, may have no room there.
    """
    copies = tuple(
        part.new_empty((len(part), end, *part.shape[2:]), device="cpu", pin_memory=part.is_cuda) for part in cache
    )
    for part, copy in zip(cache, copies, strict=True):
        for head, rows in zip(part, copy, strict=True):
            rows.copy_(head[:end], non_blocking=True)
    return copies


def put_held_rows(cache: Cache, held: Sequence[torch.Tensor]) -> None:
    """Write back what ``hold_rows`` gave."""
    for part, copy in zip(cache, held, strict=True):
        for head, rows in zip(part, copy, strict=True):
            head[: len(rows)].copy_(rows, non_blocking=True)


class Attention:
    """One layer's. ``cache``: keys and values [key heads, capacity, head_dim], and scales of codes. ``mask``: what a
    block's rows see.
    """

    def __init__(
        self,
        weights: AttentionWeights,
        cache: Cache,
        rotation: Pair,
        partials: SplitKV,
        scratch: tuple[torch.Tensor, ...],
        start: torch.Tensor,
        mask: AttentionMask | None = None,
    ) -> None:
        """Keep ``rotation``: cos and sin [positions, rotary_dim]; ``scratch``: of ``block_buffers``; ``start``: [1]."""
        config = weights.config
        self.weights, self.cache, self.mask = weights, cache, AttentionMask() if mask is None else mask
        self._rotation, self._partials, self._start = rotation, partials, start
        self._qkv, self._queries, self._attended = scratch
        self._norms = (weights.qk_norms[0].weight, weights.qk_norms[1].weight) if weights.qk_norms else None
        self._heads = HeadLayout(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            gated=config.gated,
            norm_plus_one=weights.plus_one,
        )

    def block(
        self, normed: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, max_seq_len: int
    ) -> torch.Tensor:
        """Compute ``out`` [M, H] = the layer's result (+ residual) of a block's rows at ``start ..``."""
        rows = len(normed)
        qkv, queries, attended = self._qkv[:rows], self._queries[:rows], self._attended[:rows]
        self.keep(normed)
        config, start = self.weights.config, self._start
        gates = qkv if config.gated else None
        decode_attention(
            queries, self.cache, start, attended, self._partials, max_seq_len, self.mask, gates, config.scale,
            sinks=self.weights.sinks,
        )  # fmt: skip
        return self.weights.output(attended, out, residual, self.weights.output_bias)

    def keep(self, normed: torch.Tensor) -> None:
        """Write keys and values of a block's rows [M, H] at ``start ..``; queries on the way."""
        rows = len(normed)
        self._write(self.weights.qkv(normed, self._qkv[:rows]), self._queries[:rows], self._start)

    def keep_prefill(self, normed: torch.Tensor) -> None:
        """Write keys and values of a prompt's rows [M, H] at ``start ..``."""
        config = self.weights.config
        queries = normed.new_empty(len(normed), config.num_heads, config.head_dim)
        self._write(self.weights.qkv.prefill(normed), queries, self._start)

    def prefill(self, normed: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return its result [M, H] of a prompt's rows at ``start ..``; or ``residual`` with that added."""
        rows = len(normed)
        qkv = self.weights.qkv.prefill(normed)
        attended = normed.new_empty(rows, self.weights.config.output_size)
        step = min(rows, layout.RING_SLACK) if self.is_ring else rows  # of more a ring would lose keys that they see
        for low in range(0, rows, step):
            part = slice(low, low + step)
            self._attend(qkv[part], self._start + low if low else self._start, attended[part])
        output, bias = self.weights.output, self.weights.output_bias
        if bias is None:
            return output.prefill(attended, residual)
        result = output.prefill(attended).add_(bias)
        return result if residual is None else residual.add_(result)

    def _attend(self, qkv: torch.Tensor, start: torch.Tensor, out: torch.Tensor) -> None:
        """Write a prompt's rows at ``start ..`` to the cache, and what they attend to to ``out``."""
        config = self.weights.config
        queries = qkv.new_empty(len(qkv), config.num_heads, config.head_dim)
        self._write(qkv, queries, start)
        gates, window = qkv if config.gated else None, config.sliding_window
        prefill_attention(queries, self.cache, start, config.scale, window, gates, self.weights.sinks, out)

    @property
    def is_ring(self) -> bool:
        """Return whether the cache does not hold every position."""
        return self.cache[0].shape[1] < len(self._rotation[0])

    @property
    def window(self) -> int:
        """Return keys that a row sees at most; 0 for all."""
        return self.mask.sliding_window

    def snapshot(self, length: int) -> tuple[torch.Tensor, ...]:
        """Copy to the host what a block behind ``length`` tokens sees, where the cache is a ring."""
        return rows_on_host(self.cache, max(0, length - self.window), length)

    def restore(self, rows: Sequence[torch.Tensor], length: int) -> None:
        put_rows(self.cache, rows, length)

    def state_bytes(self, positions: int) -> int:
        return sum(part[:, :1].numel() * part.element_size() for part in self.cache) * positions

    def _write(self, qkv: torch.Tensor, queries: torch.Tensor, start: torch.Tensor) -> None:
        """Norm and rotate queries and keys, and write keys and values to their cache rows; all with their biases."""
        weights, cache = self.weights, self.cache
        qk_norm_rope_cache(
            qkv, self._norms, weights.eps, self._rotation, start, queries, cache, self._heads, weights.qkv_bias
        )
