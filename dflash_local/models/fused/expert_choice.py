"""Describe which kernels multiply a mixture of experts on its card: tried, measured once, and kept.

The first use of a kernel is a child process's (``kernels.kernel_trial``); at each load used configurations are tried
again. Launches of up to 8 rows and of up to 16 have each their own, but in exact mode, where a row must have the same
bits in a step and in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, cast

import torch

from dflash_local.errors import KernelError
from dflash_local.kernels import expert_gemm, nvrtc
from dflash_local.kernels.expert_gemm import DownConfig, ExpertConfig, GateUpConfig, Mixture
from dflash_local.kernels.experts import Activation, ExpertWeight, Routing, experts_down, experts_swiglu
from dflash_local.kernels.kernel_record import KernelRecord, record_of
from dflash_local.kernels.kernel_trial import KernelTrial, OnProgress, TrialsImpossibleError, try_kernels
from dflash_local.kernels.product_trials import ExpertTrial, RouteTrial, trial_of
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import KernelTimer, largest_tensor, spell
from dflash_local.layout.linear import ROW_TILE, SLICE_ROWS
from dflash_local.models.fused.fragment_kernels import why_failed
from dflash_local.models.fused.routed_experts import ExpertKernels, Matrices

MEASURED_LAYERS = 16  # their routed experts are more than any L2 holds
ERROR = 1e-2  # of results in bfloat16 against PyTorch's, as their norm: what rounding alone makes is 3e-3
REMEDY = "load it with --engine reference"


class MixtureLayer(NamedTuple):
    """Hold the experts of a layer, and what else their kernels depend on. ``biased``: the router has a bias."""

    mixture: Mixture
    matrices: Matrices
    activation: Activation
    biased: bool = False


def choose_expert_kernels(
    layers: Sequence[MixtureLayer],
    rows: int,
    exact: bool = False,
    progress: OnProgress = lambda text, part: None,
    timer: KernelTimer | None = None,
) -> list[ExpertKernels]:
    """Return the fastest right kernels for each layer of a model on one device, for up to so many rows.

    Args:
        exact: the same configuration for any number of rows. progress: called with what is done, and the fraction
            done (0..1). timer: of this load; a new one where it is None.

    Raises:
        KernelError: no kernel takes a layer's experts here; says why.
    """
    members: dict[object, list[MixtureLayer]] = {}
    for layer in layers:
        alike = members.setdefault(_kind(layer), [])
        if not alike or _device(layer) == _device(alike[0]):  # those of a kind on another card of this model run alike
            alike.append(layer)
    timer = timer or KernelTimer()
    groups = {kind: _MixtureGroup(each, _row_classes(each[0], rows), exact, timer) for kind, each in members.items()}
    if not groups:
        return []
    device = _device(layers[0])
    record = record_of(device)
    record.impossible = ""
    try:
        try_kernels((trial for group in groups.values() for trial in group.trials), device, record, progress)
    except TrialsImpossibleError as error:
        record.impossible = str(error)
    progress("measuring experts", 1.0)
    chosen = {kind: group.chosen(record) for kind, group in groups.items()}
    return [chosen[_kind(layer)] for layer in layers]


def _kind(layer: MixtureLayer) -> object:
    """Return what is equal for layers whose experts are multiplied alike."""
    forms = tuple((_format(each), each.weight.shape, each.bias is None) for each in layer.matrices)
    return layer.mixture, forms, layer.activation, layer.biased


def _device(layer: MixtureLayer) -> torch.device:
    return layer.matrices.gate_up.weight.device


def _format(weight: ExpertWeight) -> object:
    try:
        return expert_gemm.fragment_format(weight)
    except ValueError as error:
        raise KernelError(f"no kernel takes these experts: {error}", REMEDY) from None


def _row_classes(layer: MixtureLayer, rows: int) -> tuple[int, ...]:
    """Return rows of the launches: those that shared memory has room for."""
    unmet = nvrtc.why_not(torch.cuda.get_device_capability(_device(layer)))
    if unmet is not None:
        raise KernelError(f"a mixture of experts runs on kernels that this card has not: {unmet}", REMEDY)
    wanted = (ROW_TILE,) if rows <= ROW_TILE else (ROW_TILE, SLICE_ROWS)
    found = tuple(size for size in wanted if all(_candidates(layer, gate_up, size) for gate_up in (True, False)))
    if not found:
        raise KernelError("no kernel for these experts fits this card's shared memory", REMEDY)
    return found


def _candidates(layer: MixtureLayer, gate_up: bool, rows: int) -> list[ExpertConfig]:
    weight = _weight(layer, gate_up)
    shared = device_properties(weight.weight.device).shared_memory
    return list(expert_gemm.candidates(gate_up, weight, layer.mixture, rows, shared))


def _weight(layer: MixtureLayer, gate_up: bool) -> ExpertWeight:
    return layer.matrices.gate_up if gate_up else layer.matrices.down


@dataclass(frozen=True, slots=True)
class _MixtureGroup:
    """Layers whose experts are multiplied alike. ``classes``: rows of the launches, ascending."""

    layers: Sequence[MixtureLayer]
    classes: tuple[int, ...]
    exact: bool
    timer: KernelTimer

    @property
    def trials(self) -> list[KernelTrial]:
        """List trials of all kernels that may be launched, those with fewer rows first."""
        products = [(gate_up, size) for size in self.classes for gate_up in (True, False)]
        return [self._route, *(trial for each in products for trial in self._trials(*each))]

    def chosen(self, record: KernelRecord) -> ExpertKernels:
        """Choose among right configurations, for few rows where none is right for more. Raise KernelError where none
        is.
        """
        if not record.is_right(self._route.kernel):
            self._refuse(record, [self._route])
        classes = self.classes
        while not all(self._tried(record, gate_up, size, classes) for size in classes for gate_up in (True, False)):
            if len(classes) == 1:
                self._refuse(record, [trial for gate_up in (True, False) for trial in self._trials(gate_up, *classes)])
            classes = classes[:-1]
        configs: dict[int, tuple[GateUpConfig, DownConfig]] = {}
        for size in reversed(classes):
            if self.exact and configs:
                configs[size] = configs[classes[-1]]
                continue
            first, second = (
                self._best(record, gate_up, size, self._tried(record, gate_up, size, classes))
                for gate_up in (True, False)
            )
            configs[size] = cast(GateUpConfig, first), cast(DownConfig, second)
        return ExpertKernels(self.layers[0].mixture, configs)

    @property
    def _route(self) -> RouteTrial:
        return RouteTrial(self.layers[0].mixture, self.layers[0].biased)

    def _trials(self, gate_up: bool, rows: int) -> list[ExpertTrial]:
        return [self._trial(config, rows) for config in _candidates(self.layers[0], gate_up, rows)]

    def _trial(self, config: ExpertConfig, rows: int) -> ExpertTrial:
        first = self.layers[0]
        return trial_of(_weight(first, isinstance(config, GateUpConfig)), first.mixture, config, rows)

    def _tried(self, record: KernelRecord, gate_up: bool, rows: int, classes: tuple[int, ...]) -> list[ExpertConfig]:
        """Return configurations for so many rows whose kernels are right: in exact mode those for all launches."""
        sizes = classes if self.exact else (rows,)
        every = _candidates(self.layers[0], gate_up, rows)
        return [each for each in every if all(record.is_right(self._trial(each, size).kernel) for size in sizes)]

    def _best(self, record: KernelRecord, gate_up: bool, rows: int, tried: Sequence[ExpertConfig]) -> ExpertConfig:
        """Choose among those of ``tried`` that are right with these weights. Raises KernelError: there is none."""
        product = _ExpertProduct(self.layers[:MEASURED_LAYERS], gate_up, rows)

        def right(spelled: str | None = None) -> list[ExpertConfig]:
            if spelled is None:
                _compile(self.layers[0], gate_up, tried, rows)
            return [each for each in tried if spelled in (None, spell(each)) and product.is_right(each)]

        best = self.timer.choose(product, record, _name(self.layers[0], gate_up, rows), right, right)
        if best is None:
            raise KernelError(f"no kernel gave the right product of these experts at {rows} rows", REMEDY)
        return best

    def _refuse(self, record: KernelRecord, trials: Sequence[KernelTrial]) -> None:
        why = why_failed(record, {trial.kernel for trial in trials})
        raise KernelError(f"no kernel for these experts is known to be right: {why}", REMEDY)


def _name(layer: MixtureLayer, gate_up: bool, rows: int) -> str:
    mixture, weight = layer.mixture, _weight(layer, gate_up)
    shared = " and a shared one" if mixture.shared else ""
    return (
        f"{'gate and up' if gate_up else 'down'} of {mixture.experts} experts{shared}, {mixture.top_k} a row, "
        f"{expert_gemm.fragment_format(weight)} {weight.out_features} x {weight.in_features}"
        f"{' clamped' if mixture.clamp else ''}{' biased' if weight.bias is not None else ''} at {rows} rows"
    )


class _ExpertProduct:
    """One of the two products of some layers: random rows through it, and what PyTorch makes of them with the first's.

    Attributes:
        x: [M, H]; of down [M, S, I]. wanted: [M, S, I]; of down [M, H].
    """

    def __init__(self, layers: Sequence[MixtureLayer], gate_up: bool, rows: int) -> None:
        self._layers, self._gate_up = layers, gate_up
        mixture, weight = layers[0].mixture, _weight(layers[0], gate_up)
        self._device, self._rows = weight.weight.device, rows
        self._generator = torch.Generator(self._device).manual_seed(0)
        slots = () if gate_up else (mixture.slots,)
        self.x = self._random(rows, *slots, weight.in_features)
        weights, experts, _ = self._routed[0]
        routing = Routing(weights, experts)
        if gate_up:
            self._out = self.x.new_empty(rows, mixture.slots, weight.out_features // 2)
            self.wanted = experts_swiglu(self.x, weight, routing, self._out.clone(), layers[0].activation)
        else:
            self._out = self.x.new_empty(rows, weight.out_features)
            self.wanted = experts_down(self.x, weight, routing, self._out.clone())

    def is_right(self, config: ExpertConfig) -> bool:
        """Check a configuration with the first layer's weights."""
        self._out.fill_(float("nan"))
        self._run(config, 1)
        return bool((self._out.float() - self.wanted.float()).norm() <= ERROR * self.wanted.float().norm())

    @property
    def count(self) -> int:
        return len(self._layers)

    def run(self, config: ExpertConfig, layers: int) -> Callable[[], object]:
        """Make what multiplies with the first layers' experts, one after the other."""
        return partial(self._run, config, layers)

    def others(self, layers: int) -> list[torch.Tensor]:
        """List the other product's experts."""
        return [largest_tensor(_weight(layer, not self._gate_up).weight) for layer in self._layers]

    def _run(self, config: ExpertConfig, layers: int) -> None:
        for layer, routed in zip(self._layers[:layers], self._routed, strict=False):
            weight = _weight(layer, self._gate_up)
            if self._gate_up:
                first = cast(GateUpConfig, config)
                expert_gemm.gate_up(self.x, weight, layer.mixture, routed[2], self._out, first)
            else:
                expert_gemm.down(self.x, weight, layer.mixture, routed, self._out, cast(DownConfig, config))

    @cached_property
    def _routed(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return weights, experts and list of each layer, of random logits."""
        found = []
        for layer in self._layers:
            mixture = layer.mixture
            weights = torch.empty(self._rows, mixture.slots, device=self._device)
            experts = torch.empty(self._rows, mixture.slots, device=self._device, dtype=torch.int32)
            words = torch.empty(mixture.list_words, device=self._device, dtype=torch.int32)
            logits = self._random(self._rows, mixture.experts + (mixture.shared == 2))
            bias = logits.new_zeros(mixture.experts) if layer.biased else None  # the kernel that was tried
            expert_gemm.route(logits, mixture, weights, experts, words, bias)
            found.append((weights, experts, words))
        return found

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=self._device, generator=self._generator).bfloat16()


def _compile(layer: MixtureLayer, gate_up: bool, configs: Sequence[ExpertConfig], rows: int) -> None:
    """Compile on all cores, where there is a disk to keep cubins on."""
    if nvrtc.cubin_folder() is None:
        return
    weight = _weight(layer, gate_up)
    specs = [expert_gemm.spec_of(weight, layer.mixture, config, rows) for config in configs]
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(expert_gemm.compiled, weight.weight.device), specs))
