"""A target over static buffers: a block of rows is a fixed list of launches, with its position on the device.

Has the methods of ``models.transformers_target`` as well, so that the reference runner can drive it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_local.kernels.decode_attention import AttentionMask, SplitKV, decode_attention
from dflash_local.kernels.delta_step import CycleState
from dflash_local.kernels.prefill_attention import prefill_attention
from dflash_local.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from dflash_local.kernels.rms_norm import rms_norm
from dflash_local.models.fused.recurrent import RecurrentState
from dflash_local.models.fused.shape import TargetShape
from dflash_local.models.fused.weights import AttentionLayer, GatedDeltaLayer, Layer, TargetWeights
from dflash_local.models.rope import inverse_frequencies
from dflash_local.models.transformers_target import Forward, TargetSnapshot

EXACT_ROWS = 16  # of every forward in exact mode, at least: of one row as of a block


def rotation_table(
    frequencies: torch.Tensor, factor: float, positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, rotary_dim] of all positions, computed in float32."""
    angles = torch.outer(torch.arange(positions, device=frequencies.device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


class FusedTarget:
    """A loaded target with room for ``context`` tokens and one block behind them. Batch 1.

    In exact mode every block, also of one row, is computed as ``rows`` rows over the same splits of the cache, so
    that a row's bits do not depend on how many rows its block has (ENGINE 11.3). The caches may be of a coarser
    dtype than the rest (float8_e4m3fn): plain and drafted decoding read the same caches.

    Attributes:
        start: [1] int32 on the device: committed tokens. kept: [1], of these, rows of the last block that the
            recurrent layers have not committed yet. cycle: [1], blocks so far. tokens: [rows] int64, the block's ids.
        hidden: [rows, H] after the final norm. tapped: [rows, taps x H]. logits: [rows, V].
    """

    def __init__(
        self,
        weights: TargetWeights,
        shape: TargetShape,
        taps: Sequence[int],
        context: int,
        rows: int,
        *,
        exact: bool = False,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        rows = max(rows, EXACT_ROWS) if exact else rows
        self.weights, self.shape = weights, shape
        self.taps = tuple(taps)
        self.rows, self.exact = rows, exact
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.hidden_size, self.vocab_size = shape.hidden_size, weights.head.out_features
        self.is_recurrent = shape.recurrent
        heads = shape.heads
        self.cache_dtype = self.dtype if cache_dtype is None else cache_dtype
        self.capacity = context + 2 * rows  # cycles that were launched too early write behind the end
        attending = shape.layer_types.count("attention")
        # Zeros: a masked key is never used, but NaN times nothing would be.
        self.keys, self.values = (
            torch.zeros(
                attending, heads.num_kv_heads, self.capacity, heads.head_dim, device=self.device, dtype=self.cache_dtype
            )
            for _ in range(2)
        )
        self._slots = [shape.layer_types[:index].count("attention") for index in range(shape.num_layers)]
        frequencies = inverse_frequencies(shape.rope, heads.rotary_dim).to(self.device)
        self.rotation = rotation_table(frequencies, shape.rope.attention_factor, self.capacity, self.dtype)
        self.start, self.kept, self.cycle = torch.zeros(3, dtype=torch.int32, device=self.device).split(1)
        self.states = {
            index: RecurrentState(shape.delta, rows, self.device, self.dtype, CycleState(self.cycle, self.kept))
            for index, kind in enumerate(shape.layer_types)
            if kind == "delta" and shape.delta is not None
        }
        self.length = 0  # the host's view of ``start``, where it knows
        self._allocate_buffers(rows)

    def _allocate_buffers(self, rows: int) -> None:
        shape, heads = self.shape, self.shape.heads

        def empty(*sizes: int) -> torch.Tensor:
            return torch.empty(sizes, device=self.device, dtype=self.dtype)

        self.tokens = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.hidden = empty(rows, shape.hidden_size)
        self._x = empty(rows, shape.hidden_size)
        self._normed = empty(rows, shape.hidden_size)
        self._qkv = empty(rows, heads.qkv_size)
        self._queries = empty(rows, heads.num_heads, heads.head_dim)
        self._attended = empty(rows, heads.num_heads * heads.head_dim)
        self._intermediate = empty(rows, shape.intermediate_size)
        if shape.delta is not None:
            self._projected = empty(rows, shape.delta.projection_size)
            self._mixed = empty(rows, shape.delta.value_size)
        self.tapped = empty(rows, max(len(self.taps), 1) * shape.hidden_size)
        self.logits = empty(rows, self.vocab_size)
        self._partials = SplitKV.allocate(
            rows, heads.num_heads, heads.head_dim, self.capacity, self.device, fixed=self.exact
        )
        self._tap_place = {layer: index for index, layer in enumerate(self.taps)}

    def block(self, rows: int, max_seq_len: int, with_taps: bool) -> None:
        """Run ``tokens[:rows]`` at ``start ..``: fills ``hidden``, ``tapped`` and ``logits``, and the cache rows.

        A fixed list of launches: nothing of it depends on what the device holds.

        Args:
            max_seq_len: no token of the block stands at or behind this position.
        """
        if self.exact:
            rows = self.rows
        x = self._x[:rows]
        torch.index_select(self.weights.embedding, 0, self.tokens[:rows], out=x)
        for index, layer in enumerate(self.weights.layers):
            self._mix_tokens(index, layer, x, max_seq_len)
            normed = rms_norm(
                x, layer.post_norm, self.shape.eps, self._normed[:rows], norm_plus_one=self.shape.norm_plus_one
            )
            layer.down(layer.gate_up(normed, self._intermediate[:rows]), x, x)
            if with_taps and index in self._tap_place:
                self._tap(self.tapped[:rows], self._tap_place[index]).copy_(x)
        rms_norm(x, self.weights.norm, self.shape.eps, self.hidden[:rows], norm_plus_one=self.shape.norm_plus_one)
        self.weights.head(self.hidden[:rows], self.logits[:rows])

    def _tap(self, taps: torch.Tensor, place: int) -> torch.Tensor:
        return taps[:, place * self.hidden_size : (place + 1) * self.hidden_size]

    def _mix_tokens(self, index: int, layer: Layer, x: torch.Tensor, max_seq_len: int) -> None:
        """The layer's first half: attention or Gated-DeltaNet, added to ``x``."""
        rows, eps = len(x), self.shape.eps
        normed = rms_norm(x, layer.input_norm, eps, self._normed[:rows], norm_plus_one=self.shape.norm_plus_one)
        if isinstance(layer, GatedDeltaLayer):
            projected = layer.in_proj(normed, self._projected[:rows])
            mixed = self.states[index].block(projected, layer, eps, self._mixed[:rows])
            layer.output(mixed, x, x)
            return
        qkv = layer.qkv(normed, self._qkv[:rows])
        queries, heads = self._queries[:rows], self.shape.heads
        cache = self._cache(index)
        qk_norm_rope_cache(qkv, layer.qk_norms, eps, self.rotation, self.start, queries, cache, heads)
        gates = qkv if heads.gated else None
        attended = self._attended[:rows]
        decode_attention(queries, cache, self.start, attended, self._partials, max_seq_len, AttentionMask(), gates)
        layer.output(attended, x, x)

    def _cache(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        slot = self._slots[index]
        return self.keys[slot], self.values[slot]

    def prefill(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run committed tokens [M], as many as there are: they are part of the text from now on."""
        rows = len(ids)
        eps, norm_plus_one = self.shape.eps, self.shape.norm_plus_one
        self._commit_pending()
        x = self.weights.embedding[ids]
        normed = torch.empty_like(x)
        taps = x.new_empty(rows, len(self.taps) * self.hidden_size) if with_taps else None
        for index, layer in enumerate(self.weights.layers):
            rms_norm(x, layer.input_norm, eps, normed, norm_plus_one=norm_plus_one)
            if isinstance(layer, GatedDeltaLayer):
                x += layer.output.prefill(self.states[index].prefill(layer.in_proj.prefill(normed), layer, eps))
            else:
                x += layer.output.prefill(self._prefill_attention(index, layer, normed))
            rms_norm(x, layer.post_norm, eps, normed, norm_plus_one=norm_plus_one)
            x += layer.down.prefill(layer.gate_up.prefill(normed))
            if taps is not None and index in self._tap_place:
                self._tap(taps, self._tap_place[index]).copy_(x)
        self.set_length(self.length + rows)
        return Forward(rms_norm(x, self.weights.norm, eps, normed, norm_plus_one=norm_plus_one), taps)

    def _prefill_attention(self, index: int, layer: AttentionLayer, normed: torch.Tensor) -> torch.Tensor:
        rows, heads = len(normed), self.shape.heads
        cache = self._cache(index)
        qkv = layer.qkv.prefill(normed)
        queries = normed.new_empty(rows, heads.num_heads, heads.head_dim)
        qk_norm_rope_cache(qkv, layer.qk_norms, self.shape.eps, self.rotation, self.start, queries, cache, heads)
        attended = prefill_attention(queries, cache, self.length)
        if heads.gated:
            wide = heads.num_heads * heads.head_dim
            gate = qkv[:, : 2 * wide].view(rows, heads.num_heads, 2, heads.head_dim)[:, :, 1]
            attended = attended * gate.sigmoid().reshape(rows, wide)
        return attended

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows [M, H]."""
        return self.weights.embedding[ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of hidden rows [M, H]; in exact mode those of a block, where one holds them."""
        rows = len(hidden)
        if not self.exact or rows > self.rows:
            return self.weights.head.prefill(hidden)
        self.hidden[:rows] = hidden
        return self.weights.head(self.hidden, self.logits)[:rows].clone()

    def verify(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run a block [M] without committing it; ``commit`` keeps a prefix of it. Copies of the static buffers."""
        rows = len(ids)
        self.tokens[:rows] = ids
        self.block(rows, self.length + self.rows, with_taps)
        self.kept.zero_()  # what there was is committed; this block's rows count when they are committed
        for state in self.states.values():
            state.rollback()
        return Forward(self.hidden[:rows].clone(), self.tapped[:rows].clone() if with_taps else None)

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` tokens of the last block."""
        self.kept.fill_(rows)
        self.cycle.add_(1)
        self.set_length(self.length + rows)

    def truncate(self, length: int) -> None:
        """Forget committed tokens after ``length``. A recurrent target restores a snapshot instead."""
        if self.is_recurrent and length != self.length:
            raise RuntimeError("a recurrent state cannot be truncated")
        self.set_length(min(length, self.length))

    def set_length(self, length: int) -> None:
        """Tell the host what the device has committed, or cut it back to that; the caller knows that it can be."""
        self.length = length
        self.start.fill_(length)

    def keep(self, rows: int) -> None:
        """Of the last block's rows, commit so many instead; nothing may have been run since."""
        self.kept.fill_(rows)

    def snapshot(self) -> TargetSnapshot:
        """A point ``restore`` can return to."""
        self._commit_pending()
        return TargetSnapshot(self.length, tuple(state.copy() for state in self.states.values()))

    def restore(self, point: TargetSnapshot) -> None:
        """Return to it."""
        for state, copy in zip(self.states.values(), point.recurrent, strict=True):
            state.restore(copy)
        self.kept.zero_()
        self.set_length(point.length)

    def clear(self) -> None:
        """Forget everything."""
        for state in self.states.values():
            state.clear()
        self.kept.zero_()
        self.set_length(0)

    def _commit_pending(self) -> None:
        """Bring the recurrent states up to ``start``."""
        rows = int(self.kept) if self.states else 0
        for state in self.states.values():
            state.commit(rows)
        self.kept.zero_()
