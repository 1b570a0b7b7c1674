"""Consecutive layers of a target on one device; and the first ones on a GPU of their own, with the way there and back.

A block that goes there and back is recorded in one graph: the other GPU's stream joins the capture by events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from dflash_local.config.features import AttentionConfig, ModelConfig
from dflash_local.kernels.allocate import Tensors, on_device
from dflash_local.kernels.delta_step import CycleState
from dflash_local.kernels.link import Link
from dflash_local.layout import attention as attention_layout
from dflash_local.layout import target as layout
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.models.fused.decoder_layer import DecoderLayer, OnResidual
from dflash_local.models.fused.moe import MoE
from dflash_local.models.fused.part import RunState, UsedRows
from dflash_local.models.fused.weights import LayerWeights
from dflash_local.models.rope import fill_rotation

Taps = Mapping[int, torch.Tensor]  # where a layer's output goes [M, H], by its index


def tap_columns(buffer: torch.Tensor, layers: Sequence[int], hidden_size: int) -> Taps:
    """Return where the outputs of these layers lie side by side in ``buffer`` [M, at least layers x H]."""
    return dict(zip(layers, buffer.split(hidden_size, 1), strict=False))


class LayerStack:
    """Layers that follow each other on one device. ``first``: the index of the first one in its target."""

    def __init__(
        self,
        weights: Sequence[LayerWeights],
        model: ModelConfig,
        first: int,
        run: RunState,
        distinct_experts: torch.Tensor | None,
    ) -> None:
        """Bind the layers.

        Args:
            model: whose parts share ``run``. distinct_experts: [mixtures of these layers, launches], see
                ``FusedTarget.distinct_of``; None where there are none.
        """
        self.first = first
        shared = layout.shared_buffers(model, 1, run.spec)
        self._normed = run.tensors[shared["normed"].name]
        self._branch = run.tensors[shared["branch"].name] if "branch" in shared else None
        self.layers = tuple(
            bound_layer(f"{layout.OWNER}.layers.{index}", layer, run) for index, layer in enumerate(weights, first)
        )
        mixtures = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)]
        for part, count in zip(mixtures, () if distinct_experts is None else distinct_experts, strict=False):
            part.distinct_experts = count
        for width in {part.mixer.rotary_dim for part in model.layers if isinstance(part.mixer, AttentionConfig)}:
            tables = attention_layout.rotation_buffers(layout.OWNER, width, run.spec.capacity, run.spec.dtype)
            fill_rotation(run.tensors.take(tables), model.rotation)

    def block(self, x: torch.Tensor, taps: Taps, max_seq_len: int, on_residual: OnResidual | None) -> None:
        """Add all layers' results to a block's rows ``x`` [M, H]."""
        self.begin(x, max_seq_len, on_residual)
        self.finish(x, taps, max_seq_len, on_residual)

    def begin(self, x: torch.Tensor, max_seq_len: int, on_residual: OnResidual | None) -> None:
        """Add what costs about the same for any number of rows: the first layer, but for experts."""
        first, (normed, branch) = self.layers[0], self._room(len(x))
        first.mix(x, normed, branch, max_seq_len, on_residual)
        if not isinstance(first.mlp, MoE):
            first.feed(x, normed, branch, on_residual)

    def finish(self, x: torch.Tensor, taps: Taps, max_seq_len: int, on_residual: OnResidual | None) -> None:
        """Add the rest to rows that ``begin`` has had, perhaps among more."""
        normed, branch = self._room(len(x))
        for index, layer in enumerate(self.layers, self.first):
            if index > self.first:
                layer.block(x, normed, branch, max_seq_len, on_residual)
            elif isinstance(layer.mlp, MoE):
                layer.feed(x, normed, branch, on_residual)
            if index in taps:
                taps[index].copy_(x)

    def _room(self, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._normed[:rows], None if self._branch is None else self._branch[:rows]

    def prefill(self, x: torch.Tensor, normed: torch.Tensor, taps: Taps, on_residual: OnResidual | None) -> None:
        """Do the same with a prompt's rows; ``normed``: room for as many."""
        for index, layer in enumerate(self.layers, self.first):
            layer.prefill(x, normed, on_residual)
            if index in taps:
                taps[index].copy_(x)


