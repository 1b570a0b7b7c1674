"""``dflash certify`` in-process on golden pairs: verdicts, exit codes, reports, both output forms."""

from __future__ import annotations

import html
import json
import stat
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="loads a model, and torch is not installed here")

from dflash_local.app import loading  # noqa: E402
from dflash_local.app.loading import open_session  # noqa: E402
from dflash_local.catalog.bundled import HELD_OUT  # noqa: E402
from dflash_local.load_config import QUANTIZED  # noqa: E402
from tests.bench.sessions import GOLDEN, HYBRID, KV_ONLY, plant_drafted_bonus  # noqa: E402
from tests.cli.conftest import Cli  # noqa: E402
from tests.expert_pairs import MXFP4, write_expert_pair  # noqa: E402

TOKENS = 8
SMALL = ("--max-new-tokens", str(TOKENS), "--seed", "7", "--device", "cpu")


def golden(name: str) -> tuple[str, ...]:
    return str(GOLDEN / name / "target"), "--drafter", str(GOLDEN / name / "drafter"), *SMALL


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions emit the drafter's token where the target's belongs."""

    def opened(*arguments: object) -> object:
        return plant_drafted_bonus(open_session(*arguments))  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "open_session", opened)


def test_identical_is_said_in_a_table(cli: Cli) -> None:
    done = cli("certify", *golden(HYBRID), "--prompt-ids", "1,2,3", "--prompt-ids", "5,6", "--block-size", "8")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert sum("identical" in line and "greedy" in line for line in lines) == 2
    assert lines[-1].startswith("verdict: identical (float32): the same token ids")
    assert f"plain transformers, teacher-forced: {2 * TOKENS} of {2 * TOKENS} tokens are its argmax" in done.out
    assert "fewer than 10,000" in done.out and "seed 7" in done.out


def test_without_a_draft_nothing_is_claimed_and_the_page_repeats_the_command(cli: Cli, tmp_path: Path) -> None:
    page, asked = tmp_path / "page.html", ("--prompt-ids", "1,2,3", "--max-new-tokens", "1", "--block-size", "4")
    target, *drafter = golden(KV_ONLY)[:3]
    done = cli("certify", target, *drafter, *asked, "--device", "cpu", "--no-think", "--json", "--html", str(page))
    assert done.code == 0, done.err
    assert done.json["strength"] is None and done.json["statement"].endswith(
        "; no draft was made, so nothing is known of drafting"
    )
    words = html.unescape(page.read_text(encoding="utf-8"))
    assert f" --device cpu {' '.join(drafter)} {' '.join(asked)} --seed {done.json['seed']} --no-think" in words


def test_the_json_form_is_the_report_and_the_file_is_private(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.json"
    argv = ("certify", *golden(KV_ONLY), "--prompt-ids", "1,2,3", "--block-size", "2", "--block-size", "8")
    done = cli(*argv, "--dtype", "bfloat16", "--report", str(file), "--json")
    assert done.code == 0, done.err
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written == done.json
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["report.json"], "no temporary file is left"
    assert written["verdict"] in ("identical", "near-tie") and written["strength"] == "fast"
    assert written["dtype"] == "bfloat16" and written["seed"] == 7 and written["block_sizes"] == [2, 8]
    assert written["prompts"] == [{"kind": "given", "ids": [1, 2, 3]}]
    assert len(written["runs"]) == 6 and {run["block_size"] for run in written["runs"]} == {2, 8}
    assert written["versions"]["torch"] and written["machine"]["system"]
    assert all(len(file["sha256"]) == 64 for file in written["target"]["files"])
    assert written["plain_transformers"]["positions"] == 2 * TOKENS


def test_exact_mode_promises_every_bit_and_proves_it(cli: Cli) -> None:
    argv = ("certify", *golden(HYBRID), "--prompt-ids", "1,2,3", "--dtype", "bfloat16", "--exact", "--planted")
    done = cli(*argv, "--json")
    assert done.code == 0, done.err
    assert done.json["strength"] == "strict" and done.json["drafts"] == "planted" and done.json["engine"] == "fused"
    assert done.json["strict"] == {"promised": True, "positions": 3 * TOKENS, "same_bits": 3 * TOKENS}
    assert done.json["verdict"] == "identical" and max(run["mean_acceptance_length"] for run in done.json["runs"]) > 2
    refused = cli("certify", *golden(HYBRID), "--prompt-ids", "1,2,3", "--exact", "--engine", "reference")
    assert refused.code == 2 and "does not know --exact" in refused.err
    refused = cli("certify", *golden(HYBRID), "--prompt-ids", "1,2,3", "--planted", "--engine", "reference")
    assert refused.code == 2 and "--engine fused" in refused.err


@pytest.mark.parametrize(
    ("family", "stored", "dtype"),
    [("qwen3_5_moe", "gptq", "float32"), pytest.param("gpt_oss", MXFP4, "float32", marks=pytest.mark.slow)],
)
def test_a_mixture_of_experts_is_certified_in_every_bit(
    cli: Cli, family: str, stored: str, dtype: str, tmp_path: Path
) -> None:
    pair = write_expert_pair(family, stored, tmp_path, width=64)
    asked = ("--prompt-ids", "1,2,3", "--block-size", "8", "--dtype", dtype, "--exact", "--planted", "--json")
    done = cli("certify", str(pair.target), "--drafter", str(pair.drafter), *SMALL, *asked)
    assert done.code == 0, done.err
    found = done.json
    assert (found["verdict"], found["strength"], found["engine"]) == ("identical", "strict", "fused")
    assert found["strict"] == {"promised": True, "positions": 3 * TOKENS, "same_bits": 3 * TOKENS}
    assert found["plain_transformers"]["positions"] == TOKENS and found["plain_transformers"]["unexplained"] == 0
    assert min(run["mean_acceptance_length"] for run in found["runs"]) > 2


def test_a_bug_exits_7_and_still_hands_out_the_report(cli: Cli, broken: None, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = cli("certify", *golden(KV_ONLY), "--prompt-ids", "1,2,3", "--report", str(file))
    assert done.code == 7
    assert "verdict: BUG" in done.out and "is not the target's choice" in done.err
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["verdict"] == "BUG" and written["strength"] is None and written["failure"]


def test_a_bug_under_json_is_an_object_on_each_stream(cli: Cli, broken: None) -> None:
    done = cli("certify", *golden(KV_ONLY), "--prompt-ids", "1,2,3", "--json")
    assert done.code == 7
    assert done.json["verdict"] == "BUG"
    error = json.loads(done.err.splitlines()[-1])["error"]
    assert error["type"] == "ExactnessError" and error["exit_code"] == 7


@pytest.mark.parametrize(
    ("extra", "word", "code"),
    [
        ((), "has no tokenizer", 2),
        (("--prompt", "hi"), "has no tokenizer", 2),
        (("--prompt", " "), "--prompt is empty", 2),
        (("--prompt-ids", "1,x"), "'x' is not a token id", 2),
        (("--prompt-ids", "1,2", "--block-size", "9"), "larger than the trained one", 2),
        (("--prompt-ids", "1,2", "--max-new-tokens", "0"), "max_new_tokens 0", 2),
        (("--prompt-ids", "999"), "outside the vocabulary", 2),
        (("--prompt-ids", "1,2", "--report", "."), "is a folder", 2),
    ],
)
def test_bad_options_are_one_line(cli: Cli, extra: tuple[str, ...], word: str, code: int) -> None:
    done = cli("certify", *golden(KV_ONLY), *extra)
    assert done.code == code and word in done.err and done.out == ""
    assert "Traceback" not in done.err


def test_a_drafter_is_needed(cli: Cli) -> None:
    done = cli("certify", str(GOLDEN / KV_ONLY / "target"), "--prompt-ids", "1")
    assert done.code == 2 and "no drafter is known" in done.err


def test_an_unwritable_report_is_refused_before_the_work(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), *(["/proc"] if Path("/proc").is_dir() else [])):  # it calls itself writable
        done = cli("certify", *golden(KV_ONLY), "--prompt-ids", "1", "--report", f"{folder}/r.json")
        assert done.code == 2 and "cannot be written" in done.err and done.out == ""


@pytest.mark.skipif(not HELD_OUT.is_file(), reason="the bundled pairs are not in this checkout")
def test_a_toys_own_prompts_are_used_and_it_is_called_one(cli: Cli) -> None:
    done = cli("certify", "demo-hybrid", *SMALL, "--max-new-tokens", "4", "--block-size", "5", "--json")
    assert done.code == 0, done.err
    assert done.json["verdict"] == "identical" and len(done.json["runs"]) == 6 * 3
    assert len(done.json["prompts"]) == 6 and "never a speed claim" in done.json["note"]


# The command is the same for all; what each format computes is held in tests/models.
@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        pytest.param(*case, marks=() if case[0] == HYBRID else pytest.mark.slow)
        for case in zip((KV_ONLY, KV_ONLY, HYBRID), QUANTIZED)
    ],
)
def test_a_quantised_target_is_held_to_itself_bit_for_bit(cli: Cli, name: str, quantize: str) -> None:
    """Also by plain transformers, which must compute with the rounded weights: a random target's choices show it."""
    argv = ("certify", *golden(name), "--prompt-ids", "1,2,3", "--engine", "fused", "--exact", "--quantize", quantize)
    done = cli(*argv, "--json")
    assert done.code == 0, done.err
    found = done.json
    assert (found["strength"], found["load"]["quantize"], found["dtype"]) == ("strict", quantize, "float32")
    assert found["weights"] == f"{quantize}: the checkpoint's own, rounded as they were read"
    assert found["strict"]["same_bits"] == found["strict"]["positions"] > 0
    assert found["plain_transformers"]["positions"] == TOKENS and found["plain_transformers"]["unexplained"] == 0


def test_a_certificate_says_which_target_it_is_about(cli: Cli) -> None:
    done = cli("certify", *golden(KV_ONLY), "--prompt-ids", "1,2,3", "--quantize", "int4")
    assert done.code == 0, done.err
    assert (
        "reference engine, int4 float32 on cpu" in done.out and "compared with itself, not with the plain" in done.out
    )
