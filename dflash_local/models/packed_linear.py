"""Linear layers on a CPU, their weights laid out as oneDNN reads them: a few rows cost hardly more than one.

torch's own products lay a float32 weight out anew at every call of more than one row: SmolLM2-135M on two cores takes
twice as long for 4 rows as for one. Here that is done once, at load. A row's product with such a weight is besides the
same in every bit whatever rows stand beside it.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import nn
from torch.nn import functional

FEWEST_ROWS = 4  # fewer are filled up, because oneDNN may add theirs in another order
LAID_OUT_FOR = 8  # rows, which decides the layout; any number can be multiplied with it
# Narrower float32 layers stay torch's own: its single row takes two thirds of oneDNN's time, its eight as long.
FEWEST_OUTPUTS = 768
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
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute as ``functional.linear``, of rows [..., K] and a weight [N, K], packed or plain."""
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    count = x.shape[-2]
    if count < FEWEST_ROWS:  # with copies, since functional.pad takes three times as long
        x = torch.cat((x, *(x[..., :1, :],) * (FEWEST_ROWS - count)), -2)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out.narrow(-2, 0, count)


class PackedLinear(nn.Module):
    """Replace an ``nn.Linear``."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = pack(plain.weight), plain.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def pack_linears(model: Any) -> None:
    """Put a ``PackedLinear`` in the place of each ``nn.Linear`` of a model that gains by it, one after the other.

    Weights that nothing else holds are let go of, so that a load needs room for one more of them.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear:
                continue
            if child.weight.dtype != torch.float32 or child.out_features >= FEWEST_OUTPUTS:
                setattr(module, name, PackedLinear(child))
