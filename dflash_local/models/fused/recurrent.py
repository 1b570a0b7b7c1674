"""A Gated-DeltaNet layer's state on the device: a block with its tape, a long prompt, copies to return to."""

from __future__ import annotations

import torch

from dflash_local.kernels import delta_chunk, delta_step
from dflash_local.kernels.delta_step import DeltaShape, DeltaState, Turn
from dflash_local.models.fused.weights import DeltaLayer
from dflash_local.models.recurrent_cache import RecurrentSnapshot


class RecurrentState:
    """One layer's. Every method leaves the committed state as it is but for rows that were kept."""

    def __init__(self, shape: DeltaShape, rows: int, device: torch.device, dtype: torch.dtype, turn: Turn) -> None:
        def wide(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, device=device)

        self.shape, self._turn = shape, turn
        self.tape = DeltaState(
            state=wide(shape.values, shape.value_width, shape.key_width),
            window=torch.zeros(2, shape.taps - 1, shape.channels, device=device, dtype=dtype),
            inputs=torch.zeros(2, rows, shape.channels, device=device, dtype=dtype),
            keys=wide(2, rows, shape.keys, shape.key_width),
            values=wide(2, rows, shape.values, shape.value_width),
            gates=wide(2, rows, 2, shape.values),
            queries=wide(rows, shape.keys, shape.key_width),
        )
        self._out = wide(rows, shape.values, shape.value_width)

    def block(self, projected: torch.Tensor, layer: DeltaLayer, eps: float, out: torch.Tensor) -> torch.Tensor:
        """Outputs [M, heads x width] of a block, after its norm and gate, from its projection [M, columns]."""
        rows = len(projected)
        delta_step.read_inputs(projected, layer.small, self.tape, self.shape, self._turn)
        delta_step.run_block(rows, self.tape, self.shape, self._turn, self._out)
        delta_step.gated_norm(self._out, projected, layer.gain, eps, self.shape, out)
        return out

    def many(self, projected: torch.Tensor, layer: DeltaLayer, eps: float) -> torch.Tensor:
        """The same of a prompt's rows, as many as there are, which are committed at once."""
        out = delta_chunk.run_rows(projected, layer.small, self.tape, self.shape)
        result = projected.new_empty(len(projected), self.shape.values * self.shape.value_width)
        delta_step.gated_norm(out, projected, layer.gain, eps, self.shape, result)
        return result

    def settle(self, rows: int) -> None:
        """Commit the first ``rows`` of the last block now; both halves of the window are the same then."""
        delta_step.settle(self.tape, self.shape, self._turn, rows)

    def take_back(self) -> None:
        """Forget the last block's rows: what had been kept before it is committed and stays so."""
        half = int(self._turn.serial) % 2
        self.tape.window[1 - half] = self.tape.window[half]

    def copy(self) -> RecurrentSnapshot:
        """The committed state, to return to."""
        return RecurrentSnapshot((self.tape.state.clone(),), (self.tape.window.clone(),))

    def restore(self, copy: RecurrentSnapshot) -> None:
        """Return to it."""
        self.tape.state.copy_(copy.state[0])
        self.tape.window.copy_(copy.conv[0])

    def clear(self) -> None:
        """The state before any token."""
        self.tape.state.zero_()
        self.tape.window.zero_()
