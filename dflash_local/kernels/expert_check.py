"""Check whether experts' kernels give PyTorch's numbers, tried with rows and routings that would show mistakes.

Letters as in ``expert_gemm``: M rows, E experts, S experts of a row, H wide, I wide inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from dflash_local.config.features import ClampedSwiGLU
from dflash_local.kernels import expert_gemm
from dflash_local.kernels.expert_gemm import DownConfig, ExpertConfig, GateUpConfig, Mixture
from dflash_local.kernels.experts import (
    Activation,
    ExpertWeight,
    Routing,
    RoutingOptions,
    experts_down,
    experts_swiglu,
    route,
)
from dflash_local.kernels.product_check import MARGIN, MAX_ERROR, ONE_HOT_ERROR, mixed_rows

UNWRITTEN = -7  # where a kernel must not write; as an expert or a slot, a fault for one that reads it
ROUNDING = 2**-8  # of a sum in bfloat16
ONE_HOT_BLOCKS = 4  # blocks of one-hot rows, each of which shows other columns
TOLERANCE = 1e-2  # of a row's weights, which are rounded to bfloat16
STEPS = 64  # logits are multiples of 1 / 64: equal, or so far apart that no rounding changes their order


class Routed(NamedTuple):
    """Hold what ``expert_gemm.route`` makes: weights and experts [M, S], and the list of the experts that occur."""

    weights: torch.Tensor
    experts: torch.Tensor
    expert_list: torch.Tensor


def list_of(experts: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """Build the list [``list_words``] int32 of experts [M, S]; ``UNWRITTEN`` where it says nothing."""
    flat = experts.flatten().cpu()
    found, counts = flat.unique(return_counts=True)
    words = torch.full((mixture.list_words,), UNWRITTEN, dtype=torch.int32)
    starts, slots = 1 + mixture.all_experts, 2 + 2 * mixture.all_experts
    words[0] = len(found)
    words[1 : 1 + len(found)] = found
    words[starts : starts + len(found) + 1] = F.pad(counts.cumsum(0), (1, 0))
    words[slots : slots + len(flat)] = flat.argsort(stable=True)
    return words.to(experts.device)


def routings(mixture: Mixture, rows: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield [rows, S] int32: as many different experts as rows can have, all rows' the same, and random ones."""
    generator = torch.Generator().manual_seed(rows)
    places = torch.arange(rows * mixture.top_k).view(rows, -1)
    same = torch.randperm(mixture.experts, generator=generator)[: mixture.top_k]
    random = torch.rand(rows, mixture.experts, generator=generator).argsort(1)[:, : mixture.top_k]
    for routed in (places % mixture.experts, same.expand(rows, -1), random):
        shared = torch.full((rows, mixture.slots - mixture.top_k), mixture.experts)
        yield torch.cat((routed, shared), 1).to(device, torch.int32)


class _ExpertCase(NamedTuple):
    """Rows ``x`` [M, H] (of down [M, S, I]), their float32 product and its bound, [M, S, I] (of down [M, H])."""

    x: torch.Tensor
    routed: Routed
    want: torch.Tensor
    bound: torch.Tensor


