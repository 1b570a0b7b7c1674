"""The causal convolution of a DFlash 2 drafter over the rows of a block (``drafters.dflash2``)."""

from __future__ import annotations

import torch

from dflash_local.kernels.jit import (
    jit,
    overlapping,
    power_of_two,
    runs_kernels,
    start_next_kernel,
    tl,
    wait_for_earlier_kernels,
)

MAX_BLOCK = 512  # channels of one program


def block_convolution(
    rows: torch.Tensor,
    base: torch.Tensor,
    own: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``out[i] = sum of (base[j] + own[i, j]) * rows[i - j] over j (+ residual[i])``, zero before the first.

    Args:
        rows: [M, H]. base: [kernel size, H]. own: [M, kernel size, groups], one number for each group of neighbouring
            channels; rows may lie apart. out: [M, H], not ``rows``; may be ``residual``.
    """
    if not runs_kernels(rows):
        result = block_convolution_reference(rows, base, own)
        return out.copy_(result if residual is None else residual + result)
    count, size = rows.shape
    block = min(power_of_two(size), MAX_BLOCK)
    _block_convolution_kernel[(count, -(-size // block))](
        rows, base, own, out, out if residual is None else residual, own.stride(0), size, own.shape[2],
        size // own.shape[2], len(base), block, residual is not None, num_warps=4, **overlapping(rows),
    )  # fmt: skip
    return out


def block_convolution_reference(rows: torch.Tensor, base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the convolution [..., M, H] in plain PyTorch, also of several blocks side by side."""
    count, groups = rows.shape[-2], own.shape[-1]
    values = rows.unflatten(-1, (groups, -1))
    out = torch.zeros_like(values)
    for back, kernel in enumerate(base.view(len(base), groups, -1)):
        earlier = values[..., : max(count - back, 0), :, :]
        out[..., back:, :, :] += kernel * earlier + own[..., back:, back, :, None] * earlier
    return out.flatten(-2)


# fmt: off
@jit
def _block_convolution_kernel(
    x, base, own, out, residual, own_stride, size, groups, group_size, KERNEL_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr,
):
    # fmt: on
    # One program: BLOCK channels of one row, with those of the rows before it, which lie in the second-level cache.
    # There are as few numbers as rows of a block: what takes time is the launch.
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wait_for_earlier_kernels()
    start_next_kernel()
    total = tl.zeros((BLOCK,), tl.float32)
    for back in tl.static_range(KERNEL_SIZE):
        seen = inside & (row >= back)
        kernel = tl.load(base + back * size + at, mask=seen, other=0.0).to(tl.float32)
        kernel += tl.load(own + row * own_stride + back * groups + at // group_size, mask=seen, other=0.0).to(
            tl.float32
        )
        total += kernel * tl.load(x + (row - back) * size + at, mask=seen, other=0.0).to(tl.float32)
    place = row * size + at
    if ADD:
        # Rounded before the sum, as a layer whose output is added to the residual would be.
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
