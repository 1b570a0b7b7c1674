"""A DFlash drafter in plain PyTorch, and what it proposes.

A small Qwen3-style decoder that fills a block in one forward and sees the past only through keys and values of the
target's taps. It has no embedding and no head: both are the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, cast

import torch
from torch.nn import functional

from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.engines import Drafts
from dflash_local.drafters.kinds import read_drafter
from dflash_local.load_config import LoadConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_context import BlockMasks, ContextCache
from dflash_local.models.drafter_weights import (
    DrafterWeights,
    random_on_device,
    random_weights,
    read_weights,
    with_matrices,
)
from dflash_local.models.packed_linear import linear, pack
from dflash_local.models.rope import RopeTable, rotate
from dflash_local.models.transformers_target import TransformersTarget

if TYPE_CHECKING:
    from dflash_local.engine.sampling import Sampler

Sublayer = Callable[[torch.Tensor], torch.Tensor]
Model = TypeVar("Model", bound="DrafterModel")
Part = Literal["attention", "mlp"]


def drafter_dtype(target_dtype: torch.dtype) -> torch.dtype:
    """Return the drafter's dtype: bfloat16 for float16, which the taps' fusion overflows."""
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


class DrafterModel:
    """A loaded drafter: deterministic, without state outside the cache it is given. Taps and embeddings are cast."""

    def __init__(self, config: DFlashConfig, weights: DrafterWeights, notices: tuple[str, ...] = ()) -> None:
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

    @classmethod
    def load(
        cls: type[Model],
        checkpoint: Checkpoint,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention_factor: float | None = None,
        packed: bool = False,
    ) -> Model:
        """Read a drafter.

        Args:
            attention_factor: another rope amplitude. packed: matrices are laid out for ``packed_linear``.

        Raises:
            CheckpointError: not a drafter's.
        """
        _refuse_float16(dtype)
        config = cast(DFlashConfig, read_drafter(checkpoint.config, checkpoint.source.config_file))
        notices: list[str] = []
        weights = read_weights(checkpoint, config, torch.device(device), dtype, notices.append)
        if packed:
            weights = with_matrices(weights, pack)
        return cls(config.with_attention_factor(attention_factor), weights, tuple(notices))

    @classmethod
    def random(
        cls: type[Model],
        config: DFlashConfig,
        *,
        target_hidden: int,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Model:
        """Return a drafter with random weights, the same for the same seed: test material."""
        _refuse_float16(dtype)
        return cls(config, random_weights(config, target_hidden, seed, torch.device(device), dtype))

    @property
    def nbytes(self) -> int:
        """Return bytes of all weights on the device; K and V projections count twice (see DrafterWeights)."""
        return self._weights.nbytes

    def new_cache(self, capacity: int = 256, draft_window: int | None = None) -> ContextCache:
        """Return an empty cache for one sequence. ``capacity``: rows at first; it doubles when full."""
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
        """Return the block's hidden states after the final norm; the first draft's row predicts position ``start + 1``.

        A pure function of the cache's committed rows and the embeddings: the block's own keys and
        values go into scratch rows behind ``cache.length`` and are forgotten.

        Args:
            embeddings: [B, hidden], the embedding of the anchor and B-1 mask ids, of ``draft_rows`` rows.
            start: absolute position of the anchor; must be ``cache.length``.

        Returns:
            [B, hidden]. Rows before ``first_draft`` predict nothing of use.
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

        def attend(rows: torch.Tensor) -> torch.Tensor:
            return self._attention(index, rows, cache, cos_sin)

        x = x + self._around(index, "attention", attend, input_norm(x))
        return x + self._around(index, "mlp", lambda rows: self._feed_forward(index, rows), post_norm(x))

    def _around(self, index: int, part: Part, sublayer: Sublayer, rows: torch.Tensor) -> torch.Tensor:
        """Return the output of a layer's sublayer on normed rows; a kind may have something around it."""
        return sublayer(rows)

    def _attention(
        self, index: int, x: torch.Tensor, cache: ContextCache, cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Attend for normed rows; their keys and values go behind the committed ones."""
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


class DFlashProposer:
    """A drafter with its context cache, bound to the target whose embedding and head it borrows. It drafts its trained
    size, since bidirectional layers see all of the block; a shorter request takes the first slots.
    """

    model: ClassVar[type[DrafterModel]] = DrafterModel

    def __init__(self, drafter: DrafterModel, target: TransformersTarget, draft_window: int | None = None) -> None:
        self.drafter, self.target = drafter, target
        self._cache = drafter.new_cache(draft_window=draft_window)
        # The mask row never changes: embed the whole block once, then only the anchor's row.
        ids = torch.full((drafter.config.draft_rows,), drafter.config.mask_token_id, device=target.device)
        self._block = self._embed(ids).to(drafter.dtype).clone()

    @classmethod
    def load(
        cls, files: Checkpoint, target: TransformersTarget, options: LoadConfig, packed: bool
    ) -> tuple[DFlashProposer, tuple[str, ...]]:
        """See ``drafters.engines.LoadableProposer``."""
        drafter = cls.model.load(
            files,
            device=target.device,
            dtype=drafter_dtype(target.dtype),
            attention_factor=options.attention_factor,
            packed=packed,
        )
        return cls.bound(drafter, files, target, options.draft_window), drafter.notices

    @classmethod
    def random(cls, config: DFlashConfig, target: TransformersTarget) -> DFlashProposer:
        weights = random_on_device(config, target.hidden_size, target.device, target.dtype)
        return cls(cls.model(config, weights), target)

    @classmethod
    def bound(
        cls, drafter: DrafterModel, files: Checkpoint, target: TransformersTarget, draft_window: int | None
    ) -> DFlashProposer:
        """Bind a drafter to its target."""
        return cls(drafter, target, draft_window)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the block's rows."""
        return self.target.embed(ids)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits for the ids that the target has."""
        return self.target.head(hidden.to(self.target.dtype))

    def _choose(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        anchor: torch.Tensor,
        sampler: Sampler,
        noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids of drafted rows [m] and their margins; ``anchor``: [1]."""
        return sampler.draft(logits, None if noise is None else noise[: len(logits)])

    @property
    def length(self) -> int:
        return self._cache.length

    def extend(self, taps: torch.Tensor, start: int) -> None:
        """Write the context K/V of newly committed tokens, once."""
        self.drafter.write_context(self._cache, taps.to(self.drafter.dtype), start)

    def truncate(self, length: int) -> None:
        if length < self._cache.length:
            self._cache.truncate(length)

    def hold(self) -> ContextCache:
        return self._cache.copy()

    def put(self, held: ContextCache) -> None:
        self._cache = held.copy()

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        anchor = torch.tensor(ids[-1:], device=self.target.device)
        self._block[:1] = self._embed(anchor)
        drafter = self.drafter
        hidden = drafter.draft_hidden(self._cache, self._block, len(ids) - 1)[drafter.config.first_draft :][:count]
        return Drafts(*self._choose(hidden, self._logits(hidden), anchor, sampler, noise))


def _refuse_float16(dtype: torch.dtype) -> None:
    if dtype == torch.float16:
        raise ValueError("a drafter never runs in float16; take drafter_dtype(target dtype)")


PROPOSER = DFlashProposer
