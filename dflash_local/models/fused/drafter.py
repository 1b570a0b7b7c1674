"""The drafter over static buffers: context rows and a block of drafts as fixed lists of launches.

Borrows the target's embedding, position and head, unless it is given tables of its own. Drafts are only proposed, so
its matrices and its head may be coarser than the checkpoint's.
"""

from __future__ import annotations

import torch

from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.candidate_walk import CandidateWalk
from dflash_local.kernels.choose import RowChooser
from dflash_local.kernels.decode_attention import AttentionMask, SplitKV
from dflash_local.kernels.markov_walk import MarkovWalk
from dflash_local.kernels.qk_norm_rope_cache import HeadLayout, qk_norm_rope_cache
from dflash_local.layout import attention as attention_layout
from dflash_local.layout import drafter as layout
from dflash_local.layout import mlp as mlp_layout
from dflash_local.models.drafter_weights import ConvolutionWeights, DrafterWeights, LayerWeights, with_matrices
from dflash_local.models.dspark import BORROWED, Tables
from dflash_local.models.fused.attention import Attention, AttentionWeights
from dflash_local.models.fused.convolution import Convolution
from dflash_local.models.fused.decoder_layer import DecoderLayer
from dflash_local.models.fused.embedding import embedding_rows
from dflash_local.models.fused.formats import Weight
from dflash_local.models.fused.linear import GateUp, JoinedGateUp, JoinedLinear, Linear, in_eight_bits, quantise_layer
from dflash_local.models.fused.mlp import MLP, MLPWeights
from dflash_local.models.fused.norm import RMSNorm
from dflash_local.models.fused.target import FusedTarget, fill_rotation


