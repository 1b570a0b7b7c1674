"""Cross entropy through a target's head, some rows at a time: logits of all rows at once would fill the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

LOGITS = 2**26  # at a time


def rows_at_once(head: torch.Tensor) -> int:
    """Return how many rows of logits of a head [vocabulary, w] are made at a time."""
    return max(1, LOGITS // len(head))


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted loss [n], likeliest ids [n] and the gradient of the sum [n, vocabulary] in the logits' dtype."""
    wide, at, each = logits.float(), labels.unsqueeze(1), weights.unsqueeze(1)
    most, likeliest = wide.max(-1, keepdim=True)
    share = (wide - most).exp_()
    total = share.sum(-1, keepdim=True)
    loss = (total.log() + most - wide.gather(1, at)) * each
    gradient = share.mul_(each / total).scatter_add_(1, at, -each)
    return loss.squeeze(1), likeliest.squeeze(1), gradient.to(logits.dtype)


@cache
def _compiled() -> Callable[..., Any]:
    """Return it compiled, where it is first needed: importing the compiler takes a second."""
    return torch.compile(_cross_entropy, dynamic=False)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, labels: torch.Tensor, weights: torch.Tensor, *factors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = _compiled() if labels.is_cuda else _cross_entropy
        hidden, head, *further = factors
        gradients = [
            torch.zeros_like(factor) if needed else None
            for factor, needed in zip(factors, ctx.needs_input_grad[2:], strict=True)
        ]
        loss, likeliest = torch.zeros((), device=labels.device), torch.empty_like(labels)
        count = rows_at_once(head)
        for first in range(0, len(labels), count):
            part = slice(first, first + count)
            logits = hidden[part] @ head.t()
            for rows, table in zip(further[::2], further[1::2]):
                logits.addmm_(rows[part], table.t())
            losses, likeliest[part], slope = found(logits, labels[part], weights[part])
            loss += losses.sum()
            for at, (rows, table) in enumerate(zip(factors[::2], factors[1::2])):
                of_rows, of_table = gradients[2 * at : 2 * at + 2]
                if of_rows is not None:
                    of_rows[part] = slope @ table
                if of_table is not None:
                    of_table.addmm_(slope.t(), rows[part])
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(likeliest)
        return loss, likeliest

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *(each if each is None else each * slopes[0] for each in ctx.saved_tensors)


def head_loss(labels: torch.Tensor, weights: torch.Tensor, *factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the weighted cross entropies, and the likeliest ids [n].

    Args:
        labels, weights: [n]; a weight of zero leaves a row out.
        factors: rows [n, k] and a table [vocabulary, k], again and again, of one dtype: logits are the sum of their
            products. The first two are hidden rows and the head.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _HeadLoss.apply(labels, weights, *factors)  # type: ignore[no-untyped-call]
    return found
