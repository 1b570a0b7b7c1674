"""A target over static buffers: a block of rows is a fixed list of launches, with its position on the device.

Has the methods of ``models.transformers_target`` as well, so that the reference runner can drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from dflash_local.config.features import ModelConfig
from dflash_local.kernels.allocate import Tensors, dtype_name
from dflash_local.kernels.decode_attention import MOST_SPLIT_EVENLY
from dflash_local.kernels.delta_step import CycleState
from dflash_local.layout import attention as attention_layout
from dflash_local.layout import target as layout
from dflash_local.layout.cycle import prompt_chunk
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.load_config import Offloaded
from dflash_local.models.fused.attention import Attention
from dflash_local.models.fused.decoder_layer import OnResidual
from dflash_local.models.fused.layer_stack import FrontStack, LayerStack, Taps, tap_columns
from dflash_local.models.fused.linear import embedding_rows
from dflash_local.models.fused.moe import MoE
from dflash_local.models.fused.part import RecurrentMixer, RunState, UsedRows
from dflash_local.models.fused.weights import TargetWeights
from dflash_local.models.transformers_target import Forward, TargetSnapshot

FIRST_BUCKET = 2048  # tokens; each next one is twice as long


def run_eagerly(_key: Hashable, launches: Callable[[], None]) -> None:
    """Run launches as they are."""
    launches()


class FusedTarget:
    """A loaded target with room for ``context`` tokens and one block behind them. Batch 1.

    In exact mode every block, also of one row, is computed as ``rows`` rows over the same splits of the cache, so
    that a row's bits do not depend on how many rows its block has. The caches may be of a coarser
    dtype than the rest (int8 codes): plain and drafted decoding read the same caches.

    Attributes:
        start: [1] int32 on the device: committed tokens. kept: [1], of these, rows of the last block that the
            recurrent layers have not committed yet. cycle: [1], blocks so far. tokens: [rows] int64, the block's ids.
        embedding_scale: of embedding rows as the layers take them, rounded as the published models do.
        states: the recurrent layers by their index. rings: attentions whose caches do not hold every position.
        caches: keys and values [key heads, capacity, head_dim], perhaps with scales, of those that do.
        written: no position at or behind it has been written to the caches.
        distinct_experts: [mixtures, launches] int32, see ``distinct_of``; None where there are none.
        hidden: [rows, H] after the final norm. tapped: [rows, taps x H]. logits: [rows, V].
        on_residual: called with the residual stream [M, H], which the next part writes over, behind the embedding and
            behind each part of each layer; None for nobody, as in blocks that are recorded.
        run: what its layers share, with all of its tensors; a layer that runs between its blocks may share it.
        run_recorded: runs the launches of ``verify`` by their key; a runner lends its graphs.
    """

    def __init__(
        self,
        weights: TargetWeights,
        model: ModelConfig,
        taps: Sequence[int],
        context: int,
        block_size: int,
        *,
        exact: bool = False,
        kv_cache: str = "auto",
        offloaded: tuple[Offloaded, ...] = (),
        prefill_chunk: int | None = None,
    ) -> None:
        """Allocate it. ``taps``: layers to read. ``kv_cache``, ``prefill_chunk``: as ``LoadConfig`` has them.
        ``offloaded``: on the host.
        """
        self.weights, self.config = weights, model
        self.taps = tuple(taps)
        self.device, self.dtype = weights.device, weights.embedding.dtype
        self.embedding_scale = float(torch.tensor(model.embedding_scale, dtype=self.dtype))
        self.spec = EngineSpec(
            dtype_name(self.dtype),
            context,
            block_size,
            len(self.taps),
            kv_cache,
            exact,
            offloaded=offloaded,
            prefill_chunk=prefill_chunk,
        )
        self.rows, self.capacity, self.exact = self.spec.rows, self.spec.capacity, exact
        self.hidden_size, self.vocab_size = model.hidden_size, weights.head.out_features
        self.is_recurrent = model.recurrent
        self.prefill_chunk = prompt_chunk(model, context, prefill_chunk)
        front = weights.front
        tensors = Tensors(layout.run_buffers(model, self.vocab_size, self.spec, front), self.device, joined=True)
        buffers = layout.shared_buffers(model, self.vocab_size, self.spec)
        shared = {name: tensors[buffer.name] for name, buffer in buffers.items()}
        self.start, self.kept, self.cycle = shared["counters"].split(1)
        self.tokens, self.logits, self.hidden, self.tapped = (shared[x] for x in ("tokens", "logits", "hidden", "taps"))
        self._x = shared["x"]
        self._used = UsedRows()
        cycle = CycleState(self.cycle, self.kept)
        self.run = RunState(layout.OWNER, tensors, self.spec, self.start, cycle, self._used)
        self.distinct_experts = distinct = shared.get("distinct_experts")
        self._front = (
            FrontStack(weights.layers[:front], model, taps, self.spec, self._used, shared["counters"], distinct)
            if front
            else None
        )
        ahead = () if self._front is None else self._front.layers
        behind = None if distinct is None else distinct[sum(isinstance(layer.mlp, MoE) for layer in ahead) :]
        self._stack = LayerStack(weights.layers[front:], model, front, self.run, behind)
        self.layers = (*ahead, *self._stack.layers)
        self.states: dict[int, RecurrentMixer] = {
            index: layer.mixer for index, layer in enumerate(self.layers) if isinstance(layer.mixer, RecurrentMixer)
        }
        mixers = [layer.mixer for layer in self.layers]
        caches = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        self.rings = tuple(each for each in caches if each.is_ring)
        self.caches = tuple(each.cache for each in caches if not each.is_ring)
        self.use_taps(taps)
        self.length = 0  # the host's view of ``start``, where it knows
        self.written = 0
        self.on_residual: OnResidual | None = None
        self.run_recorded: Callable[[Hashable, Callable[[], None]], None] = run_eagerly

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def use_taps(self, taps: Sequence[int]) -> None:
        """Give the outputs of these layers, as many as there were, of prompts; blocks that are recorded keep theirs."""
        self.taps = tuple(taps)

    @property
    def mixtures(self) -> list[MoE]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)]

    def distinct_of(self, rows: int, counts: Sequence[Sequence[int]] | None = None) -> list[int]:
        """Count different routed experts that a block's rows took in each mixture; what several launches of a layer
        read counts once for each.

        Args:
            rows: of the block, the last one if no counts are given. counts: ``distinct_experts`` behind it, on the
                host; without them the host waits for the device's.
        """
        if counts is None:
            counts = [] if self.distinct_experts is None else self.distinct_experts.tolist()
        return [sum(each[: part.launches(rows)]) for part, each in zip(self.mixtures, counts, strict=True)]

    def block(self, rows: int, max_seq_len: int, with_taps: bool) -> None:
        """Run ``tokens[:rows]`` at ``start ..``: fills ``hidden``, ``tapped`` and ``logits``, and the cache rows.

        A fixed list of launches: nothing of it depends on what the device holds.

        Args:
            max_seq_len: no token of the block stands at or behind this position.
        """
        self.begin(rows, max_seq_len)
        self.finish(rows, max_seq_len, with_taps)

    def begin(self, rows: int, max_seq_len: int) -> None:
        """Run the first part of ``block``; ``finish`` may then take the first of these rows alone."""
        with self._rows(rows) as x:
            embedding_rows(self.weights.embedding, self.tokens[: len(x)], x)
            self._scale_embedding(x)
            if self.on_residual is not None:
                self.on_residual(x)
            if self._front is None:
                self._stack.begin(x, max_seq_len, self.on_residual)

    def finish(self, rows: int, max_seq_len: int, with_taps: bool) -> None:
        """Run what ``begin`` left."""
        with self._rows(rows) as x:
            taps = self._columns(self.tapped[: len(x)]) if with_taps else {}
            if self._front is not None:
                self._front.block(x, taps, max_seq_len, self.on_residual)
                self._stack.begin(x, max_seq_len, self.on_residual)
            self._stack.finish(x, taps, max_seq_len, self.on_residual)
            self.weights.norm(x, self.hidden[: len(x)])
            self.cap_logits(self.weights.head(self.hidden[: len(x)], self.logits[: len(x)]))

    @contextmanager
    def _rows(self, used: int) -> Iterator[torch.Tensor]:
        """Yield the residual stream of a block of so many rows: in exact mode that of all, of which these are used."""
        self._used.count = used
        yield self._x[: self.rows if self.exact else used]
        self._used.count = 0

    def _scale_embedding(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.embedding_scale == 1.0 else x.mul_(self.embedding_scale)

    def cap_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] after the model's soft cap, in place."""
        cap = self.config.final_logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _columns(self, taps: torch.Tensor) -> Taps:
        return tap_columns(taps, self.taps, self.hidden_size)

    def prefill(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run committed tokens [M], as many as there are: they are part of the text from now on."""
        rows = len(ids)
        self._commit_pending()
        x = self.embed(ids)
        if self.on_residual is not None:
            self.on_residual(x)
        normed = torch.empty_like(x)
        taps = x.new_empty(rows, len(self.taps) * self.hidden_size) if with_taps else None
        columns = {} if taps is None else self._columns(taps)
        if self._front is not None:
            self._front.prefill(x, columns, self.on_residual)
        self._stack.prefill(x, normed, columns, self.on_residual)
        self.set_length(self.length + rows)
        return Forward(self.weights.norm(x, normed), taps)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embedding rows [M, H] as the first layer sees them."""
        return self._scale_embedding(self.stored_rows(ids))

    def stored_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embedding rows [M, H] without the scale that some families give them, decoded where they are codes."""
        out = torch.empty(len(ids), self.hidden_size, dtype=self.dtype, device=self.device)
        return embedding_rows(self.weights.embedding, ids, out)

    @property
    def tables(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return embedding and head as they are stored; None of one in codes."""
        stored = (self.weights.embedding, self.weights.head.weight)
        embedding, head = (each if isinstance(each, torch.Tensor) else None for each in stored)
        return embedding, head

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of hidden rows [M, H]; where a block holds them, those of a block."""
        rows = len(hidden)
        if rows > self.rows:
            return self.cap_logits(self.weights.head.prefill(hidden))
        self.hidden[:rows] = hidden
        held = self.rows if self.exact else rows
        return self.cap_logits(self.weights.head(self.hidden[:held], self.logits[:held]))[:rows].clone()

    def bucket(self, max_seq_len: int) -> int:
        """Return the bound that a block's launches have for ``max_seq_len``; attention splits the keys by it."""
        bucket = FIRST_BUCKET  # by doubling, so that a long reply records few graphs
        while bucket < max_seq_len:
            bucket *= 2
        if bucket >= MOST_SPLIT_EVENLY and not self.exact:  # a longer text's launches are the same
            return self.capacity
        return min(bucket, self.capacity)

    @property
    def buckets(self) -> list[int]:
        """Return all that ``bucket`` returns, the shortest first."""
        found = [self.bucket(1)]
        while found[-1] < self.capacity:
            found.append(self.bucket(found[-1] + 1))
        return found

    def verify(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run a block [M] without committing it; ``commit`` keeps a prefix of it. Copies of the static buffers."""
        rows = len(ids)
        self.tokens[:rows] = ids
        bound = self.bucket(self.length + 2 * self.rows)
        run = self.run_recorded if self.on_residual is None else run_eagerly
        run(("verify", rows, bound, with_taps), lambda: self.block(rows, bound, with_taps))
        self.kept.zero_()  # what there was is committed; this block's rows count when they are committed
        with self.entered():
            for state in self.states.values():
                state.rollback()
        return Forward(self.hidden[:rows].clone(), self.tapped[:rows].clone() if with_taps else None)

    def commit(self, rows: int) -> None:
        self.kept.fill_(rows)
        self.cycle.add_(1)
        self.set_length(self.length + rows)

    def truncate(self, length: int) -> None:
        """Forget committed tokens after ``length``. A recurrent target restores a snapshot instead."""
        if (self.is_recurrent and length != self.length) or not self.holds(length):
            raise RuntimeError("a recurrent state, or a ring that was written over, cannot be truncated")
        self.set_length(min(length, self.length))

    def holds(self, length: int) -> bool:
        """Return whether rings still have what a block behind so many tokens sees."""
        return all(max(0, length - ring.window) >= self.written - ring.cache[0].shape[1] for ring in self.rings)

    def set_length(self, length: int) -> None:
        """Tell the host what the device has committed, or cut it back to that; the caller knows that it can be."""
        self.length, self.written = length, max(self.written, length + 2 * self.rows)
        self.start.fill_(length)

    def keep(self, rows: int) -> None:
        """Commit so many rows of the last block instead; nothing may have been run since."""
        self.kept.fill_(rows)

    def snapshot(self) -> TargetSnapshot:
        self._commit_pending()
        with self.entered():
            states = tuple(state.snapshot() for state in self.states.values())
            return TargetSnapshot(self.length, states, tuple(ring.snapshot(self.length) for ring in self.rings))

    def restore(self, point: TargetSnapshot) -> None:
        with self.entered():
            for state, copy in zip(self.states.values(), point.recurrent, strict=True):
                state.restore(copy)
            for ring, rows in zip(self.rings, point.rings, strict=True):
                ring.restore(rows, point.length)
        self.kept.zero_()
        # As if all but what is restored had been written over.
        self.written = point.length + attention_layout.RING_SLACK
        self.set_length(point.length)

    def clear(self) -> None:
        with self.entered():
            for state in self.states.values():
                state.clear()
        self.kept.zero_()
        self.written = 0
        self.set_length(0)

    def _commit_pending(self) -> None:
        """Bring the recurrent states up to ``start``."""
        rows = int(self.kept) if self.states else 0
        with self.entered():
            for state in self.states.values():
                state.commit(rows)
        self.kept.zero_()

    def entered(self) -> AbstractContextManager[None]:
        """Have what is launched within on what layers keep come behind all before it, and before all behind it; also
        where the first ones are on another GPU.
        """
        return nullcontext() if self._front is None else self._front.entered()
