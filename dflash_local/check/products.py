"""Is every kind of the fused engine's products right: tried with the loaded weights, against float32 over the decoded.

A kind is a format, a shape and whether gate and up are joined; of each one product is tried, with few rows as blocks
have them and with many as prompts have them. Routed experts have products of their own: see ``experts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dflash_local.check.experts import try_experts
from dflash_local.check.findings import Finding
from dflash_local.check.product_error import DEVIATIONS, RESULT_ERROR, TERM_ERROR, Tried, gated_bound, row_ratios
from dflash_local.engine.session import Session
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.product_check import KINDS_OF_ROWS, mixed_rows
from dflash_local.kernels.quantized_weight import row_slices
from dflash_local.kernels.skinny_gemm import MAX_ROWS
from dflash_local.models.fused.formats import Weight
from dflash_local.models.fused.linear import GateUp, Linear, by_kind
from dflash_local.models.fused.target import FusedTarget

MANY_ROWS = MAX_ROWS + 16  # as prompts have: no few-row kernel takes them


def check_products(session: Session) -> Finding:
    """The finding on the formats of weights, as this card multiplies them. EngineError: a kernel faulted."""
    target, drafter = session.runner.target, session.runner.proposer
    if not isinstance(target, FusedTarget):
        return Finding("format", "skipped", f"the {session.facts.engine} engine has PyTorch's products alone")
    products = [*target.weights.products, target.weights.head]
    products += drafter.products if drafter is not None else ()
    tried = [found for kind in by_kind(products) for found in try_product(kind[0], target.rows)]
    tried += try_experts(target)
    text = f"{len(tried) // 2} kinds of products with one-hot, Gaussian, zero and outlier rows"
    figures: dict[str, Any] = {each.name + f" at {each.rows} rows": round(each.error, 4) for each in tried}
    wrong = [each for each in tried if not each.error <= 1]
    if not wrong:
        return Finding("format", "ok", f"{text} agree with the decoded weights", "", figures)
    listed = ", ".join(f"{each.name} at {each.rows} rows ({each.error:.3g} times the bound)" for each in wrong)
    again = "dflash check MODEL --only kernels --again tries the kernels anew"
    remedy = f"an error of this program or its compiler: {again}; please report"
    return Finding("format", "failed", f"of {text} these are wrong: {listed}", remedy, figures)


@torch.inference_mode()
def try_product(product: Linear | GateUp, rows: int) -> Iterator[Tried]:
    """A product with ``rows`` rows at a time, or all that few-row kernels take, then with many."""
    few = _rows(max(rows, KINDS_OF_ROWS), product.weight)
    parts = (product(part, part.new_empty(len(part), product.out_features)) for part in few.split(min(rows, MAX_ROWS)))
    yield _tried(product, few, torch.cat([*parts]))
    many = _rows(MANY_ROWS, product.weight)
    yield _tried(product, many, product.prefill(many))


def _rows(count: int, weight: Weight) -> torch.Tensor:
    return mixed_rows(count, weight.shape[1], weight.device).to(weight.dtype)


def _tried(product: Linear | GateUp, x: torch.Tensor, got: torch.Tensor) -> Tried:
    want, terms = decoded_product(x.float(), product.weight)
    terms *= TERM_ERROR
    terms[(x != 0).sum(1) > 1] *= DEVIATIONS
    bound = terms + RESULT_ERROR * want.abs()
    if product.paired:
        want, bound = gated_bound(want, bound, "silu")
    name = f"{type(product.weight).__name__} {tuple(product.weight.shape)}{' gate and up' if product.paired else ''}"
    return Tried(name, len(x), float(row_ratios(got, want, bound).max()))


def decoded_product(x: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """``x @ weight.T`` in float32 by PyTorch over what the weight stands for, a slice at a time, and the root of the
    sum of each result's squared terms: two [M, N].
    """
    product, terms = (x.new_empty(len(x), weight.shape[0]) for _ in range(2))
    squares = x.square()
    for rows, plain in _decoded(weight):
        product[:, rows] = x @ plain.t()
        terms[:, rows] = (squares @ plain.square().t()).sqrt()
    return product, terms


def _decoded(weight: Weight) -> Iterator[tuple[slice, torch.Tensor]]:
    """The weight in float32, some rows at a time."""
    if isinstance(weight, FragmentWeight):
        for _, rows in weight.slices():
            yield rows, weight.dequantized(rows).float()
        if weight.tail is not None:
            yield slice(weight.coded_rows, None), weight.tail_rows().float()
        return
    for rows in row_slices(weight):
        yield rows, (weight[rows] if isinstance(weight, torch.Tensor) else weight.dequantized(rows)).float()
