"""``dflash bench --url`` over recorded answers: the closed loop, what is kept of it, and every way in which it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_local.bench.tasks.results import PromptResult, ResultsFile
from dflash_local.bench.tasks.server_run import WARM_UP_TOKENS
from tests.bench.tasks.data_files import add_task
from tests.cli.conftest import Cli, Opened
from tests.fake_hub import FakeHub, online
from tests.remote.launched_fake import fake_program
from tests.remote.openai_fake import Fake, running
from tests.remote.test_openai_server import SUMMARY

pytestmark = pytest.mark.usefixtures("opened")

BENCH = ("bench", "demo", "--url")
AT = ("--url", "http://127.0.0.1:1")


@pytest.fixture
def fake() -> Iterator[Fake]:
    with running(Fake(pause_s=0.001)) as server:
        yield server


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub, online(hub):
        for name in ("gsm8k", "mt-bench", "mbpp"):
            add_task(hub, name)
        yield hub


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Twelve of them."""
    file = tmp_path / "twelve.jsonl"
    file.write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(12)), encoding="utf-8")
    return str(file)


def asked(fake: Fake) -> list[str]:
    """The last messages of the requests that were measured, in the order they came."""
    measured = [body for _, body in fake.bodies if body["max_tokens"] != WARM_UP_TOKENS]
    return [body["messages"][-1]["content"] for body in measured]


def fail_at(fake: Fake, word: str, fault: str) -> None:
    fake.fault_of = lambda body: fault if body["messages"][-1]["content"] == word else ""


