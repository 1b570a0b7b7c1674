"""The choice of a kernel configuration for each shape of weight, by measuring on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from dflash_local.errors import EngineError
from dflash_local.kernels.allocate import card_name, on_device
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.kernel_trial import OnProgress
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import LIBRARY, KernelTimer, largest_tensor
from dflash_local.models.fused import fragment_kernels
from dflash_local.models.fused.expert_choice import MixtureLayer, choose_expert_kernels
from dflash_local.models.fused.formats import UNQUANTIZED, KernelConfig, format_of
from dflash_local.models.fused.linear import GateUp, Linear, by_kind
from dflash_local.models.fused.moe import MoEWeights


def choose_configs(
    layers: Sequence[Linear | GateUp],
    rows: int,
    progress: OnProgress = lambda text, part: None,
    timer: KernelTimer | None = None,
) -> dict[tuple[int, int], KernelConfig | None]:
    """Measure every shape once with ``rows`` rows and give each layer the fastest product.

    What was the fastest before is kept where it takes about as long as then. Without CUDA nothing is measured and the
    library's product is kept.

    Args:
        progress: called with what takes long and is done once for a card, and with the fraction done (0..1).
        timer: of this load; a new one where it is None.

    Returns:
        what was chosen, by weight shape.
    """
    chosen: dict[tuple[int, int], KernelConfig | None] = {}
    groups = by_kind(layer for layer in layers if runs_kernels(layer.weight))
    fragment_kernels.try_new([product for members in groups if (product := _product(members[0]))], rows, progress)
    progress("measuring", 1.0)
    timer = timer or KernelTimer()
    for members in groups:
        device, shape = members[0].weight.device, members[0].weight.shape
        here, others = (
            [layer for layer in each if layer.weight.device == device]
            for each in (members, chain.from_iterable(group for group in groups if group is not members))
        )
        with on_device(device):
            best = _ProductKind(here, others, rows, timer).chosen()
        for member in members:
            member.config = best
        chosen[shape[0], shape[1]] = best
    return chosen


def choose_experts(
    parts: Iterable[object],
    rows: int,
    exact: bool,
    progress: OnProgress = lambda text, part: None,
    timer: KernelTimer | None = None,
) -> None:
    """Choose the kernels of mixtures of experts among the parts of a model's layers, for blocks of so many rows.

    Without CUDA nothing is chosen, and PyTorch's products are kept.

    Args:
        exact: a row has the same bits in a block of any number of rows. progress, timer: see ``choose_configs``.

    Raises:
        KernelError: no kernel takes the experts of a layer; says why.
    """
    mixtures = [part for part in parts if isinstance(part, MoEWeights) and part.experts.device.type == "cuda"]
    cards: dict[str, list[MoEWeights]] = {}
    for part in mixtures:
        cards.setdefault(card_name(part.experts.device), []).append(part)
    for parts in cards.values():
        layers = [
            MixtureLayer(part.mixture, part.experts.matrices, part.config.activation, part.router_bias is not None)
            for part in parts
        ]
        with on_device(parts[0].experts.device):
            chosen = choose_expert_kernels(layers, rows, exact, progress, timer)
        for part, kernels in zip(parts, chosen, strict=True):
            part.experts.kernels = kernels


def without_kernel(layers: Sequence[Linear | GateUp]) -> tuple[str, ...]:
    """Report weights whose product here is the generic one, and weights that are not packed, with reasons."""
    found: list[str] = []
    products = [
        (each.weight, each.paired) for each in layers if each.config is None and isinstance(each.weight, FragmentWeight)
    ]
    if products:
        shapes, why = _shapes(weight for weight, _ in products), fragment_kernels.why_none(products)
        found.append(
            f"quantised weights of {shapes} are multiplied by a generic product in Triton, which is slow: {why}"
        )
    others = [layer.weight for layer in layers if not isinstance(layer.weight, (torch.Tensor, FragmentWeight))]
    decoded = [(each, why) for each in others if runs_kernels(each) and (why := fragment_kernels.why_not(each))]
    if decoded:
        shapes, why = _shapes(weight for weight, _ in decoded), "; ".join(dict.fromkeys(why for _, why in decoded))
        found.append(
            f"quantised weights of {shapes} are decoded for each product, which is very slow: "
            f"no kernel takes them ({why})"
        )
    return tuple(found)


def _shapes(weights: Iterable[Any]) -> str:
    """Return each shape once, the smallest first."""
    return ", ".join(f"{n} x {k}" for n, k in sorted({tuple(weight.shape) for weight in weights}))


def _product(layer: Linear | GateUp) -> fragment_kernels.Product | None:
    """Return the layer's product where skinny GEMM kernels take its weight."""
    return fragment_kernels.product_of(layer.weight, layer.paired)