class ExpertCheck:
    """All experts' weight in fragments, and cases of ``rows`` (8 or 16; the last: fewer) for one of the products."""

    def __init__(self, weight: ExpertWeight, mixture: Mixture, gate_up: bool, rows: int) -> None:
        self._weight, self._mixture, self._gate_up = weight, mixture, gate_up
        wide = None if weight.bias is None else weight.bias.float()
        self._wide = replace(weight, bias=wide)
        self._device = weight.weight.device
        self._cases = list(self._made(rows))

    def passes(self, config: ExpertConfig) -> bool:
        """Return True where it is right, twice the same, and writes only its results; raises as ``KernelTrial``."""
        seen = torch.ones((), dtype=torch.bool, device=self._device)
        for case in self._cases:
            if self._gate_up:
                verdicts = self._gate_up_verdicts(case, cast(GateUpConfig, config))
            else:
                verdicts = self._down_verdicts(case, cast(DownConfig, config))
            for verdict in verdicts:
                seen &= verdict
        return bool(seen)

    def _made(self, rows: int) -> Iterator[_ExpertCase]:
        """Yield mixed rows by each routing, fewer rows, and one-hot rows all over K."""
        in_features, slots = self._weight.in_features, 1 if self._gate_up else self._mixture.slots
        mixed = mixed_rows(rows * slots, in_features, self._device).view(slots, rows, -1).transpose(0, 1)
        for experts in routings(self._mixture, rows, self._device):
            yield self._case(mixed, experts)
        yield self._case(mixed[: rows - 3], experts[: rows - 3])
        places = torch.linspace(0, in_features - 1, ONE_HOT_BLOCKS * rows * slots, device=self._device).long()
        one_hot = torch.zeros(len(places), in_features, device=self._device).scatter_(1, places[:, None], 1.0)
        for block in one_hot.bfloat16().view(ONE_HOT_BLOCKS, rows, slots, -1):
            yield self._case(block, experts.roll(1, 0), one_hot=True)
            experts = experts.roll(1, 0)

    def _case(self, x: torch.Tensor, experts: torch.Tensor, one_hot: bool = False) -> _ExpertCase:
        """Make a case of x [M, S, K], or [M, 1, K] of the first product; one-hot: one slot of a row has a weight."""
        rows, slots = experts.shape
        generator = torch.Generator(self._device).manual_seed(rows)
        weights = torch.rand(rows, slots, device=self._device, generator=generator) + 1 / slots
        if one_hot:
            taken = torch.arange(rows, device=self._device) % slots
            weights = F.one_hot(taken, slots).float()
        routing, features = Routing(weights.bfloat16().float(), experts), self._weight.out_features
        if self._gate_up:
            x = x[:, 0].contiguous()
            wide = torch.empty(rows, slots, features // 2, device=self._device)
            want = experts_swiglu(x.float(), self._wide, routing, wide, activation_of(self._mixture))
        else:
            x = x.contiguous()
            wide = torch.empty(rows, features, device=self._device)
            want = experts_down(x.float(), self._wide, routing, wide)
        error = ONE_HOT_ERROR if one_hot and not self._gate_up else MAX_ERROR
        bound = error * (want.abs() + want.square().mean(-1, keepdim=True).sqrt() / 2)
        return _ExpertCase(x, Routed(*routing, list_of(experts, self._mixture)), want, bound)

    def _gate_up_verdicts(self, case: _ExpertCase, config: GateUpConfig) -> Iterator[torch.Tensor]:
        rows = len(case.x)
        first, second = (case.x.new_full((rows + 2, *case.want.shape[1:]), float("nan")) for _ in range(2))
        for room in (first, second):
            inside = room[1 : rows + 1]
            expert_gemm.gate_up(case.x, self._weight, self._mixture, case.routed.expert_list, inside, config)
        yield ((first[1 : rows + 1] - case.want).abs() <= case.bound).all()
        yield (second[1 : rows + 1] == first[1 : rows + 1]).all()
        yield first[0].isnan().all() & first[rows + 1].isnan().all()

    def _down_verdicts(self, case: _ExpertCase, config: DownConfig) -> Iterator[torch.Tensor]:
        rows, features = case.want.shape
        inside = slice(MARGIN, MARGIN + features)

        def product(added: bool) -> torch.Tensor:
            wide = case.x.new_full((rows, features + 2 * MARGIN), float("nan"))
            out = wide[:, inside]
            if added:
                out.copy_(residual)
            expert_gemm.down(case.x, self._weight, self._mixture, case.routed, out, config, out if added else None)
            return wide

        residual = torch.randn(rows, features, device=self._device).bfloat16()
        first, second, added = product(False), product(False), product(True)[:, inside]
        yield ((first[:, inside] - case.want).abs() <= case.bound).all()
        yield (second[:, inside] == first[:, inside]).all()
        yield first[:, :MARGIN].isnan().all() & first[:, inside.stop :].isnan().all()
        want = case.want + residual
        yield ((added - want).abs() <= case.bound + ROUNDING * want.abs()).all()


def activation_of(mixture: Mixture) -> Activation:
    if mixture.clamp is None:
        return "silu"
    limit, alpha = mixture.clamp
    return ClampedSwiGLU(alpha=alpha, limit=limit)


def routing_options(mixture: Mixture, bias: torch.Tensor | None) -> RoutingOptions:
    """Return how its rows choose. ``bias``: of the router."""
    return RoutingOptions(mixture.experts, mixture.normed, mixture.shared > 0, mixture.shared == 2, bias)


class RouteCheck:
    """Logits of rows, and what they take."""

    def __init__(self, mixture: Mixture, biased: bool, device: torch.device) -> None:
        self._mixture, self._device = mixture, device
        self._bias = _logits(1, mixture.experts, 100, device)[0] if biased else None
        self._options = routing_options(mixture, self._bias)

    def passes(self, most: int) -> bool:
        """Return True where up to ``most`` rows take what they should, and no more is written."""
        columns = self._mixture.experts + (self._mixture.shared == 2)
        blocks = [_logits(rows, columns, seed, self._device) for seed, rows in enumerate((most, most - 3, 1))]
        blocks += [torch.zeros_like(blocks[0]), blocks[0].roll(1, 1), blocks[0][:1].expand(most, -1)]
        blocks[-2][::2, self._mixture.experts // 2] = 2.0**6  # takes all of the weight
        return all(self._is_right(logits) for logits in blocks)

    def _is_right(self, logits: torch.Tensor) -> bool:
        rows, slots, device = len(logits), self._mixture.slots, self._device
        wanted = route(
            logits,
            self._options,
            Routing(
                torch.empty(rows, slots, device=device), torch.empty(rows, slots, device=device, dtype=torch.int32)
            ),
        )
        weights = torch.full((rows + 2, slots), float("nan"), device=device)
        experts = torch.full((rows + 2, slots), UNWRITTEN, device=device, dtype=torch.int32)
        words = torch.full((self._mixture.list_words + 2,), UNWRITTEN, device=device, dtype=torch.int32)
        distinct = torch.full((3,), UNWRITTEN, device=device, dtype=torch.int32)
        inside = slice(1, rows + 1)
        expert_gemm.route(
            logits, self._mixture, weights[inside], experts[inside], words[1:-1], self._bias, distinct[1:2]
        )
        listed = list_of(wanted.experts, self._mixture)
        routed = int(listed[0]) - (self._mixture.shared > 0)
        return (
            torch.equal(experts[inside], wanted.experts)
            and torch.allclose(weights[inside], wanted.weights, rtol=TOLERANCE, atol=0)
            and torch.equal(words, F.pad(listed, (1, 1), value=UNWRITTEN))
            and distinct.tolist() == [UNWRITTEN, routed, UNWRITTEN]
            and bool(weights[:: rows + 1].isnan().all() & (experts[:: rows + 1] == UNWRITTEN).all())
        )


def _logits(rows: int, columns: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return [rows, columns] bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)
    found = torch.randn(rows, columns, device=device, generator=generator)
    return ((found * STEPS).round() / STEPS).bfloat16()
