"""The drafter: one class for every published checkpoint of DFlash, DFlash 2 and DSpark, plain PyTorch.

A small Qwen3-style decoder that fills a block in one forward and sees the past only through keys and values of the
target's taps. It has no embedding and no head: both are the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.dflash2 import CandidateSelector, Convolution
from dflash_local.models.drafter_weights import (
    DrafterWeights,
    LayerWeights,
    random_weights,
    read_weights,
    with_matrices,
)
from dflash_local.models.packed_linear import linear, pack
from dflash_local.models.rope import RopeTable, rotate


class BlockMasks:
    """Masks of one drafter, right-aligned: the last columns are the block, before them the context.

    Visibility depends only on the distance from key to block, so one mask per (window, causal, rows)
    serves every context length by taking its last columns.

    Args:
        group: query heads per key head; each of a block's rows is repeated so often.
    """

    def __init__(self, group: int, device: torch.device, dtype: torch.dtype) -> None:
        self._group = group
        self._device = device
        self._dtype = dtype
        self._masks: dict[tuple[int | None, bool, int], torch.Tensor] = {}

    def visible(
        self, window: int | None, causal: bool, context: int, rows: int, draft_window: int | None
    ) -> tuple[int, torch.Tensor | None]:
        """The first key any row sees, and an additive mask over the keys from there on.

        Args:
            window: keys a row sees including its own, None for all.
            context: committed rows n; the block stands at positions n .. n+rows-1.
            draft_window: only so many last context rows exist at all.

        Returns:
            first key index, and [rows x group, n + rows - first] with row-major rows, or None when
            every row sees every key from ``first`` on.
        """
        first = 0 if window is None else max(0, context - window + 1)
        if draft_window is not None:
            first = max(first, context - draft_window)
        keys = context + rows - first
        if not causal and (window is None or keys <= window):
            return first, None
        mask = self._masks.get((window, causal, rows))
        if mask is None or mask.shape[1] < keys:
            mask = self._masks[window, causal, rows] = self._make(window, causal, rows, keys)
        return first, mask[:, mask.shape[1] - keys :]

    def _make(self, window: int | None, causal: bool, rows: int, keys: int) -> torch.Tensor:
        width = max(256, 2 * keys) if window is None else max(window - 1 + rows, keys)
        query = torch.arange(rows, device=self._device).unsqueeze(1)
        key = torch.arange(rows - width, rows, device=self._device).unsqueeze(0)
        hidden = torch.zeros(rows, width, dtype=torch.bool, device=self._device)
        if window is not None:
            hidden |= (query - key).abs() >= window
        if causal:
            hidden |= key > query
        mask = torch.zeros(rows, width, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(self._group, dim=0)


class ContextCache:
    """Keys and values of positions ``0 .. length-1`` of all layers, grown by doubling.

    Row index = absolute position. Rows at ``length`` and beyond are scratch: they are never read before they are
    written, so a truncation is a number and nothing else.

    Attributes:
        length: committed rows. keys, values: [layers, kv_heads, capacity, head_dim].
        draft_window: attend only to this many last context rows (positions stay absolute); None is all.
    """

    __slots__ = ("draft_window", "keys", "length", "values")

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        capacity: int,
        draft_window: int | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if draft_window is not None and draft_window < 1:
            raise ValueError(f"draft_window {draft_window} must be at least 1")
        shape = (layers, kv_heads, max(capacity, 1), head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0
        self.draft_window = draft_window

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows in all; committed rows are kept."""
        if rows <= self.capacity:
            return
        capacity = max(2 * self.capacity, rows)
        self.keys = self._grown(self.keys, capacity)
        self.values = self._grown(self.values, capacity)

    def _grown(self, old: torch.Tensor, capacity: int) -> torch.Tensor:
        layers, heads, _, width = old.shape
        new = torch.zeros((layers, heads, capacity, width), device=old.device, dtype=old.dtype)
        new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} rows to {length}")
        self.length = length


def drafter_dtype(target_dtype: torch.dtype) -> torch.dtype:
    """The drafter's dtype: bfloat16 for float16, which the taps' fusion overflows: acceptance falls to nothing."""
    return torch.bfloat16 if target_dtype == torch.float16 else target_dtype