def candidates(layer: Linear | GateUp, shared_memory: int, rows: int) -> list[Any]:
    return format_of(layer.weight).candidates(layer.weight, layer.paired, rows, shared_memory)


@dataclass(frozen=True, slots=True)
class _ProductKind:
    """Products of one kind for ``rows`` rows, and those whose weights are read between two uses of these."""

    members: Sequence[Linear | GateUp]
    outsiders: Sequence[Linear | GateUp]
    rows: int
    timer: KernelTimer

    def chosen(self) -> KernelConfig | None:
        """Choose the fastest configuration; what is chosen for a product of skinny GEMM kernels is kept."""
        product = _product(self.members[0])
        if product is None:
            configs = self._configs()
            return self.timer.fastest(self, configs) if configs else LIBRARY
        record, name = fragment_kernels.record_of(product[0].device), fragment_kernels.product_name(product, self.rows)
        still_right = partial(fragment_kernels.still_right, product, self.rows, self._without_trial())
        return self.timer.choose(self, record, name, still_right, self._configs)

    def _configs(self) -> list[KernelConfig | None]:
        first = self.members[0]
        configs = candidates(first, device_properties(first.weight.device).shared_memory, self.rows)
        return [LIBRARY, *configs] if format_of(first.weight).has_library else configs

    def _without_trial(self) -> list[KernelConfig | None]:
        """List what multiplies a plain weight beside the skinny GEMM kernels."""
        weight = self.members[0].weight
        if not isinstance(weight, torch.Tensor):
            return []
        shared_memory = device_properties(weight.device).shared_memory
        return [LIBRARY, *UNQUANTIZED.triton_candidates(weight, self.members[0].paired, self.rows, shared_memory)]

    @property
    def count(self) -> int:
        return len(self.members)

    def others(self, layers: int) -> list[torch.Tensor]:
        """List the weights of other kinds, and of the members after the first."""
        return [largest_tensor(each.weight) for each in (*self.outsiders, *self.members[layers:])]

    def run(self, config: KernelConfig | None, layers: int) -> Callable[[], object]:
        """Make what multiplies with the first layers, one after the other."""
        first, members = self.members[0], self.members[:layers]
        x = torch.randn(self.rows, first.weight.shape[1], device=first.weight.device, dtype=first.weight.dtype)
        out = x.new_empty(self.rows, first.out_features)
        for member in members:
            member.config = config
        return lambda: [member(x, out) for member in members]


Product = Linear | GateUp


def settle_rows(products: Sequence[Product], rows: int) -> tuple[str, ...]:
    """Give each product whose rows depend on each other at ``rows`` rows one whose rows do not.

    Returns:
        a line for each weight shape whose product was replaced.

    Raises:
        EngineError: a shape has no product whose rows are independent here.
    """
    replaced: list[str] = []
    for members in by_kind(products):
        out_features, in_features = members[0].out_features, _in_features(members[0])
        with on_device(members[0].weight.device):
            settled = independent(members[0], rows)
            replaced_here = not settled and _replaced(members, rows)
        if settled:
            continue
        if not replaced_here:
            raise EngineError(
                f"the product {out_features} x {in_features} gives a row other bits beside other rows",
                "run without --exact",
            )
        replaced.append(
            f"{out_features} x {in_features}: the library's rows depend on each other, the own kernel is used"
        )
    return tuple(replaced)


def independent(product: Product, rows: int) -> bool:
    """Return True when every row keeps its bits beside other rows and in another place."""
    kind, device = product.weight.dtype, product.weight.device
    generator = torch.Generator(device).manual_seed(0)

    def run(x: torch.Tensor) -> torch.Tensor:
        return product(x, torch.empty(rows, product.out_features, device=device, dtype=kind)).clone()

    first, other = (
        torch.randn(rows, _in_features(product), generator=generator, device=device).to(kind) * scale
        for scale in (1, 30)
    )
    want = run(first)
    for shift in range(rows):
        mixed = other.clone()
        mixed[shift] = first[0]  # one row in each place, beside strangers
        if not torch.equal(run(mixed)[shift], want[0]):
            return False
    return torch.equal(run(first.roll(1, 0)).roll(-1, 0), want)


def _in_features(product: Product) -> int:
    return product.weight.shape[1]


def _replaced(members: Sequence[Product], rows: int) -> bool:
    first = members[0]
    if not runs_kernels(first.weight):
        return False
    for config in candidates(first, device_properties(first.weight.device).shared_memory, rows):
        first.config = config
        if independent(first, rows):
            for member in members:
                member.config = config
            return True
    return False
