"""A Gated-DeltaNet layer: a block with exact rollback, a long prompt, snapshots to return to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dflash_local.checkpoint_files.undo import moves_columns
from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.errors import CheckpointError
from dflash_local.kernels import delta_chunk, delta_step
from dflash_local.kernels.allocate import on_device, on_host
from dflash_local.kernels.delta_step import CycleState, GatedDeltaState, GatedDeltaWeights
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.quantized_weight import Fp8Weight
from dflash_local.layout.gated_delta_net import GatedDeltaNetLayout
from dflash_local.layout.linear import GgufBlocks
from dflash_local.models.fused.formats import Weight
from dflash_local.models.fused.linear import JoinedLinear
from dflash_local.models.fused.part import PartWeights, RunState
from dflash_local.models.fused.weight_tensors import WeightTensors
from dflash_local.models.place import Places
from dflash_local.models.recurrent_cache import RecurrentSnapshot


@dataclass(frozen=True, slots=True)
class GatedDeltaNetWeights(PartWeights["GatedDeltaNet"]):
    """The loaded weights of one layer.

    Attributes:
        at: its module's name. in_proj: rows of q, k, v, z, b, a. small: convolution, decay rates and biases.
        norm: [value head width]. turns: rounds of the key heads in which the output's columns have the value heads.
    """

    config: GatedDeltaNetConfig
    at: str
    in_proj: JoinedLinear
    output: JoinedLinear
    small: GatedDeltaWeights
    norm: torch.Tensor
    eps: float
    turns: int = 1
    places: Places = field(default_factory=dict)

    @classmethod
    def of(cls, config: GatedDeltaNetConfig, at: str, source: WeightTensors) -> GatedDeltaNetWeights:
        """Build it over the tensors of ``GatedDeltaNetLayout.weights``."""
        spec, layout = source.spec, GatedDeltaNetLayout(config)
        in_proj, output = (JoinedLinear.of(product, source) for product in layout.projections(at, spec.hidden_size))
        buffers = layout.small(at, spec)
        conv, norm, rate, bias = source.tensors.take(buffers)
        places: Places = {buffer.name: source.tensors[buffer.name] for buffer in buffers}
        places[buffers[0].name] = conv.unsqueeze(1)  # as it is stored
        places = {**in_proj.places, **output.places, **places}
        small = GatedDeltaWeights(conv, rate, bias)
        return cls(config, at, in_proj, output, small, norm, source.eps, _turns(config, at, source), places)

    @property
    def joined(self) -> tuple[JoinedLinear, JoinedLinear]:
        return self.in_proj, self.output

    def finish(self) -> None:
        """Turn logarithms into rates, and order projections stored by key heads, once all places are filled.

        Raises:
            CheckpointError: rows that go by key heads cannot be put in order with their scales.
        """
        if not self.config.split_projections:
            begin, order = 0, by_parts(self.config)
            for product in self.in_proj.products:  # each holds whole tensors of the checkpoint, whose rows stay inside
                end = begin + product.out_features
                reorder_rows(product.weight, order[begin:end] - begin, f"{self.at}.in_proj")
                begin = end
        PartWeights.finish(self)
        self.small.rate.exp_().neg_()

    def randomize(self, generator: torch.Generator) -> None:
        """Fill random matrices and convolution, a norm of one, rates and biases of zero."""
        PartWeights.randomize(self, generator)
        self.small.conv.normal_(generator=generator)
        self.norm.fill_(1.0)
        self.small.rate.zero_()
        self.small.bias.zero_()

    def bind(self, at: str, run: RunState) -> GatedDeltaNet:
        """Return the layer over a state of its own, ``at`` its name."""
        layout = GatedDeltaNetLayout(self.config)
        *log, out = run.tensors.take(layout.state(at, run.spec))
        projected, mixed = run.tensors.take(layout.activations(run.owner, run.spec))
        host_snapshots = "snapshots" in run.spec.offloaded
        return GatedDeltaNet(self, GatedDeltaState(*log), out, projected, mixed, run.cycle, host_snapshots)


def _turns(config: GatedDeltaNetConfig, at: str, source: WeightTensors) -> int:
    """Return more than one where the output's columns stay in the order of a GGUF file's converter."""
    module = f"{at}.out_proj"
    stored = source.stored.get(f"{module}.weight")
    in_blocks = isinstance(source.spec.format_of(module), GgufBlocks)
    moved = in_blocks and stored is not None and any(map(moves_columns, stored.undo))
    return config.num_value_heads // config.num_key_heads if moved else 1


def by_parts(config: GatedDeltaNetConfig) -> torch.Tensor:
    """Return where rows of q, k, v, z, b, a lie in the interleaved projections, one below the other: [rows] int64."""
    found, begin = [], 0
    for sizes in (config.qkvz_rows, config.ba_rows):
        end = begin + config.num_key_heads * sum(sizes)
        parts = torch.arange(begin, end).view(config.num_key_heads, -1).split(sizes, 1)
        found += [part.flatten() for part in parts]
        begin = end
    return torch.cat(found)


class GatedDeltaNet:
    """One layer's, over its state. Every method leaves the committed state as it is but for rows that were kept."""

    def __init__(
        self,
        weights: GatedDeltaNetWeights,
        log: GatedDeltaState,
        out: torch.Tensor,
        projected: torch.Tensor,
        mixed: torch.Tensor,
        cycle: CycleState,
        host_snapshots: bool = False,
    ) -> None:
        """Put it together.

        Args:
            out: [rows, value heads, value width]. projected, mixed: room for a block's rows before and after.
            host_snapshots: copies of the state lie in pinned host memory.
        """
        self.weights, self.log, self._config, self._cycle = weights, log, weights.config, cycle
        self._out, self._projected, self._mixed = out, projected, mixed
        self._copied = on_host if host_snapshots else torch.clone

    def block(
        self, normed: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, max_seq_len: int
    ) -> torch.Tensor:
        """Compute ``out`` [M, H] = the layer's result (+ residual) of a block's rows, after their norm and gate."""
        rows, weights = len(normed), self.weights
        projected = weights.in_proj(normed, self._projected[:rows])
        delta_step.read_inputs(projected, weights.small, self.log, self._config, self._cycle)
        delta_step.run_block(rows, self.log, self._config, self._cycle, self._out)
        mixed = self._mixed[:rows]
        delta_step.gated_norm(self._out, projected, weights.norm, weights.eps, self._config, mixed, weights.turns)
        return weights.output(mixed, out, residual)

    def prefill(self, normed: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return its result [M, H] of a prompt's rows, which are committed at once; or ``residual`` with that added."""
        weights = self.weights
        projected = weights.in_proj.prefill(normed)
        out = delta_chunk.run_rows(projected, weights.small, self.log, self._config)
        mixed = projected.new_empty(len(projected), self._config.value_size)
        delta_step.gated_norm(out, projected, weights.norm, weights.eps, self._config, mixed, weights.turns)
        return weights.output.prefill(mixed, residual)

    def state_bytes(self, positions: int) -> int:
        """Return bytes of the committed state, whatever the number of positions."""
        return self.log.state.nbytes

    def commit(self, rows: int) -> None:
        """Commit the first ``rows`` of the last block now; both halves of the convolution's state are the same then."""
        with on_device(self.log.state.device):
            delta_step.commit(self.log, self._config, self._cycle, rows)

    def rollback(self) -> None:
        half = int(self._cycle.cycle) % 2
        self.log.conv_state[1 - half] = self.log.conv_state[half]

    def snapshot(self) -> RecurrentSnapshot:
        return RecurrentSnapshot((self._copied(self.log.state),), (self._copied(self.log.conv_state),))

    def restore(self, snapshot: RecurrentSnapshot) -> None:
        self.log.state.copy_(snapshot.state[0])
        self.log.conv_state.copy_(snapshot.conv[0])

    def clear(self) -> None:
        self.log.state.zero_()
        self.log.conv_state.zero_()


def reorder_rows(weight: Weight, order: torch.Tensor, name: str) -> None:
    """Move row ``order[i]`` of a weight [N, K] to row i, in place; beside it a copy of its codes is held.

    Args:
        order: [N] int64. name: of its module, for messages.

    Raises:
        CheckpointError: rows that share a scale would come to lie in blocks of different scales.
        TypeError: it is packed for kernels already.
    """
    if isinstance(weight, torch.Tensor):
        _move(weight, order)
        return
    if isinstance(weight, FragmentWeight):
        raise TypeError(f"{name}: packed rows keep their order")
    block = weight.block[0] if isinstance(weight, Fp8Weight) else 1
    from_blocks = order // block
    scales = from_blocks[::block]
    if not torch.equal(scales.repeat_interleave(block)[: len(order)], from_blocks):
        raise CheckpointError(
            f"{name}: its rows go by key heads, which the blocks of {block} rows of its fp8 weights cross",
            "use --engine reference, or a variant with a scale for each row or group",
        )
    _move(weight.codes, order)
    _move(weight.scales, scales)
    for name in ("zeros", "row_scales", "minima", "factors"):
        beside = getattr(weight, name, None)
        if beside is not None:
            _move(beside, order)


def _move(rows: torch.Tensor, order: torch.Tensor) -> None:
    """Move rows as bytes where they are of one: not every version of torch takes rows of float8 by number."""
    plain = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    plain.copy_(plain[order.to(rows.device)])
