"""Linear layers on a CPU, their weights laid out as oneDNN reads them: a few rows cost hardly more than one.

torch's own products lay a float32 weight out anew at every call of more than one row: SmolLM2-135M on two cores takes
twice as long for 4 rows as for one. Here that is done once, at load. A row's product is besides the same in every bit
whatever rows stand beside it.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
from torch import nn
from torch.nn import functional

FEWEST_ROWS = 4  # fewer are filled up, because oneDNN may add theirs in another order
LAID_OUT_FOR = 8  # rows, which decides the layout; any number can be multiplied with it
# Weights whose single row is added as it is among others: float32 ones of up to 1,024 columns on AVX-512. Such a row is
# not filled up, which would cost SmolLM2-135M 2 ms of a step's 38.
_same_alone: dict[tuple[torch.Size, torch.dtype], bool] = {}
# Narrower float32 layers stay torch's own: its single row takes two thirds of oneDNN's time, its eight as long.
FEWEST_OUTPUTS = 768
# Layers of a transformers module that read the same rows. Each product costs 15 microseconds besides its work.
SAME_ROWS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PROCESSORS = ("x86_64", "AMD64")  # elsewhere oneDNN hands products to other libraries, which nobody here has measured


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True where weights of this dtype can be laid out: on a CPU that computes with it."""
    if device.type != "cpu" or platform.machine() not in PROCESSORS or not torch.backends.mkldnn.is_available():
        return False
    native: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or (dtype == torch.bfloat16 and native)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [N, K] laid out for ``linear``; ``to_dense`` gives it back."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LAID_OUT_FOR)
    kind = (weight.shape, weight.dtype)
    if kind not in _same_alone:
        _same_alone[kind] = _is_same_alone(packed)
    return packed


def _is_same_alone(packed: torch.Tensor) -> bool:
    """Multiply a row alone and among others, with each number of threads that a cycle may use.

    Bfloat16 tells nothing: its rounding hides another order in most numbers.
    """
    if packed.dtype != torch.float32:
        return False
    threads = torch.get_num_threads()
    x = torch.randn(FEWEST_ROWS, packed.shape[1], generator=torch.Generator().manual_seed(0)).to(packed.dtype)
    same = True
    for count in (1, threads):
        torch.set_num_threads(count)
        same &= torch.equal(_multiply(x[:1], packed, None), _multiply(x, packed, None)[:1])
    return same


def _multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute as ``functional.linear``, of rows [..., K] and a weight [N, K], packed or plain."""
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    count = x.shape[-2]
    if count >= FEWEST_ROWS or (count == 1 and _same_alone[weight.shape, weight.dtype]):
        return _multiply(x, weight, bias)
    filled = torch.cat((x, *(x[..., :1, :],) * (FEWEST_ROWS - count)), -2)  # faster than functional.pad
    return _multiply(filled, weight, bias).narrow(-2, 0, count)


class PackedLinear(nn.Module):
    """Replace ``nn.Linear`` layers that read the same rows: their products are computed at once.

    Stands in the place of the first and returns its product. A ``PackedPart`` stands in the place of each other one.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        weights: list[torch.Tensor] = [each.weight.detach() for each in layers]
        biases: list[torch.Tensor] = [each.bias for each in layers if each.bias is not None]
        self.weight = pack(weights[0] if len(weights) == 1 else torch.cat(weights))
        self.bias = torch.cat(biases) if biases else None
        self._sizes = [each.out_features for each in layers]
        self._rows: torch.Tensor | None = None
        self._products: tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = linear(x, self.weight, self.bias)
        if len(self._sizes) == 1:
            return product
        self._rows, self._products = x, product.split(self._sizes, -1)
        return self._products[0]

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the product of one of the layers: computed with the first one's, and let go of with the last one's."""
        if self._rows is not x:
            self(x)
        found = self._products[index]
        if index == len(self._sizes) - 1:
            self._rows, self._products = None, ()
        return found


class PackedPart(nn.Module):
    """Replace an ``nn.Linear`` whose weight lies in a ``PackedLinear``."""

    def __init__(self, whole: PackedLinear, index: int) -> None:
        super().__init__()
        self._product = functools.partial(whole.product, index=index)  # not a child: the module is another's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)


def pack_linears(model: Any) -> None:
    """Put packed layers in the place of each ``nn.Linear`` of a model, one after the other.

    Weights that nothing else holds are let go of, so that a load needs room for one more of them.
    """
    for module in list(model.modules()):
        plain = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        for names in (*SAME_ROWS, *((name,) for name in plain)):
            layers = [plain.pop(name) for name in names] if plain.keys() >= set(names) else []
            wide = sum(each.out_features for each in layers) >= FEWEST_OUTPUTS
            if not layers or (layers[0].weight.dtype == torch.float32 and not wide):
                continue
            whole = PackedLinear(*layers)
            for index, name in enumerate(names):
                setattr(module, name, PackedPart(whole, index) if index else whole)
