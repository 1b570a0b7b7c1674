"""A target's layer for multi-token prediction over static buffers: context rows as a fixed list of launches, and a
chain of drafts, each chosen before the next one is made.

Runs between the target's blocks, in the room that these have for a layer's rows; its keys and values are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch

from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.drafters.dflash.layout import LOGITS, OWNER, draft_logits
from dflash_local.drafters.mtp import layout
from dflash_local.drafters.mtp.layout import LAYER, MTPConfig
from dflash_local.kernels.allocate import Tensors, dtype_name, on_host
from dflash_local.kernels.choose import GREEDY, Chooser, Choosing, RowChooser
from dflash_local.layout.linear import FormatOf, unquantized
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fill_places import fill_places
from dflash_local.models.fused.attention import Attention
from dflash_local.models.fused.layer_stack import bound_layer
from dflash_local.models.fused.linear import GateUp, JoinedLinear, Linear, embedding_rows, quantise_layer
from dflash_local.models.fused.moe import MoEWeights
from dflash_local.models.fused.part import UsedRows
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weight_tensors import RMSNorm, WeightTensors
from dflash_local.models.fused.weights import LayerWeights, layer_weights
from dflash_local.models.place import Places
from dflash_local.models.stored_formats import formats_in


@dataclass(frozen=True, slots=True)
class MTPWeights:
    """The loaded weights. ``norm``: behind the layer. ``places``: where each tensor of the checkpoint is read to."""

    fc: JoinedLinear
    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    norm: RMSNorm
    layer: LayerWeights
    places: Places

    @classmethod
    def allocate(
        cls,
        config: MTPConfig,
        device: torch.device,
        dtype: torch.dtype,
        format_of: FormatOf = unquantized,
        stored: Mapping[str, TensorInfo] | None = None,
    ) -> MTPWeights:
        """Return uninitialised weights. ``stored``: the checkpoint's tensors by name."""
        kind = dtype_name(dtype)
        spec = layout.weight_spec(config, kind, format_of)
        tensors = Tensors(config.weights(spec.hidden_size, kind, format_of), device)
        source = WeightTensors(tensors, spec, config.model.norm_eps, stored or {})
        fc, norms = JoinedLinear.of(layout.joining(config), source), layout.norms(spec)
        places: Places = {**fc.places, **{each.name: tensors[each.name] for each in norms.values()}}
        norm, embedding, hidden = (source.norm(norms[name]) for name in layout.NORMS)
        return cls(fc, embedding, hidden, norm, layer_weights(LAYER, config.layer, source, places), places)

    @property
    def mixtures(self) -> tuple[MoEWeights, ...]:
        return (self.layer.mlp,) if isinstance(self.layer.mlp, MoEWeights) else ()

    @property
    def matrices(self) -> tuple[Linear | GateUp, ...]:
        """Return all but a mixture's router and routed experts."""
        feed = self.layer.mlp
        of_feed = feed.products if not isinstance(feed, MoEWeights) else feed.shared.products if feed.shared else ()
        return (*self.fc.products, *self.layer.mixer.products, *of_feed)

    def coded(self) -> MTPWeights:
        """Give the matrices in eight bits, one after the other; those in codes stay."""
        for matrix in self.matrices:
            quantise_layer(matrix)
        return self

    def randomize(self, generator: torch.Generator) -> None:
        self.fc.randomize(generator)
        self.layer.randomize(generator)
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            norm.reset()

    def finish(self) -> MTPWeights:
        """Turn what is stored to what is used, once all places are filled."""
        self.fc.finish()
        self.layer.finish()
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            norm.finish()
        for places in (self.places, self.fc.places):
            places.clear()
        self.layer.mixer.forget_places()
        self.layer.mlp.forget_places()
        return self


def read_weights(
    checkpoint: Checkpoint,
    config: MTPConfig,
    device: torch.device,
    dtype: torch.dtype,
    _on_notice: Callable[[str], None],
) -> MTPWeights:
    """See ``drafters.engines.BindableBlocks``; read as the target's tensors, which nothing is suspicious of."""
    formats = formats_in(checkpoint, config.quantization)
    weights = MTPWeights.allocate(config, device, dtype, formats, checkpoint.tensors)
    fill_places(checkpoint, checkpoint.tensors, weights.places)
    return weights.finish()


