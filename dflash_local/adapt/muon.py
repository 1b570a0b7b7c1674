"""Muon: momentum whose matrices are made nearly orthogonal (Jordan et al., 2024), scaled to AdamW's size of update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOMENTUM = 0.95
STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, by its authors
SIZE = 0.2  # root mean square of an update (Moonlight, 2025)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrices [n, rows, columns], roughly: singular values between 0.7 and 1.2."""
    a, b, c = QUINTIC
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)  # few CPUs multiply in bfloat16
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are worked on together."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], rate: float) -> None:
        super().__init__(parameters, {"lr": rate})
        for parameter in parameters:
            self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters: list[torch.Tensor] = group["params"]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            momenta = [self.state[parameter]["momentum"] for parameter in parameters]
            torch._foreach_mul_(momenta, MOMENTUM)
            torch._foreach_add_(momenta, gradients)
            ahead = torch._foreach_add(gradients, momenta, alpha=MOMENTUM)  # Nesterov's
            shapes: dict[torch.Size, list[int]] = {}
            for index, parameter in enumerate(parameters):
                shapes.setdefault(parameter.shape, []).append(index)
            for shape, indices in shapes.items():
                updates = orthogonal(torch.stack([ahead[index] for index in indices])).float()
                rate = group["lr"] * SIZE * max(shape) ** 0.5
                torch._foreach_add_([parameters[index] for index in indices], list(updates.unbind()), alpha=-rate)
