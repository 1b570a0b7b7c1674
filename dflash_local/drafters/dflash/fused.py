"""A DFlash drafter over static buffers: context rows and a block of drafts as fixed lists of launches.

Borrows the target's embedding, position and head, unless it is given tables of its own. Drafts are only proposed, so
its matrices and its head may be coarser than the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from dflash_local.drafters.dflash import layout
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.choose import RowChooser
from dflash_local.kernels.decode_attention import AttentionMask, SplitKV
from dflash_local.kernels.qk_norm_rope_cache import Cache, HeadLayout, qk_norm_rope_cache
from dflash_local.layout import attention as attention_layout
from dflash_local.layout import mlp as mlp_layout
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_weights import DrafterLayerWeights, DrafterWeights, random_on_device, read_weights
from dflash_local.models.fused.attention import Attention, AttentionWeights, put_rows, rows_on_host
from dflash_local.models.fused.decoder_layer import DecoderLayer
from dflash_local.models.fused.formats import Weight
from dflash_local.models.fused.linear import GateUp, JoinedGateUp, JoinedLinear, Linear, embedding_rows, quantise_layer
from dflash_local.models.fused.mlp import MLP, MLPWeights
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weight_tensors import RMSNorm
from dflash_local.models.rope import fill_rotation


@dataclass(frozen=True, slots=True)
class ContextSnapshot:
    """Hold what a block behind ``length`` tokens sees in the rings.

    Attributes:
        rows: keys and values [key heads, positions, head_dim] of those that it sees, layer by layer.
    """

    length: int
    rows: list[tuple[torch.Tensor, ...]]


class DFlashBlocks:
    """A loaded drafter bound to its target; see ``drafters.engines.FusedDrafter``.

    Keeps nothing of ``weights`` but its tensors' places: a matrix that is replaced is free when the caller lets it go.
    Another kind overrides the methods named ``_own``.
    """

    chained = False
    read_weights = staticmethod(partial(read_weights, keeps_codes=True))
    random_weights = staticmethod(random_on_device)
    mixtures = ()

    def __init__(
        self, config: DFlashConfig, weights: DrafterWeights, target: FusedTarget, draft_window: int | None = None
    ) -> None:
        """Bind ``weights`` as they are read, or of ``coded``. ``draft_window``: context rows it looks back on."""
        self.config, self.target = config, target
        self._length, self._first = 0, 0  # context rows that the caches hold: from the second to the first
        self._look_back = layout.look_back(config, target.spec)
        self.window = draft_window or 0
        self._fc, self._context_kv = Linear(weights.fc), Linear(weights.context_kv)
        self._norm, self._hidden_norm = self._of(weights.norm), self._of(weights.hidden_norm)
        self._context_key_norm = weights.context_key_norm.to(target.device)
        self._context_kv_bias = self._there(weights.context_kv_bias)
        buffers = config.buffers(target.vocab_size, target.spec)
        tensors = Tensors((each for each in buffers if each.name != layout.LOGITS), target.device)
        own = layout.shared_buffers(config, target.spec)
        self.cache: Cache = tensors.take(own.caches)
        self._rings = tensors[own.rings.name].copy_(_rings(config, target.spec))
        self._ids = tensors[own.ids.name].fill_(config.mask_token_id)
        self._x, self._normed, self._hidden = tensors.take(own.rows)
        self._feature, self._projected = tensors.take(own.context)
        self._embedding = target.weights.embedding
        self._embedding_scale = target.embedding_scale
        heads, spec = layout.heads_of(config), target.spec
        cos, sin = tensors.take(
            attention_layout.rotation_buffers(layout.OWNER, heads.rotary_dim, spec.drafter_capacity, spec.dtype)
        )
        self._rotation = cos, sin
        fill_rotation(self._rotation, config.rope)
        self._parts: tuple[AttentionWeights | MLPWeights, ...] = ()
        self._own_products = {name: Linear(matrix) for name, matrix in weights.own_matrices.items()}
        self.selector: RowChooser | None = None
        self._bind_own(weights, tensors)
        self._layers = tuple(self._layer(index, layer, tensors) for index, layer in enumerate(weights.layers))
        self._context_heads = HeadLayout(
            num_heads=0,
            num_kv_heads=config.num_layers * heads.num_kv_heads,
            head_dim=heads.head_dim,
            rotary_dim=heads.rotary_dim,
            per_head_norms=True,
        )
        self.stored_head = target.weights.head
        self.use_head(self.stored_head)

    @classmethod
    def bound(
        cls,
        config: DFlashConfig,
        weights: DrafterWeights,
        target: FusedTarget,
        files: Checkpoint,
        draft_window: int | None,
    ) -> DFlashBlocks:
        """See ``drafters.engines.BindableBlocks``."""
        return cls(config, weights, target, draft_window)

    def _bind_own(self, weights: DrafterWeights, tensors: Tensors) -> None:
        """Bind what the kind has beside, before the layers are made; ``tensors``: of all ``buffers``."""

    def _own_layer(self, index: int, layer: DecoderLayer) -> DecoderLayer:
        """Return the layer with what the kind has around its parts."""
        return layer

    def _finish_own(self, drafted: torch.Tensor) -> None:
        """Finish the ``drafts`` that the head gave of hidden rows."""
        self.target.cap_logits(self.drafts)

    def _there(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias.to(self.target.device)

    def _of(self, weight: torch.Tensor) -> RMSNorm:
        return RMSNorm(weight.to(self.target.device), self.config.rms_norm_eps)

    def _layer(self, index: int, weights: DrafterLayerWeights, tensors: Tensors) -> DecoderLayer:
        config, spec, rows = self.config, self.target.spec, self.config.draft_rows
        heads = config.attention(index)
        rows_of_heads = weights.query_key_norm.to(self.target.device)
        norms = (self._of(rows_of_heads[0]), self._of(rows_of_heads[heads.num_heads]))
        loaded = AttentionWeights(
            heads,
            _joined(weights.qkv),
            _joined(weights.output),
            norms,
            config.rms_norm_eps,
            qkv_bias=self._there(weights.qkv_bias),
            output_bias=self._there(weights.output_bias),
        )
        outputs, softmax_stats = tensors.take(layout.partial_buffers(config, spec))
        mask = AttentionMask(config.causal[index], heads.sliding_window or 0, self.window)
        attention = Attention(
            loaded,
            self._of_layer(index),
            self._rotation,
            SplitKV(outputs, softmax_stats),
            tensors.take(attention_layout.block_buffers(layout.OWNER, heads, rows, spec.dtype)),
            self.target.start,
            mask,
        )
        gate_up = JoinedGateUp((GateUp(weights.gate_up),), {})
        (between,) = tensors.take(mlp_layout.block_buffers(layout.OWNER, config.mlp, rows, spec.dtype))
        feed_forward = MLPWeights(config.mlp, gate_up, _joined(weights.down))
        self._parts += (loaded, feed_forward)
        mlp = MLP(feed_forward, between)
        layer = DecoderLayer(attention, mlp, self._of(weights.input_norm), self._of(weights.post_norm))
        return self._own_layer(index, layer)

    def _of_layer(self, index: int) -> Cache:
        """Return keys and values [key heads, rows, head_dim] of a layer, with their scales."""
        heads = self.config.num_kv_heads
        rows = layout.cache_rows(self.config, self.target.spec)
        first, count = heads * sum(rows[:index]), heads * rows[index]
        return tuple(part[first : first + count].view(heads, rows[index], -1) for part in self.cache)

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        spec = self.target.spec
        written = length + spec.drafter_capacity - spec.context  # with the blocks of cycles on their way
        self._length = length
        self._first = max(self._first, written - self._look_back - attention_layout.RING_SLACK)

    def _seen_from(self, length: int) -> int:
        """Return the first position that a block behind so many tokens sees in the rings."""
        return max(0, length - self._look_back)

    def reusable(self, length: int) -> int:
        seen = self._seen_from(length)
        return length if not self._look_back or seen >= self._first else seen

    def snapshot(self) -> ContextSnapshot | None:
        if not self._look_back:
            return None
        end = self._length
        return ContextSnapshot(end, [rows_on_host(each, self._seen_from(end), end) for each in self._ring_caches()])

    def restore(self, point: ContextSnapshot) -> None:
        self._length, self._first = point.length, self._seen_from(point.length)
        for cache, rows in zip(self._ring_caches(), point.rows, strict=True):
            put_rows(cache, rows, point.length)

    @property
    def caches(self) -> list[Cache]:
        rings = layout.ring_layers(self.config, self.target.spec)
        return [self._of_layer(index) for index in range(self.config.num_layers) if index not in rings]

    def _ring_caches(self) -> list[Cache]:
        """Return keys and values of each layer with a ring."""
        return [self._of_layer(index) for index in layout.ring_layers(self.config, self.target.spec)]

    @property
    def matrices(self) -> tuple[Linear | GateUp, ...]:
        of_layers = (product for part in self._parts for product in part.products)
        return (*of_layers, *self._own_products.values(), self._fc, self._context_kv)

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        own = () if self.head is self.target.weights.head else (self.head,)
        return (*self.matrices, *own)

    def quantize(self) -> None:
        for matrix in self.matrices:
            quantise_layer(matrix)

    def use_head(self, head: Linear, head_ids: torch.Tensor | None = None) -> None:
        self.head, self.head_ids = head, head_ids
        buffer = layout.draft_logits(self.config.block_size, head.out_features, self.target.spec.dtype)
        self.drafts = Tensors([buffer], self.target.device)[buffer.name]

    def block(self, max_seq_len: int) -> None:
        self._ids[:1] = self.target.tokens[:1]
        x = self._x
        embedding_rows(self._embedding, self._ids, x)
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        for layer in self._layers:
            # Convolved parts read other rows than the normed ones, whose place is their results'.
            layer.block(x, self._normed, self._normed, max_seq_len)
        self._norm(x, self._hidden)
        drafted = self._hidden[self.config.first_draft :]
        self.head(drafted, self.drafts)
        self._finish_own(drafted)

    def block_bytes(self, context: int) -> int:
        config = self.config
        matrices = sum(product.weight.nbytes for product in (*self.matrices[:-2], self.head))
        row = sum(part[: config.num_kv_heads].nbytes for part in self.cache)
        return matrices + row * sum(min(context, window or context) + config.draft_rows for window in config.windows)

    def inject_bytes(self) -> int:
        return sum(product.weight.nbytes for product in (self._fc, self._context_kv))

    def inject(self, taps: torch.Tensor) -> None:
        rows = len(taps)
        feature = self._fc(taps, self._feature[:rows])
        self._hidden_norm(feature, feature)
        self._write_cache(self._context_kv(feature, self._projected[:rows]), self.target.start)

    def write_context(self, taps: torch.Tensor, ids: torch.Tensor, start: int) -> None:
        self._first = min(self._first, start)
        feature = self._fc.prefill(taps)
        self._hidden_norm(feature, feature)
        projected, rows = self._context_kv.prefill(feature), len(taps)
        step = min(rows, attention_layout.RING_SLACK) if self._look_back else rows  # no row of a ring is written twice
        for low in range(0, rows, step):
            at = torch.tensor([start + low], dtype=torch.int32, device=taps.device)
            self._write_cache(projected[low : low + step], at)
        self.length = start + rows

    def _write_cache(self, projected: torch.Tensor, start: torch.Tensor) -> None:
        """Write keys and values of all layers with their biases, normed and rotated, to cache rows ``start ..``."""
        # All layers' caches lie one behind the other, so their heads are treated like those of one layer.
        norms = (self._hidden_norm.weight, self._context_key_norm)  # there are no queries: the first is not read
        eps, heads, bias = self.config.rms_norm_eps, self._context_heads, self._context_kv_bias
        qk_norm_rope_cache(
            projected, norms, eps, self._rotation, start, projected, self.cache, heads, bias, self._rings
        )


def _rings(config: DFlashConfig, spec: EngineSpec) -> torch.Tensor:
    """Return the first row and the number of rows of each key head of all layers, [layers x heads, 2] int64."""
    rows = torch.tensor(layout.cache_rows(config, spec)).repeat_interleave(config.num_kv_heads)
    return torch.stack((rows.cumsum(0) - rows, rows), 1)


def _joined(weight: Weight) -> JoinedLinear:
    return JoinedLinear((Linear(weight),), {})


BLOCKS = DFlashBlocks