def test_every_number_of_requests_is_a_row_with_its_own_warm_up(
    cli: Cli, opened: Opened, fake: Fake, prompts: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    done = cli(*BENCH, fake.url, "--prompts", prompts, "--concurrency", "1,4", "--report", str(report))
    assert done.code == 0, done.err
    assert not opened.sessions and fake.most == 4
    rows = [line.strip("| ").split(" | ") for line in done.out.splitlines() if line.startswith("| Prompts | here")]
    assert [row[2] for row in rows] == ["1", "4"] and "Plain" not in done.out.splitlines()[2]
    assert [row[6] for row in rows] == ["2.33", "2.33"], "of the server's counters, the warm-up left out"
    short = [body["messages"][0]["content"] for _, body in fake.bodies if body["max_tokens"] == WARM_UP_TOKENS]
    assert len(short) == 1 + 4 and not set(short) & set(asked(fake)) and len(asked(fake)) == 24
    content = json.loads(report.read_text(encoding="utf-8"))
    assert fake.url not in report.read_text(encoding="utf-8") and fake.url not in done.out
    one, four = content["tasks"]
    assert (one["concurrency"], four["concurrency"]) == (1, 4) and one["plain"] is None is one["speedup"]
    found = four["dflash"]
    assert (found["prompts"], found["failed"]) == (12, 0)
    throughput = found["throughput"]
    assert (throughput["tokens"], throughput["prompts"], throughput["uninterrupted"]) == (12 * 8, 12, True)
    assert throughput["tokens_per_s"] == pytest.approx(12 * 8 / throughput["wall_s"])
    assert found["accepted"] == {
        "length": None,
        "mean": pytest.approx(7 / 3),
        "prompts": 12,
        "source": "the server's counters",
    }
    assert found["ttft_s"]["p50"] <= found["ttft_s"]["p99"] and found["latency_s"]["p50"] > 0
    again = cli(*BENCH, fake.url, "--prompts", prompts, "--concurrency", "4", "--json")
    assert len(asked(fake)) == 24 and again.json["tasks"][0]["dflash"] == found, "kept, not measured again"


def test_tasks_are_measured_and_turns_stay_in_order(cli: Cli, fake: Fake, hub: FakeHub) -> None:
    done = cli(*BENCH, fake.url, "--tasks", "gsm8k,mt-bench,mbpp", "--concurrency", "2", "--json")
    assert done.code == 0, done.err
    gsm8k, bench, mbpp = done.json["tasks"]
    assert gsm8k["dflash"]["prompts"] == 3 and gsm8k["data"]["repo"] == "DaertML/gsm8k-jsonl"
    assert mbpp["dflash"]["prompts"] == 2
    assert (bench["dflash"]["prompts"], bench["dflash"]["requests"], bench["dflash"]["accepted"]["mean"]) == (
        2,
        4,
        pytest.approx(7 / 3),
    )
    talks = [body["messages"] for _, body in fake.bodies if body["messages"][0]["content"] == "Write a post."]
    assert [message["content"] for message in talks[1]] == ["Write a post.", "Hello, world!\n", "Now shorter."]
    assert all(body["max_tokens"] is None for _, body in fake.bodies if body["max_tokens"] != WARM_UP_TOKENS)


def test_plain_figures_come_from_a_second_server(cli: Cli, fake: Fake, prompts: str) -> None:
    with running(Fake(speculative=False, pause_s=0.004)) as plain:
        argv = (*BENCH, fake.url, "--plain-url", plain.url, "--prompts", prompts, "--concurrency", "3")
        done = cli(*argv, "--json")
        assert done.code == 0, done.err
        (task,) = done.json["tasks"]
        rates = [task[side]["throughput"]["tokens_per_s"] for side in ("dflash", "plain")]
        assert task["speedup"] == pytest.approx(rates[0] / rates[1])
        assert task["equal"] == {"prompts": 12, "of": 12} and task["plain"]["accepted"]["mean"] is None
        assert len(asked(plain)) == 12 and done.json["plain_server"]["drafts"] is False
        assert "was started without speculative decoding" not in done.err
        shown = cli(*argv).out.splitlines()
        assert "| Plain tok/s | DFlash tok/s | Speed-up |" in shown[2] and shown[4].endswith("| 12 of 12 |")
        assert [line.split(" | ")[2] for line in shown if line.startswith("| Prompts | 3")] == ["DFlash", "plain"]
        swapped = cli(*BENCH, plain.url, "--plain-url", fake.url, "--prompts", prompts)
        assert swapped.code == 2 and "does not draft: there is nothing to compare" in swapped.err
        both = cli(*BENCH, fake.url, "--plain-url", fake.url, "--prompts", prompts)
        assert both.code == 2 and "are the same server" in both.err and both.out == ""
        plain.metrics = lambda: ""
        silent = cli(*argv)
        assert silent.code == 2 and "does not report whether it drafts" in silent.err and silent.out == ""


def test_replies_cut_off_in_other_thoughts_are_not_equal(cli: Cli, prompts: str) -> None:
    thoughts: dict[str, Any] = {"program": "ollama", "reply": (("", ()),), "pause_s": 0.001}  # it names no tokens
    with running(Fake(thinking="one", **thoughts)) as fake:
        with running(Fake(thinking="one", speculative=False, **thoughts)) as plain:
            argv = (*BENCH, fake.url, "--plain-url", plain.url, "--prompts", prompts, "--limit", "3", "--json")
            assert cli(*argv).json["tasks"][0]["equal"] == {"prompts": 3, "of": 3}
            plain.thinking = "another"
            assert cli(*argv, "--no-resume").json["tasks"][0]["equal"] == {"prompts": 0, "of": 3}


def test_a_killed_run_goes_on_and_no_part_of_it_is_mixed_with_another(
    cli: Cli, fake: Fake, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the ninth prompt: the rest is another part, and throughput is the longer one's alone."""
    added: list[str] = []
    real = ResultsFile.add

    def interrupted(file: ResultsFile, result: PromptResult) -> None:
        real(file, result)
        added.append(result.id)
        if len(added) == 9:
            raise KeyboardInterrupt

    argv = (*BENCH, fake.url, "--prompts", prompts, "--concurrency", "2")
    with monkeypatch.context() as patch:
        patch.setattr(ResultsFile, "add", interrupted)
        assert cli(*argv).code == 130
    done = cli(*argv, "--json")
    assert done.code == 0 and "9 of 12 prompts are answered" in done.err
    missing = {f"question {n}" for n in range(12) if str(n + 1) not in added}
    assert set(asked(fake)[-3:]) == missing and len(missing) == 3
    found = done.json["tasks"][0]["dflash"]
    assert (found["prompts"], found["parts"]) == (12, 2)
    assert (found["throughput"]["prompts"], found["throughput"]["uninterrupted"]) == (9, False)
    assert (found["throughput"]["tokens"], found["accepted"]["prompts"]) == (72, 3)
    assert found["accepted"]["mean"] == pytest.approx(7 / 3)
    shown = cli(*argv).out
    assert "(of 9 prompts)" in shown and "(of 3 prompts)" in shown
    assert "measured in 2 parts; throughput is of the longest alone" in shown and "that part ended early" in shown
    anew = cli(*argv, "--no-resume", "--json").json["tasks"][0]["dflash"]
    assert (anew["parts"], anew["throughput"]["prompts"], anew["throughput"]["uninterrupted"]) == (1, 12, True)


@pytest.mark.parametrize("fault", ["500", "dies", "400"])
def test_a_failed_prompt_is_a_row_and_is_tried_again(cli: Cli, fake: Fake, prompts: str, fault: str) -> None:
    fail_at(fake, "question 5", fault)
    done = cli(*BENCH, fake.url, "--prompts", prompts, "--concurrency", "3", "--json")
    assert done.code == 0, done.err
    found = done.json["tasks"][0]["dflash"]
    assert (found["prompts"], found["failed"], found["throughput"]["tokens"]) == (11, 1, 88)
    (error,) = [row["error"] for row in found["rows"] if row["error"]]
    assert error.startswith(("ServerError: ", "UsageError: "))
    fake.fault_of = None
    shown = cli(*BENCH, fake.url, "--prompts", prompts, "--concurrency", "3")
    assert asked(fake)[-1] == "question 5" and "| 12 | 0 |" in shown.out and "(of 11 prompts)" in shown.out


def test_a_server_that_refuses_everything_has_rows_and_no_figures(cli: Cli, fake: Fake, prompts: str) -> None:
    fake.fault = "500"
    done = cli(*BENCH, fake.url, "--prompts", prompts, "--concurrency", "8")
    assert done.code == 0 and "| Prompts | here | 8 | 8 | - | - | - |" in done.out
    assert "failed: ServerError: the server at" in done.out and "nothing was answered" in done.out


def test_a_server_that_is_gone_ends_the_run_and_what_was_measured_is_kept(cli: Cli, fake: Fake, prompts: str) -> None:
    argv = (*BENCH, fake.url, "--prompts", prompts, "--concurrency", "2")
    fake.lives = 2 + 6  # the warm-up's, and half of the prompts
    done = cli(*argv)
    assert done.code == 7 and done.out == "" and "what was measured is kept" in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("error")]) == 1
    fake.lives = None
    again = cli(*argv, "--json")
    assert again.code == 0 and " of 12 prompts are answered" in again.err
    assert again.json["tasks"][0]["dflash"]["prompts"] == 12 and again.json["tasks"][0]["dflash"]["parts"] == 2
    assert again.json["tasks"][0]["dflash"]["failed"] == 0


