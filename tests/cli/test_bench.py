"""``dflash bench`` in-process on golden pairs: table, JSON, prompt files, nothing written unasked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="loads a model, and torch is not installed here")

from dflash_local import settings  # noqa: E402
from dflash_local.app import measurements  # noqa: E402
from dflash_local.bench import fidelity as scores  # noqa: E402
from dflash_local.catalog.bundled import FOLDER, HELD_OUT, Pair  # noqa: E402
from dflash_local.cli import bench  # noqa: E402
from dflash_local.cli.console import Console  # noqa: E402
from dflash_local.cli.invocation import Invocation  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from tests.bench.sessions import GOLDEN, KV_ONLY, golden_cases  # noqa: E402
from tests.cli.conftest import Cli  # noqa: E402
from tests.quantized_checkpoints import quantize_checkpoint  # noqa: E402

FEW = ("--limit", "2", "--max-new-tokens", "8", "--device", "cpu")
PAIR = (str(GOLDEN / KV_ONLY / "target"), "--drafter", str(GOLDEN / KV_ONLY / "drafter"), "--device", "cpu")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"kind": kind, "prompt_ids": case["prompt_ids"]} for kind, case in zip("xxy", golden_cases(KV_ONLY))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_the_table_has_a_row_per_kind_and_the_total(cli: Cli, prompts: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = cli("bench", *PAIR, "--prompts", str(prompts), "--max-new-tokens", "24")
    assert done.code == 0, done.err
    kinds = [line.split()[0] for line in done.out.splitlines() if line.endswith(("1/1", "2/2", "3/3"))]
    assert kinds == ["x", "y", "total"]
    assert "text equal in 3 of 3" in done.out and "accepted per position:" in done.out
    assert "per cycle" in done.out and "per turn" in done.out
    assert "toy" not in done.out
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written unasked"


def test_json_report_and_limit(cli: Cli, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    argv = ("bench", *PAIR, "--prompts", str(prompts), "--limit", "1", "--max-new-tokens", "72")
    done = cli(*argv, "--report", str(file), "--json")
    assert done.code == 0, done.err
    assert done.json == json.loads(file.read_text(encoding="utf-8"))
    (row,) = done.json["rows"]
    assert (row["kind"], row["prompts"], row["equal"]) == ("x", 1, 1)
    assert done.json["prompts"][0]["dflash"]["acceptance_lengths"] == golden_cases(KV_ONLY)[0]["acceptance_lengths"]


def test_a_smaller_block_is_used(cli: Cli, prompts: Path) -> None:
    argv = ("bench", *PAIR, "--prompts", str(prompts), "--limit", "1", "--max-new-tokens", "16")
    done = cli(*argv, "--block-size", "3", "--json")
    assert done.json["block_size"] == 3
    assert max(done.json["prompts"][0]["dflash"]["acceptance_lengths"]) <= 3


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--prompts", "builtin"), "has no tokenizer"),
        (("--limit", "0"), "limit 0"),
        (("--block-size", "65"), "block_size 65"),
    ],
)
def test_bad_options_are_one_line(cli: Cli, extra: tuple[str, ...], word: str) -> None:
    done = cli("bench", *PAIR, *extra)
    assert done.code == 2 and word in done.err and done.out == ""


@pytest.mark.skipif(not HELD_OUT.is_file(), reason="the bundled pairs are not in this checkout")
def test_a_toy_runs_its_held_out_prompts_and_is_called_one(cli: Cli) -> None:
    done = cli("bench", "demo", *FEW, "--json")
    assert done.code == 0, done.err
    total = done.json["rows"][-1]
    assert total["equal"] == total["prompts"] == 2
    assert "toy" in done.json["note"]


def test_fidelity_of_a_toy_is_told_as_table_and_report(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original gives its memory back first: beside it, or its memory kept by the allocator, nothing would fit."""
    steps: list[str] = []
    real = measurements.engine_session

    @contextmanager
    def session(pair: Pair, load: LoadConfig, *more: Any) -> Iterator[Any]:
        steps.append(f"load {load.quantize}")
        with real(pair, load, *more) as loaded:
            yield loaded
        steps.append("closed")

    monkeypatch.setattr(measurements, "engine_session", session)
    monkeypatch.setattr(scores, "give_back", lambda: steps.append("given back"))
    file = tmp_path / "fidelity.json"
    done = cli("bench", "demo", "--quantize", "int4", "--fidelity", *FEW, "--report", str(file))
    assert done.code == 0, done.err
    assert "int4 float32 on cpu, against the original in float32" in done.out and "toy" in done.out
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["rows"][-1]["positions"] == sum(prompt["tokens"] for prompt in report["prompts"]) > 0
    assert 0 < report["rows"][-1]["mean_kl"] < 0.1 and 0.5 < report["rows"][-1]["top_1"] <= 1
    assert report["weights"].startswith("int4") and report["original"]["weights"] == "float32"
    assert report["kept_bytes"] == 4 * 1024 * report["rows"][-1]["positions"]
    assert steps == ["load None", "closed", "given back", "load int4", "closed"]


def test_fidelity_of_keys_and_values_in_8_bits(cli: Cli) -> None:
    """Beside the same weights with caches in the weights' dtype."""
    done = cli("bench", "demo", "--kv-cache", "int8", "--fidelity", *FEW, "--json")
    assert done.code == 0, done.err
    assert done.json["load"]["kv_cache"] == "int8" and done.json["original"]["load"]["kv_cache"] == "auto"
    assert done.json["engine"] == done.json["original"]["engine"] == "fused"
    assert 0 < done.json["rows"][-1]["mean_kl"] < 0.1


def test_a_quantised_checkpoint_is_compared_with_the_original_that_is_named(cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "demo" / "target", tmp_path / "twin")
    quantize_checkpoint(tmp_path / "twin", tmp_path / "stored", "gptq")
    original = ("--original", str(FOLDER / "demo" / "target"))
    done = cli("bench", str(tmp_path / "stored"), *original, "--fidelity", "--prompts", "heldout", *FEW, "--json")
    assert done.code == 0, done.err
    assert done.json["rows"][-1]["mean_kl"] > 0 and done.json["original"]["target"]["name"] == "demo/target"


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("demo", "--fidelity"), "demo is not known as a quantised target"),
        (("demo", "--original", "demo"), "--original does not go with prompts"),
        (("demo", "--quantize", "int4", "--fidelity", "--block-size", "4"), "--block-size does not go with --fidelity"),
        (("demo", "--weights", "random", "--fidelity"), "--fidelity does not go with --weights random"),
    ],
)
def test_fidelity_needs_two_targets(cli: Cli, argv: tuple[str, ...], word: str) -> None:
    done = cli("bench", *argv)
    assert done.code == 2 and word in done.err


def test_the_original_of_a_published_variant_is_its_rows_target(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    pair = Pair("Intel/Qwen3.5-9B-int4-AutoRound", FOLDER, None, bundled=False)

    def resolved(_call: Invocation, model: str, _drafter: None, load: LoadConfig) -> Pair:
        asked.append(model)
        assert not load.draft
        return pair

    monkeypatch.setattr(Invocation, "pair", resolved)
    call = Invocation(settings.load({}), Console({}))
    for named, quantize in ((None, None), ("other/name", None), ("other/name", "int4"), (None, "int4")):
        load = LoadConfig(quantize=quantize)
        assert bench.original_of(call, pair.name, pair, named, load) is pair
    assert asked == ["Qwen/Qwen3.5-9B", "other/name", "other/name"], "what is rounded at load is its own original"
