"""A Gated-DeltaNet layer's state on the device: a block with its log, a long prompt, copies to return to."""

from __future__ import annotations

import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels import delta_chunk, delta_step
from dflash_local.kernels.delta_step import CycleState, GatedDeltaState
from dflash_local.models.fused.weights import GatedDeltaLayer
from dflash_local.models.recurrent_cache import RecurrentSnapshot


class RecurrentState:
    """One layer's. Every method leaves the committed state as it is but for rows that were kept."""

    def __init__(
        self, shape: GatedDeltaNetConfig, rows: int, device: torch.device, dtype: torch.dtype, cycle_state: CycleState
    ) -> None:
        def wide(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, device=device)

        self.shape, self._cycle_state = shape, cycle_state
        self.log = GatedDeltaState(
            state=wide(shape.num_value_heads, shape.value_head_dim, shape.key_head_dim),
            conv_state=torch.zeros(2, shape.conv_kernel_size - 1, shape.conv_dim, device=device, dtype=dtype),
            inputs=torch.zeros(2, rows, shape.conv_dim, device=device, dtype=dtype),
            keys=wide(2, rows, shape.num_key_heads, shape.key_head_dim),
            values=wide(2, rows, shape.num_value_heads, shape.value_head_dim),
            gates=wide(2, rows, 2, shape.num_value_heads),
            queries=wide(rows, shape.num_key_heads, shape.key_head_dim),
        )
        self._out = wide(rows, shape.num_value_heads, shape.value_head_dim)

    def block(self, projected: torch.Tensor, layer: GatedDeltaLayer, eps: float, out: torch.Tensor) -> torch.Tensor:
        """Outputs [M, value_size] of a block, after its norm and gate, from its projection [M, projection_size]."""
        rows = len(projected)
        delta_step.read_inputs(projected, layer.delta, self.log, self.shape, self._cycle_state)
        delta_step.run_block(rows, self.log, self.shape, self._cycle_state, self._out)
        delta_step.gated_norm(self._out, projected, layer.norm, eps, self.shape, out)
        return out

    def prefill(self, projected: torch.Tensor, layer: GatedDeltaLayer, eps: float) -> torch.Tensor:
        """The same of a prompt's rows, as many as there are, which are committed at once."""
        out = delta_chunk.run_rows(projected, layer.delta, self.log, self.shape)
        result = projected.new_empty(len(projected), self.shape.value_size)
        delta_step.gated_norm(out, projected, layer.norm, eps, self.shape, result)
        return result

    def commit(self, rows: int) -> None:
        """Commit the first ``rows`` of the last block now; both halves of the conv_state are the same then."""
        delta_step.commit(self.log, self.shape, self._cycle_state, rows)

    def rollback(self) -> None:
        """Forget the last block's rows: what had been kept before it is committed and stays so."""
        half = int(self._cycle_state.cycle) % 2
        self.log.conv_state[1 - half] = self.log.conv_state[half]

    def copy(self) -> RecurrentSnapshot:
        """The committed state, to return to."""
        return RecurrentSnapshot((self.log.state.clone(),), (self.log.conv_state.clone(),))

    def restore(self, copy: RecurrentSnapshot) -> None:
        """Return to it."""
        self.log.state.copy_(copy.state[0])
        self.log.conv_state.copy_(copy.conv[0])

    def clear(self) -> None:
        """The state before any token."""
        self.log.state.zero_()
        self.log.conv_state.zero_()
