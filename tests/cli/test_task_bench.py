"""``dflash bench --tasks`` in-process on a toy: from the hub to the tables, resumed after a kill, refused in a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="loads a model, and torch is not installed here")

from dflash_local.bench.tasks import results, run  # noqa: E402
from dflash_local.bench.tasks.table import TASKS  # noqa: E402
from dflash_local.bench.trial import Written, write  # noqa: E402
from dflash_local.catalog.bundled import FOLDER  # noqa: E402
from dflash_local.engine.session import Session  # noqa: E402
from dflash_local.errors import EngineError  # noqa: E402
from dflash_local.request import Request  # noqa: E402
from tests.bench.tasks.data_files import add_task, file_of  # noqa: E402
from tests.cli.conftest import Cli  # noqa: E402
from tests.fake_hub import FakeHub, online  # noqa: E402

pytestmark = pytest.mark.skipif(not (FOLDER / "demo").is_dir(), reason="the bundled pairs are not in this checkout")
ARGV = ("bench", "demo", "--device", "cpu", "--max-new-tokens", "8", "--tasks")


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """All six data sets."""
    with FakeHub() as fake, online(fake):
        for name in TASKS:
            add_task(fake, name)
        yield fake


def test_all_six_make_tables_and_a_second_run_asks_nobody(cli: Cli, hub: FakeHub, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = cli(*ARGV, ",".join(TASKS), "--limit", "1", "--report", str(report), "--out", str(tmp_path / "rows"))
    assert done.code == 0, done.err
    tables = [line for line in done.out.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0] for line in tables[2:8]] == [f"| {task.title}" for task in TASKS.values()]
    assert "toy" in done.out
    content = json.loads(report.read_text(encoding="utf-8"))
    assert [task["dflash"]["prompts"] for task in content["tasks"]] == [1] * 6
    by_name = {task["task"]: task for task in content["tasks"]}
    assert by_name["mt-bench"]["dflash"]["requests"] == 2, "two turns"
    assert all(task["equal"] == {"prompts": 1, "of": 1} for task in content["tasks"])
    assert not hub.gets("*.py"), "no code is fetched"
    before = len(hub.requests)
    again = cli(*ARGV, "gsm8k", "--limit", "1", "--out", str(tmp_path / "rows"), "--json")
    assert again.code == 0 and len(hub.requests) == before
    assert again.json["tasks"][0]["data"] == by_name["gsm8k"]["data"]
    assert again.json["tasks"][0]["plain"] == by_name["gsm8k"]["plain"], "the same results, not measured again"


def test_a_killed_run_goes_on_where_it_was(
    cli: Cli, hub: FakeHub, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second prompt, and a line that the kill left half written."""
    rendered: list[int] = []
    real, added = Session.render, results.ResultsFile.add

    def interrupted(file: results.ResultsFile, result: results.PromptResult) -> None:
        added(file, result)
        with file.path.open("ab") as stream:
            stream.write(b'{"id": "2", "tur')
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(results.ResultsFile, "add", interrupted)
        assert cli(*ARGV, "gsm8k").code == 130

    def counted(session: Session, *args: object) -> object:
        rendered.append(1)
        return real(session, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "render", counted)
    done = cli(*ARGV, "gsm8k", "--json")
    assert done.code == 0, done.err
    assert done.json["tasks"][0]["dflash"]["prompts"] == 3
    files = [*(own_home / ".local" / "share" / "dflash-local" / "bench").glob("demo-gsm8k-*.jsonl")]
    for file in files:
        lines = [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]
        assert [line["id"] for line in lines[1:]] == ["1", "2", "3"]
    rendered.clear()
    assert cli(*ARGV, "gsm8k", "--no-resume").code == 0 and rendered, "anew when asked"
    assert [len(file.read_text(encoding="ascii").splitlines()) for file in files] == [4, 4], "plain and drafted"


