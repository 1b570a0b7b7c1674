"""A drafted run of a fused hybrid target whose committed rows are recorded, and the state that they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.sampling import Sampler
from dflash_local.kernels import gated_delta
from dflash_local.request import SamplingParams

Rows = dict[int, list[tuple[torch.Tensor, ...]]]


@torch.inference_mode()
def record(runner: FusedRunner, prompt: Sequence[int], new: int, block: int) -> tuple[Rows, Rows, list[int]]:
    """Decode ``new`` tokens.

    Returns:
        by layer: the state after the prompt (one tuple), and (keys, values, gates) of every cycle's committed rows;
        and the acceptance lengths.
    """
    target = runner.target
    sampler = Sampler(SamplingParams(), 1, target.vocab_size, torch.tensor([0], device=target.device))
    runner.restart(0, None)
    runner.begin(sampler, frozenset(), block, block > 1)
    runner.end_at(len(prompt) + new, exactly=True)  # each cycle is read before the next one begins
    for _ in runner.prefill(prompt, 0):
        pass
    states: dict[int, Any] = target.states
    before: Rows = {index: [(state.log.state.clone(),)] for index, state in states.items()}
    rows: Rows = {index: [] for index in target.states}
    lengths: list[int] = []
    while len(runner.ids) < len(prompt) + new:
        runner.launch()
        lengths += [len(cycle.ids) for cycle in runner.collect()]
        kept, half = int(target.kept), (int(target.cycle) - 1) % 2
        for index, state in states.items():
            log = state.log
            parts = (log.keys[half, :kept], log.values[half, :kept], log.gates[half, :kept])
            rows[index].append(tuple(part.clone() for part in parts))
    return before, rows, lengths


@torch.inference_mode()
def replayed(before: torch.Tensor, rows: Sequence[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """The state [value heads, dv, dk] that the recorded rows give, committed one by one in float64."""
    keys, values, gates = (torch.cat(parts).double() for parts in zip(*rows, strict=True))
    state = before.double().transpose(1, 2).contiguous()  # [heads, dk, dv]
    repeats = values.shape[1] // keys.shape[1]
    k = keys.repeat_interleave(repeats, 1).transpose(0, 1)
    g, beta = gates[:, 0].t(), gates[:, 1].t()
    gated_delta.commit(state, k, values.transpose(0, 1), g, beta)
    return state.transpose(1, 2)
