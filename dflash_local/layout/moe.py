"""Tensors of a mixture of experts: router, routed experts, and the expert that every token takes.

The latter is the last of the routed ones where it is as wide and stored in the same format: a token takes one slot
more, in one product. Else it has products of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dflash_local.config.features import MLPConfig, MoEConfig
from dflash_local.layout.buffer import ITEM_BYTES, Buffer
from dflash_local.layout.linear import DECODED_SLICE, ROW_TILE, SLICE_ROWS, FormatOf, LinearSpec, MatrixPart, Segment
from dflash_local.layout.mlp import MLPLayout
from dflash_local.layout.part_layout import EngineSpec, PartLayout, WeightSpec

PREFILL_SCRATCH = 192 * 2**20  # bytes between a prompt's products; more rows are taken one part after the other
SLICE_OF_SLOT = 2**12  # weights of experts that a kernel decodes at a time for each slot of a prompt's rows
FLOAT32, INT32, INDEX = ITEM_BYTES["float32"], ITEM_BYTES["int32"], ITEM_BYTES["int64"]


class ExpertSegments(NamedTuple):
    """All experts' matrices as two weights, the gate's rows above up's. ``joined``: the shared one is the last."""

    gate_up: Segment
    down: Segment
    joined: bool


class RoutedBuffers(NamedTuple):
    """A block's rows on their way through the routed experts: M rows of S slots each.

    Attributes:
        logits: [M, E], or [M, E + 1] with the shared expert's gate behind them. weights, experts: [M, S].
        intermediate: [M, S, I]. lists: [launches, words], the experts that occur, for the kernels of a card.
    """

    logits: Buffer
    weights: Buffer
    experts: Buffer
    intermediate: Buffer
    lists: Buffer


def list_words(experts: int, slots: int) -> int:
    """Count int32 of the list of experts of a launch's rows: which occur, where their slots begin, and those."""
    return 2 + 2 * experts + SLICE_ROWS * slots


