"""Whether a row's product depends on the rows beside it, tried for every shape at load: exact mode stands on that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_local.errors import EngineError
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.split_kv import device_properties
from dflash_local.models.fused.kernel_choice import candidates
from dflash_local.models.fused.linear import GateUp, Linear, by_kind

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
        if independent(members[0], rows):
            continue
        if not _replaced(members, rows):
            raise EngineError(
                f"the product {out_features} x {in_features} gives a row other bits beside other rows",
                "run without --exact",
            )
        replaced.append(
            f"{out_features} x {in_features}: the library's rows depend on each other, the own kernel is used"
        )
    return tuple(replaced)


def independent(product: Product, rows: int) -> bool:
    """True when every row keeps its bits beside other rows and in another place."""
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
