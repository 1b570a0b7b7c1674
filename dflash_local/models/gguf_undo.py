"""Takes back what a converter to GGUF did to a tensor: to its values, or to the rows of its undecoded blocks."""

from __future__ import annotations

import torch

from dflash_local.checkpoint_files.undo import Add, Interleave, SwapAxes, Undo


def undone(values: torch.Tensor, undo: tuple[Undo, ...]) -> torch.Tensor:
    """A tensor as the model has it.

    Args:
        values: whole, of the shape of its ``TensorInfo``, parts joined. Rows of undecoded blocks [rows, bytes] do as
            well where ``moves_rows_only``.
    """
    for step in undo:
        if isinstance(step, SwapAxes):
            values = _swapped(values, step)
        elif isinstance(step, Interleave):
            values = _interleaved(values, step)
        elif isinstance(step, Add):
            values = values + step.number
        else:
            values = torch.log(-values)
    return values


def _swapped(values: torch.Tensor, step: SwapAxes) -> torch.Tensor:
    axis, end = step.axis, step.start + step.size
    middle = values.narrow(axis, step.start, step.size).unflatten(
        axis, (step.outer, step.first, step.second, step.inner)
    )
    middle = middle.transpose(axis + 1, axis + 2).flatten(axis, axis + 3)
    before, behind = values.narrow(axis, 0, step.start), values.narrow(axis, end, values.shape[axis] - end)
    return torch.cat([before, middle, behind], dim=axis)


def _interleaved(values: torch.Tensor, step: Interleave) -> torch.Tensor:
    kinds = values.split([step.groups * width for width in step.widths])
    grouped = [kind.unflatten(0, (step.groups, width)) for kind, width in zip(kinds, step.widths)]
    return torch.cat(grouped, dim=1).flatten(0, 1)