def test_requests_of_others_cost_the_acceptance_length(cli: Cli, fake: Fake, prompts: str) -> None:
    fake.others = 1
    done = cli(*BENCH, fake.url, "--prompts", prompts, "--concurrency", "4")
    assert done.code == 0 and "the acceptance length is not known: other requests ran at the same time" in done.out
    row = next(line for line in done.out.splitlines() if line.startswith("| Prompts | here"))
    assert row.strip("| ").split(" | ")[5:7] == ["-", "-"]


def test_replies_that_report_their_own_drafts_need_no_counters(cli: Cli, fake: Fake, prompts: str) -> None:
    """Both definitions of the acceptance length, whoever else uses the server."""
    fake.others, fake.figures = 1, {"metrics": {"speculative_decoding": SUMMARY}}
    found = cli(*BENCH, fake.url, "--prompts", prompts, "--concurrency", "4", "--json").json["tasks"][0]["dflash"]
    assert found["accepted"] == {
        "length": pytest.approx(7 / 3),
        "mean": pytest.approx(7 / 3),
        "prompts": 12,
        "source": "reported with each reply",
    }


def test_results_of_another_server_are_not_mixed(cli: Cli, fake: Fake, prompts: str) -> None:
    argv = (*BENCH, fake.url, "--prompts", prompts, "--limit", "2")
    assert cli(*argv).code == 0 and len(asked(fake)) == 2
    fake.version = "0.33.0"
    assert cli(*argv).code == 0 and len(asked(fake)) == 4
    assert cli(*argv, "--max-new-tokens", "20").code == 0 and len(asked(fake)) == 6
    with running(Fake()) as elsewhere:
        assert cli(*BENCH, elsewhere.url, "--prompts", prompts, "--limit", "2").code == 0
        assert not asked(elsewhere), "the same server at another address"


