"""The kernels of a mixture of experts on a card: how they are configured, and a block's rows through them.

Configurations are measured at load, each after its numbers were compared with PyTorch's. Launches of up to 8 rows and
of up to 16 have each their own, but in exact mode, where a row must have the same bits in a step and in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch

from dflash_local.errors import EngineError
from dflash_local.kernels import expert_gemm, nvrtc
from dflash_local.kernels.expert_gemm import DownConfig, ExpertConfig, GateUpConfig, Mixture, slice_rows
from dflash_local.kernels.experts import Activation, ExpertWeight, Routing, RoutingOptions, experts_down, experts_swiglu
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import replay_ms
from dflash_local.layout.linear import ROW_TILE, SLICE_ROWS

REPLAYS = 5
MEASURED_LAYERS = 16  # one after the other, so that no weight is found in a cache
ERROR = 1e-2  # of results in bfloat16 against PyTorch's, as their norm: what rounding alone makes is 3e-3
REMEDY = "load it with --engine reference"


class Matrices(NamedTuple):
    """Of all experts of a layer."""

    gate_up: ExpertWeight
    down: ExpertWeight


class ExpertBlock(NamedTuple):
    """A block's rows between the launches: M rows of S experts.

    Attributes:
        routing: weights and experts [M, S]. lists: [launches, words] int32, the experts that occur in each.
        intermediate: [M, S, I].
    """

    routing: Routing
    lists: torch.Tensor
    intermediate: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """Of one layer's experts.

    Attributes:
        configs: by the rows of a launch.
    """

    mixture: Mixture
    configs: Mapping[int, tuple[GateUpConfig, DownConfig]]

    def run(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        matrices: Matrices,
        block: ExpertBlock,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        router_bias: torch.Tensor | None = None,
        distinct: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``out`` [M, H] = the weighed sum of each row's experts (+ residual): three launches for 16 rows.

        Args:
            x: [M, H]. logits: [M, >= experts]. distinct: [launches] int32, gets how many routed experts occur.
        """
        step = max(self.configs)
        for launch, at in enumerate(range(0, len(x), step)):
            rows = slice(at, min(at + step, len(x)))
            first, second = self.configs[slice_rows(rows.stop - rows.start)]
            weights, experts, expert_list = (*(each[rows] for each in block.routing), block.lists[launch])
            counted = None if distinct is None else distinct[launch : launch + 1]
            expert_gemm.route(logits[rows], self.mixture, weights, experts, expert_list, router_bias, counted)
            between = block.intermediate[rows]
            expert_gemm.gate_up(x[rows], matrices.gate_up, self.mixture, expert_list, between, first)
            routed, added = (weights, experts, expert_list), None if residual is None else residual[rows]
            expert_gemm.down(between, matrices.down, self.mixture, routed, out[rows], second, added)
        return out


def choose_expert_kernels(
    layers: Sequence[tuple[Mixture, Matrices, Activation]], rows: int, exact: bool = False
) -> list[ExpertKernels]:
    """The fastest right kernels for each layer of a model on one device, for up to so many rows.

    Args:
        layers: with the activation of each. exact: the same configuration for any number of rows.

    Raises:
        EngineError: no kernel takes a layer's experts here; says why.
    """
    chosen: dict[object, ExpertKernels] = {}
    groups: dict[object, list[tuple[Mixture, Matrices, Activation]]] = {}
    for layer in layers:
        groups.setdefault(_kind(*layer), []).append(layer)
    for kind, members in groups.items():
        mixture, first, activation = members[0]
        classes = _row_classes(mixture, first, rows)
        configs: dict[int, tuple[GateUpConfig, DownConfig]] = {}
        for size in reversed(classes):
            if exact and configs:
                configs[size] = configs[classes[-1]]
            else:
                configs[size] = _fastest(mixture, [each[1] for each in members[:MEASURED_LAYERS]], activation, size)
        chosen[kind] = ExpertKernels(mixture, configs)
    return [chosen[_kind(*layer)] for layer in layers]


def _kind(mixture: Mixture, matrices: Matrices, activation: Activation) -> object:
    """Equal for layers whose experts are multiplied alike."""
    forms = tuple((_format(each), each.weight.shape, each.bias is None) for each in matrices)
    return mixture, forms, activation


def _format(weight: ExpertWeight) -> object:
    try:
        return expert_gemm.fragment_format(weight)
    except ValueError as error:
        raise EngineError(f"no kernel takes these experts: {error}", REMEDY) from None


def _row_classes(mixture: Mixture, matrices: Matrices, rows: int) -> tuple[int, ...]:
    """Rows of the launches: those that shared memory has room for."""
    device = matrices.gate_up.weight.device
    unmet = nvrtc.why_not(torch.cuda.get_device_capability(device))
    if unmet is not None:
        raise EngineError(f"a mixture of experts runs on kernels that this card has not: {unmet}", REMEDY)
    wanted = (ROW_TILE,) if rows <= ROW_TILE else (ROW_TILE, SLICE_ROWS)
    found = tuple(
        size
        for size in wanted
        if all(any(True for _ in _candidates(mixture, matrices, gate_up, size)) for gate_up in (True, False))
    )
    if not found:
        raise EngineError("no kernel for these experts fits this card's shared memory", REMEDY)
    return found


