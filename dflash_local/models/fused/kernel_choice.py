"""The choice of a kernel configuration for each shape of weight, by measuring on the device at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.kernel_trial import Say
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import replay_ms
from dflash_local.models.fused import fragment_format, fragment_kernels
from dflash_local.models.fused.expert_choice import Layer, choose_expert_kernels
from dflash_local.models.fused.formats import LIBRARY, KernelConfig, format_of
from dflash_local.models.fused.linear import GateUp, Linear, by_kind
from dflash_local.models.fused.moe import MoEWeights

REPLAYS = 5


def choose_configs(
    layers: Sequence[Linear | GateUp], rows: int, say: Say = lambda text, part: None
) -> dict[tuple[int, int], KernelConfig | None]:
    """Measure every shape once with ``rows`` rows and give each layer the fastest product.

    Layers of one shape are run one after the other, so that no weight is found in a cache. Without
    CUDA nothing is measured and the library's product is kept.

    Args:
        say: called with what takes long and is done once for a card, and with the fraction done (0..1).

    Returns:
        what was chosen, by weight shape.
    """
    chosen: dict[tuple[int, int], KernelConfig | None] = {}
    groups = by_kind(layer for layer in layers if runs_kernels(layer.weight))
    fragment_kernels.try_new([product for members in groups if (product := _product(members[0]))], rows, say)
    say("measuring", 1.0)
    for members in groups:
        best, shape = _chosen(members, rows), members[0].weight.shape
        for member in members:
            member.config = best
        chosen[shape[0], shape[1]] = best
    return chosen


def choose_experts(parts: Iterable[object], rows: int, exact: bool, say: Say = lambda text, part: None) -> None:
    """The kernels of mixtures of experts among the parts of a model's layers, for blocks of so many rows.

    Without CUDA nothing is chosen, and PyTorch's products are kept.

    Args:
        exact: a row has the same bits in a block of any number of rows. say: see ``choose_configs``.

    Raises:
        KernelError: no kernel takes the experts of a layer; says why.
    """
    mixtures = [part for part in parts if isinstance(part, MoEWeights) and part.experts.device.type == "cuda"]
    if not mixtures:
        return
    layers = [
        Layer(part.mixture, part.experts.matrices, part.config.activation, part.router_bias is not None)
        for part in mixtures
    ]
    for part, kernels in zip(mixtures, choose_expert_kernels(layers, rows, exact, say), strict=True):
        part.experts.kernels = kernels


def without_kernel(layers: Sequence[Linear | GateUp]) -> tuple[str, ...]:
    """A line on the packed weights whose products are the generic one here, one on those that are not packed, and why.

    None where there are no such weights, and where no kernels run.
    """
    found: list[str] = []
    products = [product for layer in layers if layer.config is None and (product := _packed(layer))]
    if products:
        shapes, why = _shapes(weight for weight, _ in products), fragment_kernels.why_none(products)
        found.append(
            f"quantised weights of {shapes} are multiplied by a generic product in Triton, which is slow: {why}"
        )
    others = [layer.weight for layer in layers if not isinstance(layer.weight, (torch.Tensor, FragmentWeight))]
    decoded = [(each, why) for each in others if runs_kernels(each) and (why := fragment_format.why_not(each))]
    if decoded:
        shapes, why = _shapes(weight for weight, _ in decoded), "; ".join(dict.fromkeys(why for _, why in decoded))
        found.append(
            f"quantised weights of {shapes} are decoded for each product, which is very slow: "
            f"no kernel takes them ({why})"
        )
    return tuple(found)


def _shapes(weights: Iterable[Any]) -> str:
    """Each shape once, the smallest first."""
    return ", ".join(f"{n} x {k}" for n, k in sorted({tuple(weight.shape) for weight in weights}))


def _packed(layer: Linear | GateUp) -> fragment_kernels.Product | None:
    """The layer's product where its weight is in fragments."""
    return (layer.weight, layer.paired) if isinstance(layer.weight, FragmentWeight) else None


def _product(layer: Linear | GateUp) -> fragment_kernels.Product | None:
    """The layer's product where few-row kernels take its weight."""
    return fragment_kernels.product_of(layer.weight, layer.paired)


def candidates(layer: Linear | GateUp, shared_memory: int, rows: int) -> list[Any]:
    """Kernel configurations that divide a weight and fit a device's shared memory (bytes for one program)."""
    return format_of(layer.weight).candidates(layer.weight, layer.paired, rows, shared_memory)


def _chosen(members: list[Linear | GateUp], rows: int) -> KernelConfig | None:
    """The fastest configuration; of few-row kernels by what was measured on this card before."""
    product = _product(members[0])
    if product is None:
        return _fastest(members, rows)
    known = fragment_kernels.remembered(product, rows)
    if known is not None:
        return known
    found = _fastest(members, rows)
    fragment_kernels.remember(product, rows, found)
    return found


def _fastest(members: list[Linear | GateUp], rows: int) -> KernelConfig | None:
    first = members[0]
    device, dtype = first.weight.device, first.weight.dtype
    x = torch.randn(rows, first.weight.shape[1], device=device, dtype=dtype)
    out = torch.empty(rows, first.out_features, device=device, dtype=dtype)
    configs = candidates(first, device_properties(device).shared_memory, rows)
    if format_of(first.weight).has_library:
        configs = [LIBRARY, *configs]
    times: dict[KernelConfig | None, float] = {}
    for config in configs:
        for member in members:
            member.config = config
        times[config] = replay_ms(lambda: [member(x, out) for member in members], REPLAYS)
    return min(times, key=lambda config: times[config], default=LIBRARY)