def most_launches(rows: int) -> int:
    """Count a layer's launches of routed experts for a block's rows where a card has room for the fewest in each."""
    return -(-rows // ROW_TILE)


def rows_at_once(rows: int, slots: int, hidden_size: int, intermediate_size: int, item_bytes: int) -> int:
    """Count rows of a prompt's that go through the experts at a time, in about equal parts."""
    most = max(1, PREFILL_SCRATCH // (slots * _slot_bytes(hidden_size, intermediate_size, item_bytes)))
    return -(-rows // -(-rows // most))


def experts_at_once(experts: int, out_features: int, in_features: int, slots: int) -> int:
    """Count coded experts whose matrices [out_features, in_features] are decoded at a time, in about equal parts.

    Args:
        slots: of the rows that go through the experts at a time.
    """
    most = max(DECODED_SLICE, SLICE_OF_SLOT * slots)
    parts = -(-experts // max(1, most // (out_features * in_features)))
    return -(-experts // parts)


def _slot_bytes(hidden_size: int, intermediate_size: int, item_bytes: int) -> int:
    """Sum a row's place in the order, what its expert makes of it inside, and the result."""
    return INDEX + (intermediate_size + hidden_size) * item_bytes


@dataclass(frozen=True, slots=True)
class MoELayout(PartLayout):
    config: MoEConfig
    module: str = "mlp"
    title: str = "experts"

    @property
    def top_k(self) -> int:
        """Return routed experts of a token. Raise ValueError where not given, which the fused engine refuses before."""
        if self.config.num_experts_per_tok is None:
            raise ValueError("num_experts_per_tok is not given")
        return self.config.num_experts_per_tok

    @property
    def shared(self) -> MLPLayout | None:
        size = self.config.shared_intermediate_size
        return MLPLayout(MLPConfig(size)) if size else None

    @property
    def gated(self) -> bool:
        """Return True where the shared expert's result is weighed; its gate is the router's last row."""
        return self.shared is not None and self.config.shared_gate

    @property
    def may_join(self) -> bool:
        """Return True where the shared expert is as wide as the routed ones."""
        return self.config.shared_intermediate_size == self.config.intermediate_size

    @property
    def slots(self) -> int:
        """Count experts of a token that there is room for: one is left over where the shared one's format differs."""
        return self.top_k + self.may_join

    def router(self, at: str, hidden_size: int) -> LinearSpec:
        gate = (MatrixPart(f"{at}.shared_expert_gate", 1),) if self.gated else ()
        return LinearSpec(
            f"{at}.router", hidden_size, (MatrixPart(f"{at}.{self.config.router}", self.config.num_experts), *gate)
        )

    def projections(self, at: str, hidden_size: int) -> tuple[LinearSpec, ...]:
        return (self.router(at, hidden_size), *self._of_shared(at, hidden_size))

    def fuses_shared_expert(self, at: str, format_of: FormatOf) -> bool:
        """Return True where the shared expert is the last of the routed ones."""
        return self.may_join and all(
            format_of(f"{at}.shared_expert.{name}_proj") == format_of(f"{at}.experts.0.{name}_proj")
            for name in ("gate", "up", "down")
        )

    def experts(self, at: str, spec: WeightSpec) -> ExpertSegments:
        """Return the experts' matrices; all are in the formats of the first one's gate and down."""
        joined = self.fuses_shared_expert(at, spec.format_of)
        modules = [f"{at}.experts.{index}" for index in range(self.config.num_experts)]
        modules += [f"{at}.shared_expert"] if joined else []
        gate_up = (
            MatrixPart(f"{expert}.{name}_proj", self.config.intermediate_size)
            for expert in modules
            for name in ("gate", "up")
        )
        down = (MatrixPart(f"{expert}.down_proj", spec.hidden_size) for expert in modules)
        return ExpertSegments(
            Segment(f"{at}.experts.gate_up_proj", spec.format_of(f"{modules[0]}.gate_proj"), tuple(gate_up)),
            Segment(f"{at}.experts.down_proj", spec.format_of(f"{modules[0]}.down_proj"), tuple(down)),
            joined,
        )

    def expert_buffers(self, at: str, spec: WeightSpec) -> tuple[list[Buffer], list[Buffer]]:
        """Describe gate and up [E * 2 I, H], and down [E * H, I], without the thousands of parts of ``experts``."""
        count, inner = (
            self.config.num_experts + self.fuses_shared_expert(at, spec.format_of),
            self.config.intermediate_size,
        )
        gate, down = (spec.format_of(f"{at}.experts.0.{name}_proj") for name in ("gate", "down"))
        rows, hidden = count * 2 * inner, spec.hidden_size
        return (
            gate.buffers(f"{at}.experts.gate_up_proj", rows, hidden, spec.dtype, spec.group),
            down.buffers(f"{at}.experts.down_proj", count * hidden, inner, spec.dtype, spec.group),
        )

    def router_bias(self, at: str, spec: WeightSpec) -> tuple[Buffer, ...]:
        """Describe the router's bias [E], where it has one."""
        shape = (self.config.num_experts,)
        biased = self.config.router_bias
        return (Buffer(f"{at}.{self.config.router}.bias", shape, spec.dtype, spec.group),) if biased else ()

    def expert_biases(self, at: str, spec: WeightSpec) -> tuple[Buffer, ...]:
        """Describe biases [E, 2 I] and [E, H], where there are some, the gate's before up's."""
        if not self.config.expert_bias:
            return ()
        count, inner = self.config.num_experts, 2 * self.config.intermediate_size
        return (
            Buffer(f"{at}.experts.gate_up_proj_bias", (count, inner), spec.dtype, spec.group),
            Buffer(f"{at}.experts.down_proj_bias", (count, spec.hidden_size), spec.dtype, spec.group),
        )

    def weights(self, at: str, spec: WeightSpec) -> Iterator[Buffer]:
        yield from spec.linear(self.router(at, spec.hidden_size))
        yield from self.router_bias(at, spec)
        for buffers in self.expert_buffers(at, spec):
            yield from buffers
        yield from self.expert_biases(at, spec)
        if not self.fuses_shared_expert(at, spec.format_of):
            yield from spec.linear(*self._of_shared(at, spec.hidden_size))

    def routed(self, owner: str, spec: EngineSpec) -> RoutedBuffers:
        """Return the rows between the products, for one layer after the other."""
        rows, logits, slots = spec.rows, self.config.num_experts + self.gated, self.slots
        size, words = self.config.intermediate_size, list_words(self.config.num_experts + self.may_join, slots)
        return RoutedBuffers(
            logits=Buffer(f"{owner}.router_logits.{logits}", (rows, logits), spec.dtype, "buffers"),
            weights=Buffer(f"{owner}.expert_weights.{slots}", (rows, slots), "float32", "buffers"),
            experts=Buffer(f"{owner}.experts.{slots}", (rows, slots), "int32", "buffers"),
            intermediate=Buffer(
                f"{owner}.expert_intermediate.{slots}x{size}", (rows, slots, size), spec.dtype, "buffers"
            ),
            lists=Buffer(f"{owner}.expert_lists.{words}", (most_launches(rows), words), "int32", "buffers"),
        )

    def activations(self, owner: str, spec: EngineSpec) -> Iterator[Buffer]:
        """Describe those, and the shared expert's where it takes no slot."""
        yield from self.routed(owner, spec)
        if self.shared is not None and not self.may_join:
            yield from self.shared.activations(owner, spec)

    def prefill_bytes(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        """Sum logits and choice with the most of: the order, rows among experts and all sums, the shared one's."""
        narrow, slots = hidden_size * item_bytes, self.rows_at_once(rows, hidden_size, item_bytes) * self.slots
        between = slots * _slot_bytes(hidden_size, self.config.intermediate_size, item_bytes)
        steps = [self._order_bytes(rows), rows * narrow + between]
        if self.shared is not None and not self.may_join:
            between = self.shared.config.intermediate_size * item_bytes
            products = self.shared.prefill_bytes(rows, hidden_size, item_bytes)
            steps.append(rows * narrow + max(products, rows * (between + narrow)))
        logits, choice = (self.config.num_experts + self.gated) * item_bytes, self.slots * (FLOAT32 + INT32)
        return rows * (logits + choice) + max(steps)

    def rows_at_once(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        """Count rows of a prompt's that go through the experts at a time."""
        return rows_at_once(rows, self.slots, hidden_size, self.config.intermediate_size, item_bytes)

    def decoded_at_once(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        slots = self.rows_at_once(rows, hidden_size, item_bytes) * self.slots
        experts, inner = self.config.num_experts + self.may_join, self.config.intermediate_size
        shapes = ((2 * inner, hidden_size), (hidden_size, inner))
        of_experts = max(experts_at_once(experts, n, k, slots) * n * k for n, k in shapes)
        return of_experts if self.shared is None or self.may_join else max(of_experts, DECODED_SLICE)

    def scratch_bytes(self, rows: int, item_bytes: int) -> int:
        """Return the order of the experts, or the shared expert's."""
        return max(self._order_bytes(rows), 0 if self.shared is None else self.shared.scratch_bytes(rows, item_bytes))

    def _of_shared(self, at: str, hidden_size: int) -> tuple[LinearSpec, ...]:
        return () if self.shared is None else self.shared.projections(f"{at}.shared_expert", hidden_size)

    def _order_bytes(self, rows: int) -> int:
        """Sum probabilities, and sorted ones with the experts that they are of."""
        return rows * self.config.num_experts * (2 * FLOAT32 + INDEX)
