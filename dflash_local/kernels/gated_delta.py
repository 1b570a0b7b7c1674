"""Gated delta rule in plain PyTorch (the CPU path, and the reference of faster kernels): block form, commit, prefill.

Recurrence per head (Yang et al., Gated Delta Networks, arXiv 2412.06464), state S [dk, dv]: ``S <- e^g S ; d = beta (v
- S^T k) ; S <- S + k d^T ; o = S^T q``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NORM_EPS = 1e-6  # of the q and k normalisation, as the published models were trained
CHUNK = 64


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Return rows of ``x`` [..., d] divided by their length, in float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute outputs of M tokens from the state before them, without changing it.

    Args:
        q, k: [H, M, dk] float32, normalised, q already scaled by dk^-1/2.
        v: [H, M, dv] float32. g, beta: [H, M] float32, g <= 0.
        state: [H, dk, dv] float32.

    Returns:
        outputs [H, M, dv] and the corrections u [H, M, dv] that ``close`` adds to the state.
    """
    rows = k.shape[1]
    total = g.cumsum(-1)  # log decay from the block's start to each token
    grown = total.exp().unsqueeze(-1)
    if rows == 1:
        u = beta.unsqueeze(-1) * (v - grown * (k @ state))
        return grown * (q @ state) + (q * k).sum(-1, keepdim=True) * u, u
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    above = torch.ones(rows, rows, dtype=torch.bool, device=k.device).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    keys = k.transpose(-1, -2)
    # The solver takes the diagonal as ones, so only the part below it is read.
    lower = (k @ keys) * decay * beta.unsqueeze(-1)
    right = beta.unsqueeze(-1) * (v - grown * (k @ state))
    u = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    return grown * (q @ state) + ((q @ keys) * decay) @ u, u


def close(k: torch.Tensor, g: torch.Tensor, u: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Compute the state after a whole block, in closed form from the corrections of ``block``."""
    total = g.cumsum(-1)
    last = total[:, -1:]
    weighted = k * (last - total).exp().unsqueeze(-1)
    return state * last.exp().unsqueeze(-1) + weighted.transpose(-1, -2) @ u


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute outputs and final state of a long run of tokens; shapes as in ``block``, any M."""
    outputs = []
    for at in range(0, k.shape[1], CHUNK):
        part = slice(at, at + CHUNK)
        out, u = block(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], state)
        state = close(k[:, part], g[:, part], u, state)
        outputs.append(out)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state


def commit(state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> None:
    """Advance ``state`` in place by M tokens, one by one: the only way a committed state changes.

    Args:
        state: [N, dk, dv] float32, N = layers x heads.
        k: [N, M, dk] float32, normalised. v: [N, M, dv] float32. g, beta: [N, M] float32.
    """
    grown = g.exp()
    for t in range(k.shape[1]):
        key = k[:, t]
        state *= grown[:, t, None, None]
        seen = torch.bmm(key.unsqueeze(1), state).squeeze(1)
        delta = beta[:, t, None] * (v[:, t] - seen)
        state.baddbmm_(key.unsqueeze(2), delta.unsqueeze(1))


def causal_conv(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute a depthwise causal convolution and SiLU.

    Written as a product and a sum in float32, not through conv1d: cuDNN may use TF32 there.

    Args:
        inputs: [C, K-1 + M], the K-1 inputs before the block, then the block's.
        weight: [C, K], the last column multiplies the newest input.

    Returns:
        [C, M] in the inputs' dtype.
    """
    kernel_size = weight.shape[-1]
    summed = (inputs.float().unfold(-1, kernel_size, 1) * weight.float().unsqueeze(1)).sum(-1)
    return F.silu(summed.to(inputs.dtype))
