"""The drafter over static buffers: context rows and a block of drafts as fixed lists of launches (ENGINE 1.2 to 1.5).

Borrows the target's embedding and position, and its head unless it is given one of its own. Drafts are only proposed,
so its matrices and its head may be coarser than the checkpoint's. Its weights are ``models.drafter_weights``'.
"""

from __future__ import annotations

import torch

from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.kernels.decode_attention import AttentionMask, SplitKV, decode_attention
from dflash_local.kernels.qk_norm_rope_cache import HeadLayout, qk_norm_rope_cache
from dflash_local.kernels.rms_norm import rms_norm
from dflash_local.models.drafter_weights import DrafterWeights, LayerWeights
from dflash_local.models.fused.linear import GateUp, Linear, quantise_layer
from dflash_local.models.fused.target import FusedTarget, rotation_table
from dflash_local.models.rope import inverse_frequencies


class _Layer:
    """A layer's weights behind the seam for matrices, and what its rows see."""

    def __init__(
        self, weights: LayerWeights, config: DrafterConfig, index: int, draft_window: int, device: torch.device
    ) -> None:
        self.input_norm, self.post_norm = weights.input_norm.to(device), weights.post_norm.to(device)
        qk_norms = weights.query_key_norm.to(device)
        self.qk_norms = (qk_norms[0], qk_norms[config.num_heads])
        self.qkv, self.output = Linear(weights.qkv), Linear(weights.output)
        self.gate_up, self.down = GateUp(weights.gate_up), Linear(weights.down)
        self.mask = AttentionMask(config.causal[index], config.windows[index] or 0, draft_window)

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)


