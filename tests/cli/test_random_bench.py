"""``dflash bench --weights random`` in-process: refusals in one line, the report end to end on the CPU's references."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="builds a model, and torch is not installed here")

from dflash_local import settings  # noqa: E402
from dflash_local.app import random_bench  # noqa: E402
from dflash_local.app.random_bench import RandomOptions, bench_random  # noqa: E402
from dflash_local.app.resolve import choose  # noqa: E402
from dflash_local.bench import baselines  # noqa: E402
from dflash_local.bench.random_run import Measures  # noqa: E402
from dflash_local.bench.report import Found  # noqa: E402
from dflash_local.cli.bench import acceptance_lengths  # noqa: E402
from dflash_local.errors import CheckpointError, DFlashError, DoesNotFitError, UsageError  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.planner.machine import Machine  # noqa: E402
from tests.bench.shapes import DENSE, DRAFTER, PLACE  # noqa: E402
from tests.cli.conftest import Cli  # noqa: E402


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """Configurations without weights: all that random weights need."""
    for name, config in (("target", DENSE), ("drafter", DRAFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path / "target"), str(tmp_path / "drafter")


def _run(model: str, options: RandomOptions, machine: Machine | None = None) -> Found:
    return bench_random(model, options, settings.load(), lambda _event: None, PLACE, machine)


def test_a_pair_of_folders_end_to_end(folders: tuple[str, str]) -> None:
    options = RandomOptions(drafter=folders[1], contexts=(30, 60), prefill=40, lengths=(3, 6.5))
    report, shown = _run(folders[0], options)
    assert max(map(len, shown)) <= 80 and len(shown) < 35
    assert [at["context"] for at in report["measured"]["at"]] == [30, 60]
    assert set(report["measured"]["at"][0]["cycle"]) == {"4", "8"}
    assert report["measured"]["prefill"]["tokens"] == 40 and report["assumed"]["acceptance"] == "given"
    again, _ = _run(folders[0], RandomOptions(drafter=folders[1], block_size=5))
    assert set(again["measured"]["at"][0]["cycle"]) == {"5"}
    assert again["measured"]["at"][0]["context"] == 512 - 8, "no more than the models were made for"
    assert again["assumed"]["acceptance"] == "assumed"


def test_prompts_go_in_the_chunks_of_the_plan() -> None:
    user = settings.load()
    choice = choose("qwen3-8b", None, user)
    roomy, measures = Machine("a card", "cuda", 80 * 2**30, 79 * 2**30, "", "cuda"), Measures((1024,), (1,), 8192)
    found = random_bench._planned_load(choice, user, random_bench._pair(choice, user, None), measures, roomy, PLACE)
    assert found == LoadConfig(prefill_chunk=8192)


def test_keys_and_values_in_eight_bits_are_read_and_named(folders: tuple[str, str]) -> None:
    options = RandomOptions(drafter=folders[1], contexts=(60,), prefill=0)
    (eight, shown), (full, _) = (
        _run(folders[0], replace(options, load=LoadConfig(kv_cache=form))) for form in ("int8", "auto")
    )
    read = [report["measured"]["at"][0]["cycle"]["8"]["bytes"] for report in (eight, full)]
    assert eight["kv_cache"] == "int8" and "keys and values in int8" in " ".join(" ".join(shown).split())
    assert read[0] < read[1]


def test_a_strict_step_computes_a_whole_block(folders: tuple[str, str]) -> None:
    options = RandomOptions(drafter=folders[1], contexts=(30,), prefill=0)
    strict = replace(options, load=LoadConfig(exact=True))
    report, shown = _run(folders[0], strict)
    words = [" ".join(" ".join(lines).split()) for lines in (shown, _run(folders[0], options)[1])]
    assert [", strict" in text for text in words] == [True, False]
    assert report["exact"] and set(report["measured"]["at"][0]["cycle"]) == {"4", "8"}


def test_a_bundled_pair_is_called_a_toy() -> None:
    shown = "\n".join(_run("demo-hybrid", RandomOptions(contexts=(64,), prefill=0))[1])
    assert "demo-hybrid's target" in shown and "generation v2" in shown and "toy pair" in shown


def test_of_a_targets_own_layer_every_length_is_another_cycle() -> None:
    report, shown = _run("demo-hybrid", RandomOptions(drafter="mtp", contexts=(64,), prefill=0))
    cycle = report["measured"]["at"][0]["cycle"]
    assert list(cycle) == ["2", "3", "4", "5"] and "assumed of the drafter" not in " ".join(" ".join(shown).split())
    apart = {cycle[str(rows + 1)]["bytes"] - cycle[str(rows)]["bytes"] for rows in (2, 3, 4)}
    assert max(apart) - min(apart) < min(apart), "each draft reads the layer and the head once more"


@pytest.mark.parametrize(("stored", "name"), [("fp8", "fp8 128x128"), ("int4-g32", "int4 g32")])
def test_a_quantised_target_is_measured_as_it_would_be_stored(folders: tuple[str, str], stored: str, name: str) -> None:
    options = RandomOptions(drafter=folders[1], contexts=(30,), prefill=0)
    (found, shown), (plain, _) = (_run(folders[0], replace(options, stored=each)) for each in (stored, None))
    assert (found["stored"], plain["stored"]) == (name, None)
    read, whole = (report["measured"]["at"][0]["ar_step"]["bytes"] for report in (found, plain))
    assert read < whole
    assert name in "\n".join(shown)


def test_baselines_are_of_plain_weights(folders: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="--baselines measures plain weights"):
        _run(folders[0], RandomOptions(drafter=folders[1], baselines=True, stored="fp8"))


@pytest.mark.parametrize("wrong", ["random:int3", "real:fp8", "other"])
def test_unknown_weights_are_refused_with_those_that_are_known(cli: Cli, wrong: str) -> None:
    done = cli("bench", "demo", "--weights", wrong)
    assert done.code == 2 and f"--weights {wrong} is not known" in done.err and "random:int4-g128" in done.err


def test_baselines_stand_beside_it(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[baselines.BaselineTask] = []

    def run_one(task: baselines.BaselineTask, _limit: float) -> baselines.Baseline:
        asked.append(task)
        return baselines.Baseline(baselines.NAMES[task.kind], task.context, reason="planted")

    monkeypatch.setattr(baselines, "run_one", run_one)
    report, _ = _run(folders[0], RandomOptions(drafter=folders[1], contexts=(30,), prefill=0, baselines=True))
    assert [task.kind for task in asked] == ["eager", "reference", "compiled"]
    assert {one["reason"] for one in report["measured"]["baselines"]} == {"planted"}
    assert asked[0].family == "qwen3" and asked[0].drafter_config["block_size"] == 8


def test_what_does_not_fit_is_told_before_anything_is_built(folders: tuple[str, str]) -> None:
    small = Machine("a small card", "cuda", 2**20, 2**20, "")
    with pytest.raises(DoesNotFitError, match="a small card has 1.0 MiB free") as caught:
        _run(folders[0], RandomOptions(drafter=folders[1]), small)
    assert caught.value.exit_code == 5 and caught.value.hint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": (9.0,)}, "more than the drafter's block of 8"),
        ({"contexts": (505,)}, "context 505 is outside 1..504"),
        ({"prefill": 600}, "prefill 600"),
        ({"block_size": 9}, "block_size 9"),
        ({"drafter": None}, "no drafter is known"),
    ],
)
def test_bad_options_are_one_line(folders: tuple[str, str], options: dict[str, object], words: str) -> None:
    with pytest.raises(DFlashError, match=words):
        _run(folders[0], RandomOptions(**{"drafter": folders[1], **options}))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "x", "0.5", "3,,5", "nan", "1,2,3,4"])
def test_acceptance_lengths_are_checked(text: str) -> None:
    with pytest.raises(UsageError, match="--acceptance"):
        acceptance_lengths(text)


def test_acceptance_lengths_are_read_once_each() -> None:
    assert acceptance_lengths("3, 5,3") == (3.0, 5.0) and acceptance_lengths(None) == ()


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("qwen3-8b", "--device", "cpu"), 2, "needs a CUDA GPU"),
        (("qwen3-8b", "--routing", "uniform"), 2, "Qwen/Qwen3-8B has no experts to route to"),
        (("qwen3.5-35b-a3b", "--routing", "even"), 2, "--routing even: no such routing"),
        (("moonshotai/Kimi-K2.5",), 5, "runs on a server only"),
        (("no-such-model",), 3, "unknown model"),
        (("someone/else", "--drafter", "someone/drafter"), 3, "nothing is known of the shape"),
        (("qwen3-8b", "--prompts", "builtin"), 2, "--prompts does not go with --weights random"),
        (("qwen3-8b", "--engine", "reference"), 2, "measures the fused engine"),
        (("qwen3-8b", "--acceptance", "17"), 2, "the drafter's block of 16"),
    ],
)
def test_refusals_on_the_command_line(cli: Cli, argv: tuple[str, ...], code: int, words: str) -> None:
    done = cli("bench", *argv, "--weights", "random")
    assert done.code == code and words in done.err and done.out == ""


def test_options_of_random_weights_need_them(cli: Cli) -> None:
    done = cli("bench", "demo", "--baselines")
    assert done.code == 2 and "--baselines does not go with prompts" in done.err
    done = cli("bench", "demo", "--context", "64", "--context", "128")
    assert done.code == 2 and "more than once" in done.err


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="config.json does not exist"):
        _run(str(tmp_path / "empty"), RandomOptions(drafter=str(tmp_path / "empty")))