def test_several_blocks_stand_beside_one_plain_run(
    cli: Cli, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with another block later takes the plain replies that are there; a second turn follows the first reply."""
    runs: list[tuple[str, int | None, tuple[int, ...]]] = []

    def counted(session: Session, request: Request) -> Written:
        if request.limits.max_new_tokens == 8:  # not a warm-up
            runs.append((request.mode, request.block_size, request.prompt_ids))
        return write(session, request)

    monkeypatch.setattr(run, "write", counted)
    rows = ("mt-bench,gsm8k", "--limit", "1", "--out", str(tmp_path / "rows"))
    done = cli(*ARGV, *rows, "--block-size", "4", "--block-size", "8", "--json")
    assert done.code == 0, done.err
    found = done.json["tasks"]
    assert [(task["task"], task["block_size"]) for task in found] == [
        *(("mt-bench", 4), ("mt-bench", 8)),
        *(("gsm8k", 4), ("gsm8k", 8)),
    ]
    prompts = 2 + 1  # of MT-Bench two turns
    assert [sum(run[0] == mode for run in runs) for mode in ("ar", "dflash")] == [prompts, 2 * prompts]
    assert {block for mode, block, _ in runs if mode == "dflash"} == {4, 8}
    asked = {ids for mode, _, ids in runs if mode == "ar"}
    assert len(asked) == prompts and asked == {ids for mode, _, ids in runs if mode == "dflash"}
    assert found[0]["plain"] == found[1]["plain"] and found[0]["equal"] == found[1]["equal"] == {"prompts": 1, "of": 1}
    assert 1 < found[0]["dflash"]["accepted"]["mean"] <= 4 and found[0]["plain"]["accepted"]["mean"] is None
    assert done.json["block_sizes"] == [4, 8]
    runs.clear()
    three = cli(*ARGV, *rows, "--block-size", "8", "--block-size", "2")
    assert {(mode, block) for mode, block, _ in runs} == {("dflash", 2)} and len(runs) == prompts
    table = [line.split(" | ")[3] for line in three.out.splitlines() if " | here | " in line]
    assert table == ["8", "2", "8", "2"] and "block 8, 2," in three.out
    runs.clear()
    assert cli(*ARGV, *rows, "--block-size", "4", "--json").json["tasks"][0] == found[0] and not runs


def test_two_runs_over_the_same_results_are_refused(cli: Cli, hub: FakeHub, tmp_path: Path) -> None:
    argv = (*ARGV, "gsm8k", "--limit", "1", "--out", str(tmp_path))
    assert cli(*argv).code == 0
    file = next(tmp_path.glob("*.jsonl"))
    identity = json.loads(file.read_text(encoding="ascii").splitlines()[0])["identity"]
    with results.ResultsFile.locked(tmp_path, "demo-gsm8k", identity):
        refused = cli(*argv)
    assert refused.code == 1 and f"{file} is being written by process" in refused.err and refused.out == ""
    assert cli(*argv).code == 0


def test_a_failed_prompt_is_a_row_and_is_tried_again(cli: Cli, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = Session.render, iter(range(1000))

    def failing(session: Session, *args: object) -> object:
        if next(count) == 4:  # after the warm-up of both and the first prompt
            raise EngineError("planted")
        return real(session, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Session, "render", failing)
        done = cli(*ARGV, "gsm8k", "--json")
    sides = [done.json["tasks"][0][side] for side in ("dflash", "plain")]
    assert done.code == 0 and sorted((side["prompts"], side["failed"]) for side in sides) == [(2, 1), (3, 0)]
    assert [row["error"] for side in sides for row in side["rows"]].count("EngineError: planted") == 1
    again = cli(*ARGV, "gsm8k", "--json").json["tasks"][0]
    assert {(again[side]["prompts"], again[side]["failed"]) for side in ("dflash", "plain")} == {(3, 0)}


def test_data_are_held_to_what_was_recorded(cli: Cli, hub: FakeHub, own_home: Path) -> None:
    first = cli(*ARGV, "gsm8k", "--limit", "1", "--json").json["tasks"][0]["data"]
    add_task(hub, "gsm8k", file_of("gsm8k")[:-1] + b" \n")
    assert cli(*ARGV, "gsm8k", "--limit", "1", "--json").json["tasks"][0]["data"] == first
    new = cli(*ARGV, "gsm8k", "--limit", "1", "--accept-new-data", "--json").json["tasks"][0]["data"]
    assert new["commit"] != first["commit"] and new["sha256"] != first["sha256"]
    (place,) = (own_home / ".cache").rglob(f"{new['commit']}/test.jsonl")
    place.write_bytes(b"{}")
    done = cli(*ARGV, "gsm8k")
    assert done.code == 4 and new["sha256"] in done.err and "--accept-new-data" in done.err


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("demo", "--tasks", "gsm8k", "--weights", "random"), "--tasks does not go with --weights random"),
        (("demo", "--tasks", "gsm9k"), "'gsm9k' is unknown"),
        (("demo", "--tasks", ","), "names no task"),
        (("demo", "--tasks", "gsm8k", "--prompts", "builtin"), "--prompts does not go with --tasks"),
        (("demo", "--tasks", "gsm8k", "--limit", "0"), "limit 0"),
        (("demo", "--tasks", "gsm8k", "--block-size", "4", "--block-size", "65"), "block_size 65"),
        (
            ("demo", "--weights", "random", "--block-size", "4", "--block-size", "8"),
            "--block-size is given more than once",
        ),
        (("demo", "--no-resume"), "--no-resume does not go with prompts"),
    ],
)
def test_bad_options_are_one_line(cli: Cli, argv: tuple[str, ...], word: str) -> None:
    done = cli("bench", *argv)
    assert done.code == 2 and word in done.err and done.out == ""


@pytest.mark.parametrize(
    ("raw", "more", "word"),
    [
        (b"\xff\xfe", {}, "not UTF-8"),
        (b'{"question": ' + b"[" * 200_000, {}, "line 1"),
        (b'{"question": "a\\u001b[2J", "answer": "#### 1"}', {}, "control character"),
        (b'{"answer": "a"}', {}, "question is missing"),
        (b" " * (5 << 20), {}, "are allowed"),
        (b'{"question": "a", "answer": "#### 1"}', {"../../.bashrc": b"x"}, "which is refused"),
    ],
)
def test_poisoned_data_are_refused_in_a_line_and_not_recorded(
    cli: Cli, own_home: Path, raw: bytes, more: dict[str, bytes], word: str
) -> None:
    with FakeHub() as fake, online(fake):
        add_task(fake, "gsm8k", raw, **more)
        done = cli(*ARGV, "gsm8k")
        assert done.code == 4 and word in done.err and done.out == "" and "\x1b" not in done.err
        assert not list(own_home.rglob("datasets.json")) and not list(own_home.rglob("test.jsonl"))
        add_task(fake, "gsm8k")
        assert cli(*ARGV, "gsm8k", "--limit", "1").code == 0, "the owner's correction is taken"
