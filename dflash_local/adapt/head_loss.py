"""Cross entropy through a frozen head, some rows at a time: logits of all rows at once would fill the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

ROWS = 7168  # of logits at a time


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted loss [n], likeliest ids [n] and the gradient of the sum [n, vocabulary] in the logits' dtype."""
    wide = logits.float()
    total = torch.logsumexp(wide, -1, keepdim=True)
    loss = (total - wide.gather(1, labels.unsqueeze(1))).squeeze(1) * weights
    share = (wide - total).exp()
    wanted = torch.arange(logits.shape[1], device=logits.device) == labels.unsqueeze(1)
    gradient = torch.where(wanted, share - 1, share) * weights.unsqueeze(1)
    return loss, wide.argmax(-1), gradient.to(logits.dtype)


@cache
def _compiled() -> Callable[..., Any]:
    """Return it compiled, where it is first needed: importing the compiler takes a second."""
    return torch.compile(_cross_entropy, dynamic=False)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = _compiled() if hidden.is_cuda else _cross_entropy
        gradient, likeliest = torch.empty_like(hidden), torch.empty_like(labels)
        loss = torch.zeros((), device=hidden.device)
        for first in range(0, len(hidden), ROWS):
            part = slice(first, first + ROWS)
            losses, likeliest[part], slope = found(hidden[part] @ head.t(), labels[part], weights[part])
            loss += losses.sum()
            gradient[part] = slope @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(likeliest)
        return loss, likeliest

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * slopes[0], None, None, None


def head_loss(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the weighted cross entropies, and the likeliest ids [n].

    Args:
        hidden: [n, w], of the head's dtype. head: [vocabulary, w], never trained.
        labels, weights: [n]; a weight of zero leaves a row out.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _HeadLoss.apply(hidden, head, labels, weights)  # type: ignore[no-untyped-call]
    return found