@dataclass(frozen=True, slots=True)
class _Norm:
    """RMSNorm with the rounding of Qwen3RMSNorm: float32 inside, one rounding before the weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[-1:]
        if x.dtype == torch.float32 and self.weight.dim() == 1:
            return functional.rms_norm(x, shape, self.weight, self.eps)
        return functional.rms_norm(x, shape, None, self.eps) * self.weight


Around = tuple[Convolution | None, Convolution | None]


class Drafter:
    """A loaded drafter: deterministic, without state outside the cache it is given. Taps and embeddings are cast.

    Attributes:
        selector, markov: choose a DFlash 2 and a DSpark drafter's ids; None: each row's logits alone decide.
    """

    def __init__(self, config: DrafterConfig, weights: DrafterWeights, notices: tuple[str, ...] = ()) -> None:
        self.config = config
        self.device = weights.fc.device
        self.dtype = weights.fc.dtype
        self.notices = notices
        self._weights = weights
        self._rope = RopeTable(config.rope, config.head_dim, self.device, self.dtype)
        self._masks = BlockMasks(config.num_heads // config.num_kv_heads, self.device, self.dtype)
        eps = config.rms_norm_eps
        self._hidden_norm = _Norm(weights.hidden_norm, eps)
        self._context_key_norm = _Norm(weights.context_key_norm, eps)
        self._final_norm = _Norm(weights.norm, eps)
        self._norms = tuple(
            (_Norm(layer.input_norm, eps), _Norm(layer.query_key_norm, eps), _Norm(layer.post_norm, eps))
            for layer in weights.layers
        )
        second = config.dflash2
        self.selector: CandidateSelector | None = None
        if second is not None and weights.selector is not None:
            self.selector = CandidateSelector(second.selector, weights.selector)
        self.markov = weights.markov
        self._convolutions: tuple[Around, ...] = tuple(self._around(layer) for layer in weights.layers)

    def _around(self, layer: LayerWeights) -> Around:
        """The convolutions around attention and around the feed-forward part."""
        second = self.config.dflash2
        if second is None or layer.attention_conv is None or layer.mlp_conv is None:
            return None, None
        return Convolution(second.convolution, layer.attention_conv), Convolution(second.convolution, layer.mlp_conv)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention_factor: float | None = None,
        packed: bool = False,
    ) -> Drafter:
        """Read a drafter.

        Args:
            attention_factor: another rope amplitude. packed: matrices are laid out for ``packed_linear``.

        Raises:
            CheckpointError: not a drafter's.
        """
        _refuse_float16(dtype)
        config = DrafterConfig.from_json(checkpoint.config, checkpoint.source.config_file)
        notices: list[str] = []
        weights = read_weights(checkpoint, config, torch.device(device), dtype, notices.append)
        if packed:
            weights = with_matrices(weights, pack)
        return cls(config.with_attention_factor(attention_factor), weights, tuple(notices))

    @classmethod
    def random(
        cls,
        config: DrafterConfig,
        *,
        target_hidden: int,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Drafter:
        """A drafter with random weights, the same for the same seed: test material."""
        _refuse_float16(dtype)
        return cls(config, random_weights(config, target_hidden, seed, torch.device(device), dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device; K and V projections count twice (see DrafterWeights)."""
        return self._weights.nbytes

    def new_cache(self, capacity: int = 256, draft_window: int | None = None) -> ContextCache:
        """An empty cache for one sequence. ``capacity``: rows at first; it doubles when full."""
        config = self.config
        return ContextCache(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            capacity=capacity,
            draft_window=draft_window,
            device=self.device,
            dtype=self.dtype,
        )

    @torch.no_grad()
    def write_context(self, cache: ContextCache, taps: torch.Tensor, start: int) -> None:
        """Project the taps of newly committed tokens into the cache, once and for good.

        Args:
            taps: [m, number of taps x target hidden], the tapped layers' outputs side by side.
            start: absolute position of the first row; must be ``cache.length``.
        """
        if start != cache.length:
            raise ValueError(f"context rows must follow the {cache.length} cached ones, got start {start}")
        rows, weights = taps.shape[0], self._weights
        if rows == 0:
            return
        feature = self._hidden_norm(linear(self._own(taps), weights.fc))
        projected = linear(feature, weights.context_kv, weights.context_kv_bias)
        config = self.config
        keys, values = projected.view(rows, 2, config.num_layers * config.num_kv_heads, config.head_dim).unbind(1)
        keys = rotate(self._context_key_norm(keys), *self._rope.rows(start, rows))
        cache.reserve(start + rows)
        for buffer, new in ((cache.keys, keys), (cache.values, values)):
            per_layer = new.view(rows, config.num_layers, config.num_kv_heads, config.head_dim)
            buffer[:, :, start : start + rows] = per_layer.permute(1, 2, 0, 3)
        cache.length = start + rows

    @torch.no_grad()
    def draft_hidden(self, cache: ContextCache, embeddings: torch.Tensor, start: int) -> torch.Tensor:
        """The block's hidden states after the final norm; row k predicts position ``start + k``.

        A pure function of the cache's committed rows and the embeddings: the block's own keys and
        values go into scratch rows behind ``cache.length`` and are forgotten.

        Args:
            embeddings: [B, hidden], the embedding of the anchor and B-1 mask ids, of ``draft_rows`` rows.
            start: absolute position of the anchor; must be ``cache.length``.

        Returns:
            [B, hidden]. Row 0 (the anchor) predicts nothing of use, but of DSpark: there row k predicts the next one.
        """
        if start != cache.length:
            raise ValueError(f"the anchor's position must be the cache's length {cache.length}, got {start}")
        x = self._own(embeddings)
        cache.reserve(start + x.shape[0])
        cos_sin = self._rope.rows(start, x.shape[0])
        for index in range(self.config.num_layers):
            x = self._layer(index, x, cache, cos_sin)
        return self._final_norm(x)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.dtype and x.device == self.device:
            return x
        return x.to(device=self.device, dtype=self.dtype)

    def _layer(
        self, index: int, x: torch.Tensor, cache: ContextCache, cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        input_norm, _, post_norm = self._norms[index]
        attention_conv, mlp_conv = self._convolutions[index]

        def attend(rows: torch.Tensor) -> torch.Tensor:
            return self._attention(index, rows, cache, cos_sin)

        x = x + _within(attention_conv, attend, input_norm(x))
        return x + _within(mlp_conv, lambda rows: self._feed_forward(index, rows), post_norm(x))

    def _attention(
        self, index: int, x: torch.Tensor, cache: ContextCache, cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Of normed rows; their keys and values go behind the committed ones."""
        layer, query_key_norm = self._weights.layers[index], self._norms[index][1]
        rows, config = x.shape[0], self.config
        start, end = cache.length, cache.length + rows
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(rows, heads + 2 * kv_heads, config.head_dim)
        queries_keys = rotate(query_key_norm(qkv[:, : heads + kv_heads]), *cos_sin)
        keys, values = cache.keys[index], cache.values[index]
        keys[:, start:end] = queries_keys[:, heads:].transpose(0, 1)
        values[:, start:end] = qkv[:, heads + kv_heads :].transpose(0, 1)
        first, mask = self._masks.visible(config.windows[index], config.causal[index], start, rows, cache.draft_window)
        # Query heads that share a key head become extra rows of it: one attention call, no repeated keys.
        queries = queries_keys[:, :heads].reshape(rows, kv_heads, -1, config.head_dim).permute(1, 0, 2, 3)
        attended = functional.scaled_dot_product_attention(
            queries.reshape(1, kv_heads, -1, config.head_dim),
            keys[:, first:end].unsqueeze(0),
            values[:, first:end].unsqueeze(0),
            attn_mask=mask,
        )
        attended = attended.reshape(kv_heads, rows, -1).transpose(0, 1).reshape(rows, -1)  # CUDA gives other strides
        return linear(attended, layer.output, layer.output_bias)

    def _feed_forward(self, index: int, x: torch.Tensor) -> torch.Tensor:
        layer = self._weights.layers[index]
        gate, up = linear(x, layer.gate_up).chunk(2, -1)
        return linear(functional.silu(gate) * up, layer.down)


def _within(
    convolution: Convolution | None, sublayer: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
) -> torch.Tensor:
    """A sublayer's output, with the convolution around it if there is one."""
    if convolution is None:
        return sublayer(rows)
    rows, own = convolution.before(rows)
    return convolution.after(sublayer(rows), own)


def _refuse_float16(dtype: torch.dtype) -> None:
    if dtype == torch.float16:
        raise ValueError("a drafter never runs in float16; take drafter_dtype(target dtype)")