class FrontStack:
    """The first layers on a GPU of their own: takes a block's rows there, and brings them and their taps back.

    Attributes:
        layers: as they run.
    """

    def __init__(
        self,
        weights: Sequence[LayerWeights],
        model: ModelConfig,
        taps: Sequence[int],
        spec: EngineSpec,
        used: UsedRows,
        counters: torch.Tensor,
        distinct_experts: torch.Tensor | None,
    ) -> None:
        """Allocate what they keep of the sequence.

        Args:
            model, spec: of the whole target. taps: all of its. used: see ``RunState``. counters, distinct_experts: of
                the target, on its device.
        """
        front = layout.front_model(model, len(weights))
        self._own_taps = [layer for layer in taps if layer < len(weights)]
        spec = replace(spec, num_taps=len(self._own_taps))
        home, away = counters.device, weights[0].device
        tensors = Tensors(layout.run_buffers(front, 1, spec), away, joined=True)
        shared = {name: tensors[buffer.name] for name, buffer in layout.shared_buffers(front, 1, spec).items()}
        self._x, self._taps, self._counters = shared["x"], shared["taps"], shared["counters"]
        self._landed = torch.empty_like(self._taps, device=home)
        self._home_counters = counters
        start, kept, cycle = self._counters.split(1)
        run = RunState(layout.OWNER, tensors, spec, start, CycleState(cycle, kept), used)
        self._distinct = shared.get("distinct_experts")
        self._home_distinct = distinct_experts
        with on_device(away):
            self._stack = LayerStack(weights, front, 0, run, self._distinct)
            if away.type == "cuda":
                torch.cuda.synchronize()  # the link's stream waits for nobody else
        self.layers = self._stack.layers
        self._link = Link(home, away)

    def block(self, x: torch.Tensor, taps: Taps, max_seq_len: int, on_residual: OnResidual | None) -> None:
        """Add these layers' results to a block's rows ``x`` [M, H] at home."""
        own, made = self._x[: len(x)], self._taps[: len(x)]
        wanted = {layer: taps[layer] for layer in self._own_taps if layer in taps}
        carry = self._link.carry
        with self._link.away_from_home():
            carry(self._home_counters, self._counters)
            carry(x, own)
            self._stack.block(own, self._columns(made) if wanted else {}, max_seq_len, on_residual)
            if wanted:
                carry(made, self._landed[: len(x)])
            if self._distinct is not None and self._home_distinct is not None:
                carry(self._distinct, self._home_distinct[: len(self._distinct)])
            carry(own, x)
        landed = self._columns(self._landed[: len(x)])
        for layer, out in wanted.items():
            out.copy_(landed[layer])

    def prefill(self, x: torch.Tensor, taps: Taps, on_residual: OnResidual | None) -> None:
        """Do the same with a prompt's rows."""
        wanted = {layer: out for layer, out in taps.items() if layer < len(self.layers)}
        with self._link.away_from_home():
            self._counters.copy_(self._home_counters)
            own = x.to(self._link.away, copy=True)
            made = own.new_empty(len(x), len(wanted) * x.shape[1])
            columns = tap_columns(made, list(wanted), x.shape[1])
            self._stack.prefill(own, torch.empty_like(own), columns, on_residual)
            for layer, out in wanted.items():
                out.copy_(columns[layer])
            x.copy_(own)

    def _columns(self, buffer: torch.Tensor) -> Taps:
        return tap_columns(buffer, self._own_taps, self._x.shape[1])

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have what is launched within on what these layers keep come behind all before it, and before all behind it;
        the counters there are those at home.
        """
        with self._link.away_from_home():
            self._counters.copy_(self._home_counters)
            yield


def bound_layer(at: str, layer: LayerWeights, run: RunState) -> DecoderLayer:
    """Return a layer over what it keeps of the sequence, ``at`` the name of that."""
    return DecoderLayer(layer.mixer.bind(f"{at}.mixer", run), layer.mlp.bind(f"{at}.mlp", run), *layer.norms)
