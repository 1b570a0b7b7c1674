"""Tensors of a Gated-DeltaNet layer: small weights, the committed state, and the log of two blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.config.module_names import GATED_DELTA_NET, INTERLEAVED
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.linear import LinearSpec, MatrixPart
from dflash_local.layout.part_layout import EngineSpec, PartLayout, WeightSpec

CHUNK = 64  # rows of a prompt that are solved together


@dataclass(frozen=True, slots=True)
class GatedDeltaNetLayout(PartLayout):
    config: GatedDeltaNetConfig
    module: str = GATED_DELTA_NET
    title: str = "recurrent layer"

    def projections(self, at: str, hidden_size: int) -> tuple[LinearSpec, LinearSpec]:
        """Return queries, keys and values, z, b and a in one product; and the output's."""
        config = self.config
        sizes: tuple[tuple[str, int], ...] = (
            ("in_proj_qkv", config.conv_dim),
            ("in_proj_z", config.value_size),
            ("in_proj_b", config.num_value_heads),
            ("in_proj_a", config.num_value_heads),
        )
        if not config.split_projections:
            sizes = tuple(zip(INTERLEAVED, (config.conv_dim + config.value_size, 2 * config.num_value_heads)))
        parts = tuple(MatrixPart(f"{at}.{name}", size) for name, size in sizes)
        output = MatrixPart(f"{at}.out_proj", hidden_size)
        return LinearSpec(f"{at}.in_proj", hidden_size, parts), LinearSpec(output.module, config.value_size, (output,))

    def weights(self, at: str, spec: WeightSpec) -> Iterator[Buffer]:
        """Return projections, convolution, norm; decay rates and biases are float32 whatever the dtype."""
        yield from spec.linear(*self.projections(at, spec.hidden_size))
        yield from self.small(at, spec)

    def small(self, at: str, spec: WeightSpec) -> tuple[Buffer, Buffer, Buffer, Buffer]:
        """Return convolution, norm, decay rates and biases."""
        config = self.config
        return (
            Buffer(f"{at}.conv1d.weight", (config.conv_dim, config.conv_kernel_size), spec.dtype, spec.group),
            Buffer(f"{at}.norm.weight", (config.value_head_dim,), spec.dtype, spec.group),
            Buffer(f"{at}.A_log", (config.num_value_heads,), "float32", spec.group),
            Buffer(f"{at}.dt_bias", (config.num_value_heads,), "float32", spec.group),
        )

    def state(self, at: str, spec: EngineSpec) -> Iterator[Buffer]:
        return iter(self.state_buffers(at, spec.rows, spec.dtype))

    def state_buffers(self, at: str, rows: int, dtype: str) -> tuple[Buffer, ...]:
        """Return committed state, the log of two blocks (one is read while the other is written), a block's outputs."""
        config = self.config
        keys = (config.num_key_heads, config.key_head_dim)
        values = (config.num_value_heads, config.value_head_dim)

        def state(name: str, *shape: int, dtype: str = "float32") -> Buffer:
            return Buffer(f"{at}.{name}", shape, dtype, "recurrent state", zeroed=True)

        return (
            state("state", *values, config.key_head_dim),
            state("conv_state", 2, config.conv_kernel_size - 1, config.conv_dim, dtype=dtype),
            state("inputs", 2, rows, config.conv_dim, dtype=dtype),
            state("keys", 2, rows, *keys),
            state("values", 2, rows, *values),
            state("gates", 2, rows, 2, config.num_value_heads),
            state("queries", rows, *keys),
            state("out", rows, *values),
        )

    def activations(self, owner: str, spec: EngineSpec) -> Iterator[Buffer]:
        return iter(self.block_buffers(owner, spec.rows, spec.dtype))

    def block_buffers(self, owner: str, rows: int, dtype: str) -> tuple[Buffer, Buffer]:
        """Return a block's rows before and after the recurrence, for one layer after the other."""
        projected, mixed = self.config.projection_size, self.config.value_size
        return (
            Buffer(f"{owner}.projected.{projected}", (rows, projected), dtype, "buffers"),
            Buffer(f"{owner}.mixed.{mixed}", (rows, mixed), dtype, "buffers"),
        )

    def prefill_bytes(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        """Sum the projection; convolved rows with norms and gates; two of each chunk's three matrices, the output."""
        config, values = self.config, self.config.num_value_heads
        rows = -(-rows // CHUNK) * CHUNK
        norms = 4 * 2 * (config.num_key_heads + values)
        matrices = 4 * values * (2 * CHUNK + 4) + 4 * max(config.value_size, values * CHUNK)
        return rows * ((config.projection_size + config.conv_dim) * item_bytes + norms + matrices)

    def snapshot_bytes(self, item_bytes: int) -> int:
        """Return bytes of the state and of both halves of the convolution's. ``item_bytes``: of an activation."""
        config = self.config
        state = 4 * config.value_size * config.key_head_dim
        return state + 2 * (config.conv_kernel_size - 1) * config.conv_dim * item_bytes
