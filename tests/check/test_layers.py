"""The fused target layer by layer against transformers' layers: no false alarm, and every planted fault is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from dflash_local.catalog.bundled import FOLDER, Pair
from dflash_local.check.findings import exit_code
from dflash_local.check.layers import LayerReport, PartError, check_layers, row_errors
from dflash_local.check.streamed_reference import StreamedReference
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.load_pair import load
from dflash_local.engine.session import Session
from dflash_local.errors import CheckpointError, ContextError, UsageError
from dflash_local.kernels.decode_attention import AttentionMask
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.check import faults
from tests.check.faults import MXFP4
from tests.families import save_model
from tests.quantized_checkpoints import experts_in_mxfp4, save_quantized

CONTEXT = 128
# What is found in bfloat16, whose rounding is a thousand times larger, is found in float32.
EACH_DTYPE = (
    pytest.param(torch.float32, marks=pytest.mark.slow, id="float32"),
    pytest.param(torch.bfloat16, id="bfloat16"),
)
PLAIN = (
    *("llama", "llama_biased", "mistral", "gemma2_full", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5"),
    *("qwen3_5_biased", "qwen3_5_wrapped", "qwen3_5_moe", "gpt_oss"),
)
QUANTISED = (
    *(("qwen3", "gptq"), ("qwen3_5", "fp8"), ("llama", "auto_round"), ("qwen3", "modelopt_nvfp4")),
    ("qwen3_moe", "gptq"),
)
CASES = (*((family, "") for family in PLAIN), *QUANTISED, ("gpt_oss", MXFP4))


@cache
def stored(family: str, dialect: str, folder: Path) -> Path:
    """A random checkpoint; quantised where a dialect is told."""
    if dialect == MXFP4:
        target = save_model(family, folder, hidden_size=64, intermediate_size=64, head_dim=16, num_local_experts=8)
        experts_in_mxfp4(target)
        return target
    sizes = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    return save_quantized(family, folder, dialect, sizes=sizes)[0] if dialect else save_model(family, folder)


@pytest.fixture(scope="module")
def open_session(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Session, Pair]]:
    """A fused session of a family's random checkpoint, with weights of its own, and its pair."""
    root = tmp_path_factory.mktemp("targets")

    def build(
        family: str,
        dialect: str = "",
        dtype: torch.dtype = torch.float32,
        kv_cache: str = "auto",
        exact: bool = False,
        quantize: str | None = None,
    ) -> tuple[Session, Pair]:
        folder = stored(family, dialect, root / f"{family} {dialect}")
        files = Checkpoint.open(folder)
        facts = TargetFacts.from_checkpoint(files).quantized(quantize)
        weights = read_weights(files, facts, torch.device("cpu"), dtype)
        target = FusedTarget(weights, facts.model, (0, 2), CONTEXT, 8, exact=exact, kv_cache=kv_cache)
        options = LoadConfig(engine="fused", device="cpu", context=CONTEXT, quantize=quantize)
        shown = SessionFacts(family, None, 8, False, options)
        session = Session(FusedRunner(target, None, CONTEXT), shown, None, frozenset())
        return session, Pair(family, folder, None, bundled=False)

    return build


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize(("family", "dialect"), CASES)
def test_a_sound_target_agrees(
    family: str, dialect: str, dtype: torch.dtype, open_session: Callable[..., tuple[Session, Pair]]
) -> None:
    session, pair = open_session(family, dialect, dtype)
    report = check_layers(session, pair)
    found = report.finding()
    assert found.state == "ok" and report.first is None, found.text
    # Far below the bar, or the bar would be luck; one embedding, norm and head, two parts a layer, two paths of each.
    assert report.largest.error < report.bar / 2
    assert len(report.parts) == 2 * (2 * 4 + 3) + len(session.runner.target.mixtures) and len(report.drift) == 4
    assert max(report.drift) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"exact": True},
        {"quantize": "int8"},
        {"quantize": "int4", "dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "kv_cache": "int8"},
    ],
    ids=["exact", "int8", "int4", "int8 cache"],
)
def test_a_sound_target_agrees_under_every_option(
    options: dict, open_session: Callable[..., tuple[Session, Pair]]
) -> None:
    report = check_layers(*open_session("qwen3_5", **options))
    assert report.first is None and report.largest.error < report.bar / 2, report.largest


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("fault", faults.LOADED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_where_it_is(
    fault: faults.Fault, dtype: torch.dtype, open_session: Callable[..., tuple[Session, Pair]]
) -> None:
    session, pair = open_session(*fault.of.split(), dtype=dtype)
    fault.plant(session.runner.target)
    report = check_layers(session, pair)
    found = report.finding()
    assert found.state == fault.state and found.remedy and f"{fault.word} differs: " in found.text, found.text
    assert exit_code([found]) == 7
    # Parts behind it get the input that it left, so they agree; those that share what is wrong differ as well.
    wrong = {part.name for part in report.parts if part.error > report.bar}
    shared = fault.plant is faults.change_rope_base
    alike = "(attention)" if shared else f"{fault.word.partition(' (')[0]} (mixture of experts)"
    assert all(each == fault.word or each.endswith(alike) for each in wrong)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["figures"]["bar"] == report.bar


def test_a_fault_of_one_path_names_it(open_session: Callable[..., tuple[Session, Pair]]) -> None:
    session, pair = open_session("mistral")
    session.runner.target.layers[0].mixer.mask = AttentionMask()
    assert "layer 0 (sliding-window attention) differs in blocks only" in check_layers(session, pair).finding().text


def test_numbers_that_are_not_finite_are_named(open_session: Callable[..., tuple[Session, Pair]]) -> None:
    session, pair = open_session("qwen3")
    session.runner.target.layers[1].mlp_input.weight[0] = float("inf")
    found = check_layers(session, pair).finding()
    assert found.text == "layer 1 (MLP) differs: numbers that are not finite"
    assert [None, None] in [part[2:] for part in json.loads(json.dumps(found.as_dict()))["figures"]["parts"]]


def test_windows_longer_than_the_tokens_are_told(open_session: Callable[..., tuple[Session, Pair]]) -> None:
    session, pair = open_session("gpt_oss")
    assert check_layers(session, pair, ids=range(8)).unfilled_windows == (8,)
    assert check_layers(session, pair, ids=range(9)).unfilled_windows == ()


def test_an_expert_that_no_token_chooses_is_seen(open_session: Callable[..., tuple[Session, Pair]]) -> None:
    session, pair = open_session("qwen3_moe")
    weights = session.runner.target.layers[2].mlp.weights
    down = weights.experts.down
    down.weight[: down.out_features].neg_()
    report = check_layers(session, pair, ids=[7] * 9)  # rows that are alike, and choose alike
    (mixture,) = {
        part.worst for part in report.parts if part.name == "layer 2 (mixture of experts)" and part.path == "prompt"
    }
    assert mixture < report.bar, "the chosen ones are right"
    assert report.first is not None and report.first.name == "layer 2 (expert 0)"


def test_numbers_of_an_expert_that_are_not_finite_are_named(open_session: Callable[..., tuple[Session, Pair]]) -> None:
    session, pair = open_session("qwen3_moe")
    down = session.runner.target.layers[1].mlp.weights.experts.down
    down.weight[6 * down.out_features] = float("nan")
    found = check_layers(session, pair, ids=[7] * 9).finding()
    assert found.text == "layer 1 (expert 6) differs: numbers that are not finite"


def test_the_session_answers_as_before(open_session: Callable[..., tuple[Session, Pair]]) -> None:
    session, pair = open_session("qwen3_5")
    target, ids = session.runner.target, torch.arange(5, 20)
    target.clear()
    before = target.prefill(ids, False).hidden
    fractions: list[float] = []
    report = check_layers(session, pair, ids=range(5, 53), on_fraction=fractions.append)
    assert report.first is None and report.tokens == 48
    assert fractions == sorted(set(fractions)) and fractions[-1] == 1
    assert target.length == 0 and target.on_residual is None and torch.equal(target.prefill(ids, False).hidden, before)


def test_one_layer_has_weights_at_a_time(tmp_path: Path) -> None:
    files = Checkpoint.open(save_model("qwen3_5_moe", tmp_path))
    facts = TargetFacts.from_checkpoint(files)
    reference = StreamedReference(files, facts, torch.device("cpu"), torch.float32, "auto")
    model = reference._target.model

    def filled() -> set[str]:
        there = (name for name, weight in model.named_parameters() if not weight.is_meta)
        return {".".join(name.split(".")[:3]) for name in there}

    assert filled() == set()
    for index in (1, 2):
        with reference.layer(index):
            assert filled() == {f"model.layers.{index}"}
        assert filled() == set()


def test_a_tensor_that_transformers_misses_is_named(tmp_path: Path) -> None:
    files = Checkpoint.open(save_model("qwen3", tmp_path))
    facts = TargetFacts.from_checkpoint(files)
    tensors = {name: info for name, info in files.tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}
    reference = StreamedReference(replace(files, tensors=tensors), facts, torch.device("cpu"), torch.float32, "auto")
    with pytest.raises(CheckpointError, match="mlp.up_proj.weight"), reference.layer(1):
        pytest.fail("a layer without one of its tensors")


def test_tokens_must_fit(open_session: Callable[..., tuple[Session, Pair]]) -> None:
    session, pair = open_session("llama")
    for count in (1, CONTEXT + 1):
        with pytest.raises(ContextError, match=f"{count} tokens"):
            check_layers(session, pair, ids=[7] * count)
    assert check_layers(session, pair, ids=[7, 8]).first is None


def test_the_reference_engine_is_refused() -> None:
    pair = Pair("demo", FOLDER / "demo" / "target", None, bundled=False)
    session = load(pair, LoadConfig(engine="reference", dtype="float32", device="cpu", context=CONTEXT))
    with pytest.raises(UsageError, match="reference engine"):
        check_layers(session, pair)
    session.close()


def test_errors_are_relative_to_the_row() -> None:
    wanted = torch.tensor([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0]])
    found = wanted + torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, 0.5]])
    assert row_errors(found, wanted).tolist() == pytest.approx([0.1, 0.0, 0.01])
    assert row_errors(found, wanted, 5.0).tolist() == pytest.approx([0.05, 0.0, 0.5 / 55])


def test_the_first_part_is_named_and_not_the_largest() -> None:
    parts = (
        PartError("the embedding", "prompt", 0.0, 0.0),
        PartError("layer 0 (attention)", "prompt", 0.04, 0.05),
        PartError("layer 0 (attention)", "block", 0.0, 0.0),
        PartError("layer 1 (MLP)", "block", 0.41, 0.5),
    )
    found = LayerReport(parts, (0.1,), 0.03, "bfloat16", 64).finding()
    assert found.text == "layer 0 (attention) differs in prompts only: 0.04 where rounding explains 0.03"