def test_the_published_row_is_that_of_as_many_requests(cli: Cli, fake: Fake, hub: FakeHub, own_home: Path) -> None:
    fake.model = "Qwen/Qwen3.5-9B"
    argv = ("bench", "qwen3.5-9b", "--url", fake.url, "--tasks", "gsm8k", "--concurrency", "1,2,8")
    done = cli(*argv)
    assert done.code == 0, done.err
    rows = [line.split(" | ")[1:4] for line in done.out.splitlines() if line.startswith("| GSM8K")][:5]
    assert rows == [
        ["here", "1", "8"],
        ["published [1]", "1", "8"],
        ["here", "2", "8"],
        ["here", "8", "8"],
        ["published [1]", "8", "8"],
    ]
    assert "| GSM8K | published [1] | 8 | 8 | 1464 | 4106 | 2.8x | 5.33 |" in done.out, "its plain figures, not ours"
    assert "| GSM8K | here | 8 | 8 | - | " in done.out and "throughput is of 3 prompts, so that fewer" in done.out
    one, two, eight = cli(*argv, "--json").json["tasks"]
    assert not two["published"], "none is published of two at a time"
    (cell,) = eight["published"]
    assert (cell["concurrency"], cell["tokens_per_s"], cell["block"]) == (8, 4106, 8)
    assert "thinking on there, off here" in cell["differences"] and "B200" in cell["source"]
    assert one["published"][0]["concurrency"] == 1


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ((*AT, "--concurrency", "0"), "'0' is not 1 to 32"),
        ((*AT, "--concurrency", "1,33"), "'33' is not 1 to 32"),
        ((*AT, "--concurrency", "1,,2"), "'' is not 1 to 32"),
        ((*AT, "--concurrency", "²"), "is not 1 to 32"),
        ((*AT, "--block-size", "8"), "--block-size does not go with a server"),
        ((*AT, "--context", "512"), "--context 512: the server at --url decides"),
        ((*AT, "--quantize", "int8"), "--quantize int8: the server at --url decides"),
        ((*AT, "--fidelity"), "--fidelity"),
        ((*AT, "--engine", "fused"), "loads a pair here"),
        ((*AT, "--weights", "random"), "--url does not go with --weights random"),
        ((*AT, "--limit", "0"), "limit 0"),
        (("--concurrency", "4"), "--concurrency does not go with prompts"),
        (("--plain-url", "http://127.0.0.1:1"), "--plain-url does not go with prompts"),
        (("--engine-args", "--enforce-eager"), "--engine-args does not go with prompts"),
        (("--engine", "vllm", "--weights", "random"), "--engine vllm does not go with --weights random"),
        (("--engine", "vllm", "--plain-url", "http://127.0.0.1:1"), "--plain-url is for --url"),
        (("--block-size", "4", "--block-size", "8"), "--block-size is given more than once"),
    ],
)
def test_wrong_options_are_one_line(cli: Cli, opened: Opened, extra: tuple[str, ...], word: str) -> None:
    done = cli("bench", "demo", *extra)
    assert done.code == 2 and word in done.err and done.out == "" and not opened.sessions


def test_launched_servers_are_measured_one_after_the_other(
    cli: Cli, opened: Opened, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = fake_program(tmp_path / "bin", monkeypatch)
    argv = ("bench", "demo", "--engine", "vllm", "--prompts", prompts, "--concurrency", "1,4", "--json")
    done = cli(*argv, "--engine-args", "--enforce-eager")
    assert done.code == 0 and not opened.sessions, done.err
    assert [task["concurrency"] for task in done.json["tasks"]] == [1, 4]
    for task in done.json["tasks"]:
        assert task["equal"] == {"prompts": 12, "of": 12} and task["speedup"] > 0
        assert task["dflash"]["accepted"]["mean"] == pytest.approx(7 / 3) and task["plain"]["accepted"]["mean"] is None
    assert (done.json["server"]["drafts"], done.json["plain_server"]["drafts"]) == (True, False)
    launched = json.loads(record.read_text(encoding="utf-8"))
    assert len(launched["pids"]) == 2 and launched["alive_before"] == [] and "--enforce-eager" in launched["argv"]


def test_nobody_there_and_token_ids_are_one_line(cli: Cli, fake: Fake, tmp_path: Path) -> None:
    nobody = cli(*BENCH, "http://127.0.0.1:1")
    assert nobody.code == 7 and "no server answers" in nobody.err
    file = tmp_path / "ids.jsonl"
    file.write_text('{"prompt_ids": [1, 2]}\n', encoding="utf-8")
    ids = cli(*BENCH, fake.url, "--prompts", str(file))
    assert ids.code == 2 and "gives prompts as token ids" in ids.err
