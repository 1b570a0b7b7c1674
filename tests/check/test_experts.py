"""Products of mixtures against the decoded experts: right as they are, named when one expert's is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_local.check import experts
from dflash_local.check.experts import try_experts, try_mixture
from dflash_local.check.product_error import Tried
from dflash_local.check.products import check_products
from dflash_local.kernels import experts as reference
from dflash_local.kernels.expert_prefill import experts_prefill
from dflash_local.kernels.experts import ExpertWeight, Routing
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused import moe
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.families import save_model
from tests.quantized_checkpoints import experts_in_mxfp4, save_quantized

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
STORED = (
    ("qwen3_moe", "", None),
    ("qwen3_moe", "gptq", None),
    ("qwen3_next", "", "int4"),
    ("qwen3_5_moe", "fp8", None),
    ("qwen3_5_moe", "", "int8"),
    ("gpt_oss", "", None),
    ("gpt_oss", "mxfp4", None),
)
EACH_DTYPE = (
    pytest.param(torch.float32, marks=pytest.mark.slow, id="float32"),
    pytest.param(torch.bfloat16, id="bfloat16"),
)
Open = Callable[..., FusedTarget]


@pytest.fixture(scope="module")
def open_target(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """A fused target over weights of its own."""
    root = tmp_path_factory.mktemp("mixtures")

    @cache
    def stored(family: str, dialect: str) -> Path:
        folder = root / f"{family} {dialect}"
        if family != "gpt_oss":
            sizes = SIZES
        else:
            sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
        if dialect and dialect != "mxfp4":
            return save_quantized(family, folder, dialect, sizes=sizes)[0]
        save_model(family, folder, **sizes)
        if dialect:
            experts_in_mxfp4(folder)
        return folder

    def build(
        family: str, dialect: str = "", quantize: str | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> FusedTarget:
        files = Checkpoint.open(stored(family, dialect))
        facts = TargetFacts.from_checkpoint(files).quantized(quantize)
        weights = read_weights(files, facts, torch.device("cpu"), dtype)
        return FusedTarget(weights, facts.model, (0, 2), 64, 8)

    return build


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize(("family", "dialect", "quantize"), STORED)
def test_sound_experts_are_right(
    family: str, dialect: str, quantize: str | None, dtype: torch.dtype, open_target: Open
) -> None:
    target = open_target(family, dialect, quantize, dtype)
    few, many = try_experts(target)  # all layers are of one kind
    assert max(few.error, many.error) < 0.5, "far below, or the bound would be luck"
    assert (dtype == torch.float32) == (max(few.error, many.error) < 1e-2), "which has a bound of its own"
    assert few.rows == target.rows and many.rows > 64 and "experts" in few.name


def test_the_finding_on_the_format_has_the_experts(open_target: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SimpleNamespace(target=open_target("gpt_oss", "mxfp4"), proposer=None)
    session: Any = SimpleNamespace(runner=runner)
    sound = check_products(session)
    assert sound.state == "ok" and any("experts, 2 a row" in name for name in sound.figures)

    def without_the_last(intermediate: Any, down: Any, routing: Any, out: Any, residual: Any = None) -> Any:
        fewer = Routing(routing.weights[:, :-1], routing.experts[:, :-1])
        return reference.experts_down(intermediate[:, :-1], down, fewer, out, residual)

    monkeypatch.setattr(moe, "experts_down", without_the_last)
    found = check_products(session)
    assert found.state == "failed" and "experts, 2 a row, Fp4Weight" in found.text


def test_layers_that_are_stored_otherwise_are_a_kind_of_their_own(open_target: Open) -> None:
    target = open_target("qwen3_moe")
    matrices = target.mixtures[2].weights.experts
    matrices.down = replace(matrices.down, bias=torch.zeros(8, 64, dtype=torch.bfloat16))
    assert len([*try_experts(target)]) == 4


def test_channels_of_large_weights_are_no_fault(open_target: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 20 times as large, whose rounding is as much larger; each product is off by as much as decoding may be."""
    target = open_target("qwen3_moe")
    part = target.mixtures[0]
    for each in part.weights.experts.matrices:
        each.weight.view(each.experts, each.out_features, -1)[:, :4] *= 20
    exact = ExpertWeight.rows

    def rounded(self: ExpertWeight, expert: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        found = exact(self, expert, rows, dtype)
        if dtype == torch.float32:
            return found
        noise = torch.rand(found.shape, generator=torch.Generator().manual_seed(expert))
        return (found.float() * (1 + 2**-8 * (2 * noise - 1))).to(dtype)

    monkeypatch.setattr(ExpertWeight, "rows", rounded)
    few, _ = try_mixture(part, 8)
    assert 0.1 < few.error < 1


def test_what_float16_does_not_hold_is_no_fault_of_a_product(
    open_target: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with an outlier overflow between the products; the others are held against their bounds."""
    target = open_target("qwen3_moe", dtype=torch.float16)
    target.mixtures[0].weights.experts.gate_up.weight.mul_(40)
    part = target.mixtures[0]
    x, logits = experts._rows(part), experts._logits(part)
    assert part.prefill_routed(x, part.routing(logits)).isfinite().all(1).float().mean() < 0.9
    assert max(each.error for each in try_mixture(part, 8)) < 1
    take_the_next_expert(monkeypatch)
    assert wrong_paths(*try_mixture(part, 8)) == "few"


def lose_last_column_of_last_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExpertWeight.product

    def product(self: ExpertWeight, x: Any, expert: int, out: Any = None) -> Any:
        if expert == self.experts - 1:
            x = torch.cat((x[:, :-1], torch.zeros_like(x[:, :1])), 1)
        return exact(self, x, expert, out)

    monkeypatch.setattr(ExpertWeight, "product", product)


def take_the_next_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second product, where the second should be taken."""

    def down(intermediate: Any, weight: Any, routing: Routing, out: Any, residual: Any = None) -> Any:
        wrong = torch.where(routing.experts == 1, 2, routing.experts)
        return reference.experts_down(intermediate, weight, Routing(routing.weights, wrong), out, residual)

    monkeypatch.setattr(moe, "experts_down", down)


def weigh_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(intermediate: Any, weight: Any, routing: Routing, out: Any, residual: Any = None) -> Any:
        same = torch.full_like(routing.weights, 1 / routing.weights.shape[1])
        return reference.experts_down(intermediate, weight, Routing(same, routing.experts), out, residual)

    monkeypatch.setattr(moe, "experts_down", down)


def exchange_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = reference.gated
    monkeypatch.setattr(reference, "gated", lambda both, act: exact(torch.cat(both.chunk(2, -1)[::-1], -1), act))


def ignore_the_clamp(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = reference.gated
    monkeypatch.setattr(reference, "gated", lambda both, act: exact(both, replace(act, limit=1e30)))


def lose_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExpertWeight.product

    def product(self: ExpertWeight, x: Any, expert: int, out: Any = None) -> Any:
        return exact(replace(self, bias=None) if expert == 2 else self, x, expert, out)

    monkeypatch.setattr(ExpertWeight, "product", product)


def scatter_to_the_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last two rows are exchanged, which is right for the zeros in one of them alone."""

    def prefill(*given: Any) -> Any:
        found = experts_prefill(*given)
        found[-4:-2] = found[-4:-2].flip(0)
        return found

    monkeypatch.setattr(moe, "experts_prefill", prefill)


GPT_OSS = ("gpt_oss", "mxfp4")
PLANTED = (
    (lose_last_column_of_last_expert, "few and many"),
    (take_the_next_expert, "few"),
    (weigh_all_the_same, "few"),
    (exchange_gate_and_up, "few"),
    (scatter_to_the_wrong_row, "many"),
)
CASES = [(*each, stored) for stored in (("qwen3_moe", "gptq"), GPT_OSS, ("qwen3_5_moe", "fp8")) for each in PLANTED]


@pytest.mark.parametrize(
    ("plant", "paths", "stored"), [*CASES, (ignore_the_clamp, "few", GPT_OSS), (lose_a_bias, "few and many", GPT_OSS)]
)
def test_a_wrong_product_is_told(
    plant: Callable[[pytest.MonkeyPatch], None],
    paths: str,
    stored: tuple[str, str],
    open_target: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = open_target(*stored)
    plant(monkeypatch)
    assert wrong_paths(*try_experts(target)) == paths


def test_what_is_not_a_number_is_wrong(open_target: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_target("qwen3_moe")
    monkeypatch.setattr(moe, "experts_prefill", lambda x, *_: torch.full_like(x, float("nan")))
    assert wrong_paths(*try_experts(target)) == "many"


def wrong_paths(few: Tried, many: Tried) -> str:
    return " and ".join(name for name, each in (("few", few), ("many", many)) if not each.error <= 1)