def _candidates(mixture: Mixture, matrices: Matrices, gate_up: bool, rows: int) -> Iterable[ExpertConfig]:
    weight = matrices.gate_up if gate_up else matrices.down
    shared = device_properties(weight.weight.device).shared_memory
    return expert_gemm.candidates(gate_up, weight, mixture, rows, shared)


class _Trial:
    """Random rows through the experts of some layers, and what PyTorch makes of them with the first layer's."""

    def __init__(self, mixture: Mixture, layers: Sequence[Matrices], activation: Activation, rows: int) -> None:
        device = layers[0].gate_up.weight.device
        generator = torch.Generator(device).manual_seed(0)
        hidden, size = layers[0].gate_up.in_features, layers[0].down.in_features
        self.mixture, self.layers = mixture, layers

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, device=device, generator=generator).bfloat16()

        self.x, self.out = random(rows, hidden), torch.empty(rows, hidden, device=device, dtype=torch.bfloat16)
        self.routed = []
        for _ in layers:
            weights = torch.empty(rows, mixture.slots, device=device)
            experts = torch.empty(rows, mixture.slots, device=device, dtype=torch.int32)
            words = torch.empty(mixture.list_words, device=device, dtype=torch.int32)
            logits = random(rows, mixture.experts + (mixture.shared == 2))
            expert_gemm.route(logits, mixture, weights, experts, words)
            self.routed.append((weights, experts, words))
        routing, empty = Routing(*self.routed[0][:2]), torch.empty(rows, mixture.slots, size, device=device)
        self.between = empty.to(torch.bfloat16)
        self.wanted = experts_swiglu(self.x, layers[0].gate_up, routing, self.between.clone(), activation)
        self.wanted_out = experts_down(self.wanted, layers[0].down, routing, self.out.clone())

    def gate_up(self, config: GateUpConfig, layers: int) -> None:
        for (_, _, words), layer in zip(self.routed[:layers], self.layers[:layers], strict=True):
            expert_gemm.gate_up(self.x, layer.gate_up, self.mixture, words, self.between, config)

    def down(self, config: DownConfig, layers: int) -> None:
        for routed, layer in zip(self.routed[:layers], self.layers[:layers], strict=True):
            expert_gemm.down(self.between, layer.down, self.mixture, routed, self.out, config)

    def gate_up_is_right(self, config: GateUpConfig) -> bool:
        self.between.fill_(float("nan"))
        self.gate_up(config, 1)
        return _near(self.between, self.wanted)

    def down_is_right(self, config: DownConfig) -> bool:
        self.between.copy_(self.wanted)
        self.out.fill_(float("nan"))
        self.down(config, 1)
        return _near(self.out, self.wanted_out)


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """False also where something is not a number."""
    return bool((found.float() - wanted.float()).norm() <= ERROR * wanted.float().norm())


def _fastest(
    mixture: Mixture, layers: Sequence[Matrices], activation: Activation, rows: int
) -> tuple[GateUpConfig, DownConfig]:
    trial, first = _Trial(mixture, layers, activation, rows), layers[0]
    kinds = {gate_up: list(_candidates(mixture, first, gate_up, rows)) for gate_up in (True, False)}
    _compile(mixture, first, kinds, rows)

    def best(configs: Sequence[ExpertConfig], right: Callable[..., bool], run: Callable[..., None]) -> ExpertConfig:
        passed = [config for config in configs if right(config)]
        times = {config: replay_ms(partial(run, config, len(layers)), REPLAYS) for config in passed}
        if not times:
            raise EngineError(f"no kernel gave the right product of these experts at {rows} rows", REMEDY)
        return min(times, key=lambda config: times[config])

    return (
        cast(GateUpConfig, best(kinds[True], trial.gate_up_is_right, trial.gate_up)),
        cast(DownConfig, best(kinds[False], trial.down_is_right, trial.down)),
    )


def _compile(mixture: Mixture, matrices: Matrices, kinds: Mapping[bool, Sequence[ExpertConfig]], rows: int) -> None:
    """On all cores, where there is a disk to keep cubins on."""
    if nvrtc.cubin_folder() is None:
        return
    jobs = [(config, gate_up) for gate_up, configs in kinds.items() for config in configs]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: expert_gemm.compiled(matrices[not job[1]], mixture, job[0], rows), jobs))


def mixture_of(routing: RoutingOptions, slots: int, clamp: tuple[float, float] | None = None) -> Mixture:
    """What the kernels ask of a layer whose rows choose so.

    Args:
        slots: experts of a row, a shared one included.
    """
    shared = (2 if routing.shared_gate else 1) if routing.shared else 0
    return Mixture(routing.num_experts, slots - routing.shared, shared, routing.norm_topk_prob, clamp)
