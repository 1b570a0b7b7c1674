"""Tensors of a mixture of experts: router, routed experts, and the expert that every token takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dflash_local.config.features import MLPConfig, MoEConfig
from dflash_local.layout.buffer import ITEM_BYTES, Buffer
from dflash_local.layout.linear import LinearSpec, Part
from dflash_local.layout.mlp import MLPLayout
from dflash_local.layout.part_layout import WeightSpec
from dflash_local.layout.spec import EngineSpec

FLOAT32, INDEX = ITEM_BYTES["float32"], ITEM_BYTES["int64"]


class ExpertBuffers(NamedTuple):
    """Matrices of all routed experts: ``gate_up`` [E, 2I, H], gate above up, and ``down`` [E, H, I]."""

    gate_up: Buffer
    down: Buffer


class RoutedBuffers(NamedTuple):
    """A block's rows on their way through the routed experts, M rows of k experts each.

    Attributes:
        logits: [M, E], or [M, E + 1] with the shared expert's gate behind them. weights, experts: [M, k].
        intermediate: [M, k, I].
    """

    logits: Buffer
    weights: Buffer
    experts: Buffer
    intermediate: Buffer


@dataclass(frozen=True, slots=True)
class MoELayout:
    """Of one layer."""

    config: MoEConfig
    module: str = "mlp"
    title: str = "experts"

    @property
    def top_k(self) -> int:
        """Routed experts of a token.

        Raises:
            ValueError: it is not told; the fused engine refuses such a model before it asks.
        """
        if self.config.num_experts_per_tok is None:
            raise ValueError("num_experts_per_tok is not told")
        return self.config.num_experts_per_tok

    @property
    def shared(self) -> MLPLayout | None:
        """The expert that every token takes."""
        size = self.config.shared_intermediate_size
        return MLPLayout(MLPConfig(size, self.config.activation)) if size else None

    @property
    def gated(self) -> bool:
        """True where the shared expert's result is weighed; its gate is the router's last row."""
        return self.shared is not None and self.config.shared_gate

    def router(self, at: str, hidden_size: int) -> LinearSpec:
        """The router, and the shared expert's gate below it."""
        gate = (Part(f"{at}.shared_expert_gate", 1),) if self.gated else ()
        return LinearSpec(f"{at}.router", hidden_size, (Part(f"{at}.gate", self.config.num_experts), *gate))

    def projections(self, at: str, hidden_size: int) -> tuple[LinearSpec, ...]:
        """The router, and the shared expert's products."""
        shared = self.shared
        of_shared = () if shared is None else shared.projections(f"{at}.shared_expert", hidden_size)
        return (self.router(at, hidden_size), *of_shared)

    def experts(self, at: str, spec: WeightSpec) -> ExpertBuffers:
        """The routed experts, under the names that checkpoints have which store them together."""
        count, size, hidden = self.config.num_experts, self.config.intermediate_size, spec.hidden_size
        return ExpertBuffers(
            Buffer(f"{at}.experts.gate_up_proj", (count, 2 * size, hidden), spec.dtype, spec.group),
            Buffer(f"{at}.experts.down_proj", (count, hidden, size), spec.dtype, spec.group),
        )

    def weights(self, at: str, spec: WeightSpec) -> Iterator[Buffer]:
        """All matrices."""
        yield from spec.linear(*self.projections(at, spec.hidden_size))
        yield from self.experts(at, spec)

    def state(self, at: str, spec: EngineSpec) -> Iterator[Buffer]:
        """Nothing."""
        return iter(())

    def routed(self, owner: str, spec: EngineSpec) -> RoutedBuffers:
        """The rows between the products, for one layer after the other."""
        rows, logits, chosen = spec.rows, self.config.num_experts + self.gated, self.top_k
        size = self.config.intermediate_size
        return RoutedBuffers(
            logits=Buffer(f"{owner}.router_logits.{logits}", (rows, logits), spec.dtype, "buffers"),
            weights=Buffer(f"{owner}.expert_weights.{chosen}", (rows, chosen), spec.dtype, "buffers"),
            experts=Buffer(f"{owner}.experts.{chosen}", (rows, chosen), "int64", "buffers"),
            intermediate=Buffer(
                f"{owner}.expert_intermediate.{chosen}x{size}", (rows, chosen, size), spec.dtype, "buffers"
            ),
        )

    def activations(self, owner: str, spec: EngineSpec) -> Iterator[Buffer]:
        """Those, and the shared expert's."""
        yield from self.routed(owner, spec)
        if self.shared is not None:
            yield from self.shared.activations(owner, spec)

    def prefill_bytes(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        """Beside the router's logits and choice: their order, or all rows on one expert, or the shared expert's.

        One expert's rows are gathered for its first product, and its results widened to join the float32 sum.
        """
        inner = self.config.intermediate_size * item_bytes
        narrow, wide = hidden_size * item_bytes, hidden_size * FLOAT32
        widened = wide if narrow < wide else 0
        steps = [self._order_bytes(rows), rows * (2 * INDEX + wide + narrow + max(4 * inner, widened))]
        if self.shared is not None:
            between = self.shared.config.intermediate_size * item_bytes
            products = self.shared.prefill_bytes(rows, hidden_size, item_bytes)
            steps.append(rows * narrow + max(products, rows * (between + narrow)))
        logits, choice = (self.config.num_experts + self.gated) * item_bytes, self.top_k * (item_bytes + INDEX)
        return rows * (logits + choice) + max(steps)

    def snapshot_bytes(self, item_bytes: int) -> int:
        """None."""
        return 0

    def scratch_bytes(self, rows: int, item_bytes: int) -> int:
        """The order of the experts, or the shared expert's."""
        return max(self._order_bytes(rows), 0 if self.shared is None else self.shared.scratch_bytes(rows, item_bytes))

    def _order_bytes(self, rows: int) -> int:
        """Probabilities, and sorted ones with the experts that they are of."""
        return rows * self.config.num_experts * (2 * FLOAT32 + INDEX)