def random_weights(config: MTPConfig, _target_hidden: int, device: torch.device, dtype: torch.dtype) -> MTPWeights:
    """See ``drafters.engines.BindableBlocks``."""
    weights = MTPWeights.allocate(config, device, dtype, config.formats)
    weights.randomize(torch.Generator(device).manual_seed(0))
    return weights.finish()


@dataclass(frozen=True, slots=True)
class HiddenSnapshot:
    """Hold the hidden state [1, H] of the last one of ``length`` tokens, on the host."""

    length: int
    hidden: torch.Tensor


class MTPBlocks(RowChooser):
    """A loaded layer bound to its target; see ``drafters.engines.FusedDrafter``. Chooses its drafts itself.

    A position's row joins its hidden state and the id behind it. So of ``length`` committed tokens all rows but the
    last one are in the cache, and that one's hidden state is kept: the first draft's row is run with it, whatever id
    has come to stand behind. Hidden states of a few blocks are kept, so that a text can be cut back a little; where it
    is cut back further its last token is run again.
    """

    chained = True
    read_weights = staticmethod(read_weights)
    random_weights = staticmethod(random_weights)

    def __init__(self, config: MTPConfig, weights: MTPWeights, target: FusedTarget) -> None:
        """Bind ``weights`` as they are read, or of ``coded``."""
        self.config, self.target, self._weights = config, target, weights
        self._length, self._first = 0, 0  # hidden states are kept from the second to the first
        buffers = config.buffers(target.vocab_size, target.spec)
        tensors = target.run.tensors.beside(each for each in buffers if each.name != LOGITS)
        own = layout.own_buffers(config, target.vocab_size, target.spec)
        self._x, self._normed, self._joined = tensors.take(own.rows)
        self._last, self._kept, self._at, self._steps = tensors.take((own.last, own.kept, own.at, own.steps))
        torch.arange(len(self._steps), out=self._steps)
        self._chooser = Chooser(tensors.take(own.choice), not_finite_id=0)
        run = replace(target.run, tensors=tensors, start=self._at, used=UsedRows())
        self._layer = bound_layer(OWNER, weights.layer, run)
        self._max_seq_len = target.capacity
        self.stored_head = target.weights.head
        self.use_head(self.stored_head)

    @classmethod
    def bound(
        cls,
        config: MTPConfig,
        weights: MTPWeights,
        target: FusedTarget,
        _files: Checkpoint,
        _draft_window: int | None,
    ) -> MTPBlocks:
        """See ``drafters.engines.BindableBlocks``; what it leaves out is said by ``MTPConfig.notices``."""
        return cls(config, weights, target)

    @property
    def selector(self) -> RowChooser:
        return self

    @property
    def matrices(self) -> tuple[Linear | GateUp, ...]:
        return self._weights.matrices

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        routers = (product for mixture in self.mixtures for product in mixture.router.products)
        own = () if self.head is self.target.weights.head else (self.head,)
        return (*self.matrices, *routers, *own)

    @property
    def mixtures(self) -> tuple[MoEWeights, ...]:
        return self._weights.mixtures

    def quantize(self) -> None:
        self._weights.coded()

    def use_head(self, head: Linear, head_ids: torch.Tensor | None = None) -> None:
        self.head, self.head_ids = head, head_ids
        buffer = draft_logits(self.config.block_size, head.out_features, self.target.spec.dtype)
        self.drafts = Tensors([buffer], self.target.device)[buffer.name]

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = length
        self._first = max(self._first, length - layout.GONE_BACK * self.target.rows)

    def reusable(self, length: int) -> int:
        return length if length > self._first else max(length - 1, 0)

    @property
    def caches(self) -> list[tuple[torch.Tensor, ...]]:
        return [self._attention.cache]

    def snapshot(self) -> HiddenSnapshot:
        return HiddenSnapshot(self._length, on_host(self._kept_at(self._length - 1)))

    def restore(self, point: HiddenSnapshot) -> None:
        self._length, self._first = point.length, point.length - 1
        self._kept_at(point.length - 1).copy_(point.hidden)

    def block(self, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self._begin()
        torch.index_select(self._kept, 0, self._rows(-1, 1), out=self._last)
        self._draft(self.target.tokens[:1], self.drafts[:1])

    def choose(self, logits: torch.Tensor, out: torch.Tensor, how: Choosing = GREEDY) -> None:
        """Choose an id for each row of ``drafts``, and make the next row with it."""
        for row in range(len(out)):
            here = slice(row, row + 1)
            if row:
                self._draft(out[row - 1 : row], logits[here])
            noise = None if how.noise is None else (*how.noise[:2], self._at)
            margins = None if how.margins is None else how.margins[here]
            self._chooser.choose(logits[here], out[here], Choosing(noise, margins, how.head_ids))

    def _draft(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Run the row that joins ``last`` with an id [1], which takes its place; gives its logits [1, V]."""
        x = self._join(ids, self._last)
        self._layer.block(x, self._normed[:1], None, self._max_seq_len)
        self._weights.norm(x, self._last)
        self.target.cap_logits(self.head(self._last, logits))
        self._at.add_(1)

    def inject(self, taps: torch.Tensor) -> None:
        """Write the rows that end with the one before the last: each has its id behind it in ``tokens``."""
        rows, normed = len(taps), self._normed[: len(taps)]
        self._kept.index_copy_(0, self._rows(0, rows), self._hidden(taps, normed))
        before = torch.index_select(self._kept, 0, self._rows(-1, rows), out=normed)
        x = self._join(self.target.tokens[:rows], before)
        self._begin()
        self._attention.keep(self._layer.mixer_input(x, normed))

    def write_context(self, taps: torch.Tensor, ids: torch.Tensor, start: int) -> None:
        rows, size = taps.shape
        hidden = taps.new_empty(rows + 1, size)  # from the position before ``start`` on
        hidden[:1] = self._kept_at(start - 1)
        hidden[1:] = self._hidden(taps, hidden[1:])
        end, held = start + rows, min(rows, len(self._kept))
        self._kept[torch.arange(end - held, end, device=taps.device) % len(self._kept)] = hidden[-held:]
        # Nothing stands before the first position; and where a token is run again the one before has its row.
        first = int(start <= self._first)
        if rows > first:
            self._at.fill_(start - 1 + first)
            self._attention.keep_prefill(self._attention_input(ids[first:], hidden[first:-1]))
        self._first = min(self._first, start)
        self.length = end

    def _attention_input(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a prompt's rows [M, H] give the layer's attention; ``hidden`` [M, H] is written over."""
        weights, size = self._weights, self.target.hidden_size
        joined = hidden.new_empty(len(ids), 2 * size)
        joined[:, size:] = weights.hidden_norm(hidden, hidden)
        joined[:, :size] = weights.embedding_norm(embeddings := self.target.embed(ids), embeddings)
        del embeddings  # a prompt's chunk is large
        x = weights.fc.prefill(joined)
        return self._layer.mixer_input(x, x)

    def _join(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the layer takes [M, H] of a few ids [M] and the hidden states [M, H] before them, which may lie
        in ``normed``.
        """
        rows, weights = len(ids), self._weights
        x, normed, joined = self._x[:rows], self._normed[:rows], self._joined[:rows]
        embedding_rows(self.target.weights.embedding, ids, x)
        torch.cat((weights.embedding_norm(x, x), weights.hidden_norm(hidden, normed)), -1, out=joined)
        return weights.fc(joined, x)

    def _hidden(self, taps: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return hidden states [M, H] as the layer takes them, perhaps in ``out``."""
        return self.target.weights.norm(taps, out) if self.config.normed else taps

    def _begin(self) -> None:
        """Go to the last committed token's position, for the rows that come next."""
        torch.sub(self.target.start, 1, out=self._at).clamp_(min=0)  # while it is measured there is none

    def _rows(self, first: int, count: int) -> torch.Tensor:
        """Return the rows [count] of hidden states from the target's ``start`` + ``first`` on."""
        return (self._steps[:count] + self.target.start + first) % len(self._kept)

    def _kept_at(self, position: int) -> torch.Tensor:
        row = position % len(self._kept)
        return self._kept[row : row + 1]

    @property
    def _attention(self) -> Attention:
        return cast(Attention, self._layer.mixer)

    def block_bytes(self, context: int) -> int:
        """Sum what all drafts read; experts that follow from the text as many as a row takes."""
        read = sum(product.weight.nbytes for product in (*self._weights.layer.products, *self._weights.fc.products))
        for mixture in self.mixtures:
            of_all = mixture.experts.gate_up.weight.nbytes + mixture.experts.down.weight.nbytes
            read += mixture.slots * of_all // mixture.experts.gate_up.experts
        return self.config.passes * (read + self.head.weight.nbytes + self._attention.state_bytes(context))

    def inject_bytes(self) -> int:
        products = (*self._weights.fc.products, *self._attention.weights.qkv.products)
        return sum(product.weight.nbytes for product in products)


BLOCKS = MTPBlocks