class FusedDrafter:
    """A loaded drafter bound to its target.

    Keeps nothing of ``weights`` but its tensors' places: a matrix that is replaced is free when the caller lets it go.

    Attributes:
        drafts: [block - 1, out_features of the head] logits of the drafted positions.
        selector: chooses a DFlash 2 or a DSpark drafter's ids; None: each row's logits alone decide.
        stored_head: the drafter's own where it has one, else the target's.
        head: gives the logits; ``stored_head`` unless ``use_head`` brought another.
        length: committed context rows, as the host knows.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: DrafterWeights,
        target: FusedTarget,
        draft_window: int | None = None,
        tables: Tables = BORROWED,
    ) -> None:
        """``weights``: as they are read, or of ``coded``. ``draft_window``: context rows it looks back on."""
        self.config, self.target = config, target
        self.length = 0
        self.window = draft_window or 0
        self._fc, self._context_kv = Linear(weights.fc), Linear(weights.context_kv)
        self._norm, self._hidden_norm = self._of(weights.norm), self._of(weights.hidden_norm)
        self._context_key_norm = weights.context_key_norm.to(target.device)
        self._context_kv_bias = self._there(weights.context_kv_bias)
        buffers = layout.run_buffers(config, target.vocab_size, target.spec)
        tensors = Tensors((each for each in buffers if each.name != layout.LOGITS), target.device)
        own = layout.shared_buffers(config, target.spec)
        self.keys, self.values = tensors.take(own.caches)
        self._ids = tensors[own.ids.name].fill_(config.mask_token_id)
        self._x, self._normed, self._hidden = tensors.take(own.rows)
        self._feature, self._projected = tensors.take(own.context)
        self._embedding = target.weights.embedding if tables.embedding is None else tables.embedding
        self._embedding_scale = target.embedding_scale if config.dspark is None else 1.0
        self._kernels: torch.Tensor | None = None  # room of a DFlash 2 drafter
        heads, spec = layout.heads_of(config), target.spec
        cos, sin = tensors.take(
            attention_layout.rotation_buffers(layout.OWNER, heads.rotary_dim, spec.drafter_capacity, spec.dtype)
        )
        self._rotation = cos, sin
        fill_rotation(self._rotation, config.rope)
        self._parts: tuple[AttentionWeights | MLPWeights, ...] = ()
        self._projections: tuple[Linear, ...] = ()  # of its convolutions, and of its selector
        self._contribution: tuple[Linear, torch.Tensor] | None = None  # of rows to the choice, and its room
        self.selector: RowChooser | None = None
        if weights.markov is not None:
            room = tensors.take(layout.markov_buffers(config, target.vocab_size))
            self.selector = MarkovWalk(weights.markov, target.tokens[:1], room)
        second = layout.dflash2_run_buffers(config, target.vocab_size, target.spec.dtype)
        if second is not None and config.dflash2 is not None and weights.selector is not None:
            self._embedding_scale = config.dflash2.embedding_scale
            self._kernels = tensors[second.kernels.name]
            self._contribution = Linear(weights.selector.projection), tensors[second.projected.name]
            self._projections = self._contribution[:1]
            self.selector = CandidateWalk(
                config.dflash2.selector,
                weights.selector.codebooks,
                self._contribution[1],
                target.tokens[:1],
                tensors.take(second.candidates),
            )
        self._layers = tuple(self._layer(index, layer, tensors) for index, layer in enumerate(weights.layers))
        self._context_heads = HeadLayout(
            num_heads=0,
            num_kv_heads=config.num_layers * heads.num_kv_heads,
            head_dim=heads.head_dim,
            rotary_dim=heads.rotary_dim,
            per_head_norms=True,
        )
        head = tables.head
        self.stored_head = target.weights.head if head is None else Linear(head[: target.vocab_size])
        self.use_head(self.stored_head)

    def _there(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias.to(self.target.device)

    def _of(self, weight: torch.Tensor) -> RMSNorm:
        return RMSNorm(weight.to(self.target.device), self.config.rms_norm_eps)

    def _layer(self, index: int, weights: LayerWeights, tensors: Tensors) -> DecoderLayer:
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
            (self.keys[index], self.values[index]),
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
        return DecoderLayer(
            attention,
            mlp,
            self._of(weights.input_norm),
            self._of(weights.post_norm),
            mixer_conv=self._convolution(weights.attention_conv),
            mlp_conv=self._convolution(weights.mlp_conv),
        )

    def _convolution(self, weights: ConvolutionWeights | None) -> Convolution | None:
        second = self.config.dflash2
        if second is None or weights is None or self._kernels is None:
            return None
        projection = Linear(weights.projection)
        self._projections += (projection,)
        # The rows behind the last norm are not there yet while the layers run: they are the room.
        return Convolution(second.convolution, weights.base, projection, self._kernels, self._hidden)

    @property
    def matrices(self) -> tuple[Linear | GateUp, ...]:
        """All matrices of the drafter's own."""
        of_layers = (product for part in self._parts for product in part.products)
        return (*of_layers, *self._projections, self._fc, self._context_kv)

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        """The matrices, and the head when it is not the target's."""
        own = () if self.head is self.target.weights.head else (self.head,)
        return (*self.matrices, *own)

    def quantize(self) -> None:
        """Replace the matrices by their codes, one after the other. Nothing may have been recorded yet."""
        for matrix in self.matrices:
            quantise_layer(matrix)

    def use_head(self, head: Linear) -> None:
        """Draft ids below a head's out_features by that head [<= V, H]. Nothing may have been recorded yet."""
        self.head = head
        buffer = layout.draft_logits(self.config.block_size, head.out_features, self.target.spec.dtype)
        self.drafts = Tensors([buffer], self.target.device)[buffer.name]

    def block(self, max_seq_len: int) -> None:
        """Draft behind the target's ``tokens[0]``: fills ``drafts``. The block always has its trained size."""
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
        if self._contribution is not None:
            projection, room = self._contribution
            projection(drafted, room)
        elif self.config.dspark is None:
            self.target.cap_logits(self.drafts)

    def inject(self, rows: int) -> None:
        """Context rows of the target's last block at its ``start``; those that are not committed are written again."""
        feature = self._fc(self.target.tapped[:rows], self._feature[:rows])
        self._hidden_norm(feature, feature)
        self._write_cache(self._context_kv(feature, self._projected[:rows]), self.target.start)

    def write_context(self, taps: torch.Tensor, start: int) -> None:
        """Context rows of committed tokens at positions ``start ..``, as many as there are; taps [M, taps x H]."""
        feature = self._fc.prefill(taps)
        self._hidden_norm(feature, feature)
        at = torch.tensor([start], dtype=torch.int32, device=taps.device)
        self._write_cache(self._context_kv.prefill(feature), at)
        self.length = start + len(taps)

    def _write_cache(self, projected: torch.Tensor, start: torch.Tensor) -> None:
        """Keys and values of all layers with their biases, normed and rotated, into the cache rows ``start ..``."""
        # All layers' caches lie one behind the other, so their heads are treated like those of one layer.
        cache = (self.keys.flatten(0, 1), self.values.flatten(0, 1))
        norms = (self._hidden_norm.weight, self._context_key_norm)  # there are no queries: the first is not read
        eps, heads, bias = self.config.rms_norm_eps, self._context_heads, self._context_kv_bias
        qk_norm_rope_cache(projected, norms, eps, self._rotation, start, projected, cache, heads, bias)


def coded(weights: DrafterWeights) -> DrafterWeights:
    """The same drafter with its matrices in eight bits, beside what it is made of; those in codes stay."""
    return with_matrices(weights, in_eight_bits)


def _joined(weight: Weight) -> JoinedLinear:
    return JoinedLinear((Linear(weight),), {})
