"""State of the recurrent layers and its exact rollback: committed state, raw recurrent log, commit.

A verify leaves the committed state untouched and logs each token's raw inputs; committing m tokens applies the first m.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_local.kernels import gated_delta


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Sizes of one Gated-DeltaNet layer; heads are the value heads."""

    conv_dim: int
    conv_kernel_size: int
    num_heads: int
    key_head_dim: int
    value_head_dim: int


@dataclass(frozen=True, slots=True)
class RecurrentSnapshot:
    """A copy of every layer's committed state."""

    state: tuple[torch.Tensor, ...]
    conv: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.state, *self.conv))


class RecurrentCache:
    """Committed state and log of all recurrent layers that share a device, stacked for one commit.

    Attributes:
        state: [layers, num_heads, key_head_dim, value_head_dim] float32, committed.
        conv: [layers, conv_dim, conv_kernel_size-1], the last inputs of the convolution, committed.
    """

    def __init__(self, layers: int, shape: RecurrentShape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device, self.dtype = device, dtype
        self.state = torch.zeros(layers, shape.num_heads, shape.key_head_dim, shape.value_head_dim, device=device)
        self.conv = torch.zeros(layers, shape.conv_dim, shape.conv_kernel_size - 1, device=device, dtype=dtype)
        self.recording = False
        self._allocate_log(8)

    def _allocate_log(self, rows: int) -> None:
        layers, heads = self.state.shape[:2]
        self._log_rows = rows
        self._k = self.state.new_empty(layers, heads, rows, self.shape.key_head_dim)
        self._v = self.state.new_empty(layers, heads, rows, self.shape.value_head_dim)
        self._gates = self.state.new_empty(2, layers, heads, rows)
        self._inputs = self.conv.new_empty(layers, self.shape.conv_dim, self.shape.conv_kernel_size - 1 + rows)

    def begin(self, rows: int, recording: bool) -> None:
        """Start a forward over ``rows`` tokens that records them (verify) or commits them at once (prefill)."""
        self.recording = recording
        if recording and rows > self._log_rows:
            self._allocate_log(rows)

    def conv_inputs(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the convolution takes [C, conv_kernel_size-1 + M]: the committed tail, then ``inputs`` [C, M]."""
        joined = torch.cat((self.conv[layer], inputs), dim=-1)
        if self.recording:
            self._inputs[layer, :, : joined.shape[-1]] = joined
        else:
            self.conv[layer] = joined[:, inputs.shape[-1] :]
        return joined

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Return outputs [heads, M, value_dim] of the new tokens; shapes as ``gated_delta.block``."""
        if not self.recording:
            out, self.state[layer] = gated_delta.chunked(q, k, v, g, beta, self.state[layer])
            return out
        rows = k.shape[1]
        self._k[layer, :, :rows] = k
        self._v[layer, :, :rows] = v
        self._gates[0, layer, :, :rows] = g
        self._gates[1, layer, :, :rows] = beta
        return gated_delta.block(q, k, v, g, beta, self.state[layer])[0]

    def commit(self, rows: int) -> None:
        """Commit the first ``rows`` tokens of the log."""
        if rows == 0:
            return
        layers, heads = self.state.shape[:2]
        gated_delta.commit(
            self.state.view(layers * heads, self.shape.key_head_dim, self.shape.value_head_dim),
            self._k[:, :, :rows].reshape(layers * heads, rows, -1),
            self._v[:, :, :rows].reshape(layers * heads, rows, -1),
            self._gates[0, :, :, :rows].reshape(layers * heads, rows),
            self._gates[1, :, :, :rows].reshape(layers * heads, rows),
        )
        self.conv.copy_(self._inputs[:, :, rows : rows + self.shape.conv_kernel_size - 1])

    def log(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Return copies of the log's first ``rows`` tokens (k, v, g, beta, conv inputs), for tests."""
        kept = self._inputs[:, :, : rows + self.shape.conv_kernel_size - 1]
        parts = (self._k[:, :, :rows], self._v[:, :, :rows], self._gates[0, :, :, :rows], self._gates[1, :, :, :rows])
        return tuple(x.clone() for x in (*parts, kept))

    def clear(self) -> None:
        self.state.zero_()
        self.conv.zero_()