class FusedDrafter:
    """A loaded drafter bound to its target.

    Keeps nothing of ``weights`` but its tensors' places: a matrix that is replaced is free when the caller lets it go.

    Attributes:
        drafts: [block - 1, out_features of the head] logits of the drafted positions.
        head: gives them; the target's own unless ``use_head`` brought another.
        length: committed context rows, as the host knows.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: DrafterWeights,
        target: FusedTarget,
        draft_window: int | None = None,
        *,
        eight_bits: bool = False,
    ) -> None:
        """Bind it.

        Args:
            draft_window: context rows it looks back on. eight_bits: its matrices are kept so, and may lie elsewhere:
                then they are brought to the target's device one after the other.
        """
        self.config, self.target = config, target
        self.length = 0
        self._layers = tuple(
            _Layer(layer, config, index, draft_window or 0, target.device) for index, layer in enumerate(weights.layers)
        )
        self._fc, self._context_kv = Linear(weights.fc), Linear(weights.context_kv)
        self._norm, self._hidden_norm, self._context_key_norm = (
            norm.to(target.device) for norm in (weights.norm, weights.hidden_norm, weights.context_key_norm)
        )
        if eight_bits:
            self.in_eight_bits()
        self._heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim)
        self._context_heads = HeadLayout(
            0, config.num_layers * config.num_kv_heads, config.head_dim, config.head_dim, per_head_norms=True
        )
        device, dtype = target.device, target.dtype
        shape = (config.num_layers, config.num_kv_heads, target.capacity + config.block_size, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=target.cache_dtype)
        self.values = torch.zeros(shape, device=device, dtype=target.cache_dtype)
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._rotation = rotation_table(frequencies, config.rope.attention_factor, shape[2], dtype)
        self._allocate_buffers(config.block_size)
        self.use_head(target.weights.head)

    def _allocate_buffers(self, rows: int) -> None:
        config, target = self.config, self.target

        def empty(*sizes: int) -> torch.Tensor:
            return torch.empty(sizes, device=target.device, dtype=target.dtype)

        self._ids = torch.full((rows,), config.mask_token_id, dtype=torch.int64, device=target.device)
        self._x, self._normed, self._hidden = (empty(rows, config.hidden_size) for _ in range(3))
        self._qkv, self._queries = empty(rows, self._heads.qkv_size), empty(rows, config.num_heads, config.head_dim)
        self._attended = empty(rows, config.num_heads * config.head_dim)
        self._intermediate = empty(rows, config.intermediate_size)
        self._partials = SplitKV.allocate(rows, config.num_heads, config.head_dim, self.keys.shape[2], target.device)
        most_rows = max(rows, target.rows)
        self._feature = empty(most_rows, config.hidden_size)
        self._projected = empty(most_rows, self._context_kv.out_features)

    @property
    def matrices(self) -> tuple[Linear | GateUp, ...]:
        """All matrices of the drafter's own."""
        return (*(p for layer in self._layers for p in layer.products), self._fc, self._context_kv)

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        """The matrices, and the head when it is not the target's."""
        own = () if self.head is self.target.weights.head else (self.head,)
        return (*self.matrices, *own)

    def in_eight_bits(self) -> None:
        """Replace the matrices by their codes, one after the other. Nothing may have been recorded yet."""
        for matrix in self.matrices:
            quantise_layer(matrix, self.target.device)

    def use_head(self, head: Linear) -> None:
        """Draft ids below a head's out_features by that head [<= V, H]. Nothing may have been recorded yet."""
        self.head = head
        sizes = (self.config.block_size - 1, head.out_features)
        self.drafts = torch.empty(sizes, device=self.target.device, dtype=self.target.dtype)

    def block(self, max_seq_len: int) -> None:
        """Draft behind the target's ``tokens[0]``: fills ``drafts``. The block always has its trained size."""
        self._ids[:1] = self.target.tokens[:1]
        x, eps = self._x, self.config.rms_norm_eps
        torch.index_select(self.target.weights.embedding, 0, self._ids, out=x)
        for index, layer in enumerate(self._layers):
            normed = rms_norm(x, layer.input_norm, eps, self._normed)
            qkv = layer.qkv(normed, self._qkv)
            cache = (self.keys[index], self.values[index])
            qk_norm_rope_cache(
                qkv, layer.qk_norms, eps, self._rotation, self.target.start, self._queries, cache, self._heads
            )
            attended = decode_attention(
                self._queries, cache, self.target.start, self._attended, self._partials, max_seq_len, layer.mask
            )
            layer.output(attended, x, x)
            rms_norm(x, layer.post_norm, eps, normed)
            layer.down(layer.gate_up(normed, self._intermediate), x, x)
        rms_norm(x, self._norm, eps, self._hidden)
        self.head(self._hidden[1:], self.drafts)

    def inject(self, rows: int) -> None:
        """Context rows of the target's last block, all of them, at its ``start``.

        Rows behind the ones that get committed are written too; they are never seen and are written again.
        """
        feature = self._fc(self.target.tapped[:rows], self._feature[:rows])
        rms_norm(feature, self._hidden_norm, self.config.rms_norm_eps, feature)
        self._write_cache(self._context_kv(feature, self._projected[:rows]))

    def write_context(self, taps: torch.Tensor, start: int) -> None:
        """Context rows of committed tokens at positions ``start ..``, as many as there are; taps [M, taps x H]."""
        feature = self._fc.prefill(taps)
        rms_norm(feature, self._hidden_norm, self.config.rms_norm_eps, feature)
        at = torch.tensor([start], dtype=torch.int32, device=taps.device)
        self._write_cache(self._context_kv.prefill(feature), at)
        self.length = start + len(taps)

    def _write_cache(self, projected: torch.Tensor, start: torch.Tensor | None = None) -> None:
        """Keys and values of all layers, normed and rotated, into the cache rows ``start ..``."""
        # All layers' caches lie one behind the other, so their heads are placed like those of one layer.
        cache = (self.keys.flatten(0, 1), self.values.flatten(0, 1))
        norms = (self._hidden_norm, self._context_key_norm)
        at = self.target.start if start is None else start
        qk_norm_rope_cache(
            projected, norms, self.config.rms_norm_eps, self._rotation, at, self._queries, cache, self._context_heads
        )
