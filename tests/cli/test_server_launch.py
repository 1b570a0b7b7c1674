"""``--engine vllm`` and ``sglang`` without ``--url``: the server is launched, used and ended."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_local.app.llama_cpp_command import llama_cpp_words
from dflash_local.app.resolve import choose
from dflash_local.app.server_launch import launch, program_of
from dflash_local.catalog import bundled
from dflash_local.cli.console import Console
from dflash_local.errors import Interrupted, ServerError
from dflash_local.events import LoadProgress, Notice
from dflash_local.planner import accelerators
from dflash_local.planner.accelerators import Accelerator
from dflash_local.remote.server_process import LoadPatience
from dflash_local.settings import load as load_settings
from tests.cli.conftest import Cli, Opened
from tests.remote.launched_fake import ROOT, fake_program, is_alive, started, wait_until_gone

pytestmark = [
    pytest.mark.usefixtures("opened"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"),
]


def logs(home: Path) -> list[Path]:
    return sorted((home / ".local" / "state" / "dflash-local" / "engines").glob("*.log"))


def test_run_launches_a_server_and_ends_it(cli: Cli, opened: Opened, record: Path, own_home: Path) -> None:
    result = cli("run", "demo", "hi", "--engine", "vllm", "--engine-args", "--enforce-eager --max-model-len 1024")
    assert result.code == 0 and result.out == "Hello, world!\n" and not opened.sessions, result.err
    assert "replies come from vLLM 0.32.0 at http://127.0.0.1:" in result.err and "warning" not in result.err
    found = started(record)
    pair = bundled.find("demo")
    argv, port = found["argv"], found["argv"][-4]
    drafts = {"method": "dflash", "model": str(pair.drafter), "num_speculative_tokens": 7}
    assert argv[:3] == ["serve", str(pair.target), "--speculative-config"] and json.loads(argv[3]) == drafts
    assert argv[4:] == [
        *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", port),
        *("--enforce-eager", "--max-model-len", "1024"),
    ]
    key = found["environ"]["VLLM_API_KEY"]
    (log,) = logs(own_home)
    assert len(key) > 20 and key not in " ".join(argv) + result.err and stat.S_IMODE(log.stat().st_mode) == 0o600
    assert str(log) in result.err and "Starting to load model" in log.read_text(encoding="utf-8")
    assert not is_alive(found["pid"]) and wait_until_gone(found["child"])


@pytest.mark.parametrize(
    ("device", "own", "count", "visible"),
    [
        ("balanced", None, "3", None),
        ("balanced", "2,0", "2", "2,0"),
        ("cuda:1,0", None, "2", "1,0"),
        ("cuda:1,0", "2,GPU-1,0", "2", "GPU-1,2"),
        ("cuda:1", None, "1", "1"),
        ("cuda", "2,1", "1", "2"),
    ],
)
def test_a_server_runs_on_all_gpus_or_the_named(
    cli: Cli,
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    own: str | None,
    count: str,
    visible: str | None,
) -> None:
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    cards = tuple(
        Accelerator(at, f"GPU-{at}", "NVIDIA A", "580.1", 24 * 2**30, 23 * 2**30, capability=(8, 6)) for at in range(3)
    )
    monkeypatch.setattr(accelerators, "nvidia", lambda _probe: cards)
    monkeypatch.setattr(accelerators, "unusable", lambda _driver: "")
    result = cli("run", "demo", "hi", "--engine", "vllm", "--device", device)
    assert result.code == 0, result.err
    found = started(record)
    argv = found["argv"]
    assert argv[argv.index("--tensor-parallel-size") + 1] == count
    assert found["environ"].get("CUDA_VISIBLE_DEVICES") == visible
    assert visible in (own, None) or found["environ"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "as they were counted"


@pytest.mark.parametrize("name", ["demo", "qwen3-4b"])
def test_the_hubs_token_goes_to_a_server_that_downloads(
    name: str, record: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_TOKEN", "DFLASH_TOKEN", "DFLASH_ENGINE_TOKEN"):
        monkeypatch.setenv(variable, f"a-secret-{variable}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    user = load_settings()
    with launch("vllm", choose(name, None, user), user) as server:
        found = started(record)
    secrets = {key for key, value in found["environ"].items() if "a-secret" in value}
    assert secrets == (set() if name == "demo" else {"HF_TOKEN"})
    assert Path(found["folder"]) == server.log.parent and not list(server.log.parent.glob("*.py"))


@pytest.mark.parametrize(
    ("options", "answer", "runs"),
    [
        ((), None, False),
        ((), False, False),
        ((), True, True),
        (("--trust-remote-code",), None, True),
        (("--engine-args", "--trust-remote-code"), None, True),
    ],
)
def test_code_of_a_repository_runs_only_where_the_user_agrees(
    cli: Cli, record: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], answer: bool | None, runs: bool
) -> None:
    asked: list[tuple[str, bool]] = []

    def ask(_self: Console, question: str, default: bool) -> bool | None:
        asked.append((question, default))
        return answer

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(Console, "can_ask", property(lambda self: answer is not None))
    monkeypatch.setattr(Console, "ask", ask)
    result = cli("run", "moonshotai/Kimi-K2.5", "hi", "--engine", "vllm", *options)
    question = "vLLM runs Python code of the repository of moonshotai/Kimi-K2.5 with your rights. Trust it?"
    assert asked == ([] if answer is None else [(question, False)])
    if runs:
        assert result.code == 0 and started(record)["argv"].count("--trust-remote-code") == 1, result.err
    else:
        assert result.code == 2 and not record.exists()
        assert "needs Python code of the repository" in result.err and "--trust-remote-code agrees" in result.err


def test_a_program_on_path_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("venv/vllm", "venv/sglang", "venv/python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(0o755)
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "sglang"):
        (tmp_path / "bin" / name).symlink_to(tmp_path / "venv" / name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert program_of("vllm", load_settings()) == tmp_path / "venv" / "vllm"
    assert program_of("sglang", load_settings()) == tmp_path / "venv" / "python"


def test_sglang_gets_its_own_command(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = fake_program(tmp_path / "python", monkeypatch, "DFLASH_SGLANG")
    result = cli("run", "demo", "hi", "--engine", "sglang")
    assert result.code == 0 and result.out == "Hello, world!\n" and "warning: SGLang" not in result.err, result.err
    pair, argv = bundled.find("demo"), started(record)["argv"]
    assert argv[:4] == ["-m", "sglang.launch_server", "--model-path", str(pair.target)]
    assert argv[4:10] == [
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(pair.drafter)),
        *("--speculative-num-draft-tokens", "8"),
    ]


def test_a_chat_talks_to_it_and_changes_the_model(cli: Cli, record: Path) -> None:
    result = cli("chat", "--engine", "vllm", stdin="hi\n/model demo-hybrid\nhi\n")
    assert result.code == 0 and result.out.count("Hello, world!\n") == 2, result.err
    assert "talking to demo (toy pair) (no MODEL was given)" in result.err
    found = started(record)  # of the second one
    assert "demo-hybrid" in found["argv"] and not is_alive(found["pid"])


def test_one_that_dies_is_a_line_with_its_reason(
    cli: Cli, record: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULT", "dies")
    result = cli("run", "demo", "hi", "--engine", "vllm")
    (log,) = logs(own_home)
    assert result.code == 7 and result.out == ""
    assert result.err.splitlines()[-2:] == [
        "error: vLLM ended while it started (exit code 1): ValueError: No room for one request, 9 GiB are needed",
        f"hint: its log: {log}",
    ]


def test_one_that_hangs_is_ended(record: Path, toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", "hangs")
    user = load_settings()
    with pytest.raises(ServerError, match="takes too long to start.*its last line: Starting to load model"):
        launch("vllm", choose("demo", None, user), user, drafts=False, patience=LoadPatience(2.0, 60.0))
    assert not is_alive(started(record)["pid"]) and wait_until_gone(started(record)["child"])
    with pytest.raises(ServerError, match="has written nothing for too long"):
        launch("vllm", choose("demo", None, user), user, drafts=False, patience=LoadPatience(60.0, 0.3))
    with pytest.raises(Interrupted, match="the start of vLLM was broken off"):
        launch("vllm", choose("demo", None, user), user, drafts=False, cancelled=record.exists)
    assert not is_alive(started(record)["pid"])


def test_how_far_the_start_is_comes_from_its_log(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DELAY", "0.5")
    user, events = load_settings(), list[Notice | LoadProgress]()
    with launch("vllm", choose("demo", None, user), user, notify=events.append) as server:
        assert server.alive and server.pid == started(record)["pid"] and "token" not in repr(server)
    assert not server.alive
    lines = [(event.stage, event.fraction) for event in events if isinstance(event, LoadProgress)]
    assert lines and lines[-1][0].endswith("s: Starting to load model /a/model...") and 0 < lines[-1][1] < 1
    server.stop()  # a second time does nothing


def test_a_kept_server_goes_on(cli: Cli, record: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli("run", "demo", "hi", "--engine", "vllm", "--keep")
    found = started(record)
    try:
        assert result.code == 0 and is_alive(found["pid"]), result.err
        line = next(line for line in result.err.splitlines() if "vLLM stays at" in line)
        token = logs(own_home)[0].with_suffix(".token")
        url = f"http://127.0.0.1:{found['argv'][-1]}"
        assert f"DFLASH_ENGINE_TOKEN=$(cat {token}) dflash chat demo --url {url}; kill {found['pid']} ends it" in line
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        refused = cli("run", "demo", "hi", "--url", url)
        assert refused.code == 7 and "wants a token" in refused.err
        monkeypatch.setenv("DFLASH_ENGINE_TOKEN", token.read_text(encoding="utf-8"))
        assert cli("run", "demo", "hi", "--url", url).out == "Hello, world!\n"
    finally:
        os.killpg(found["pid"], signal.SIGKILL)


def test_it_ends_with_a_program_that_is_killed(record: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal\n"
        "from dflash_local.app.server_launch import launch\n"
        "from dflash_local.app.resolve import choose\n"
        "from dflash_local.settings import load\n"
        "launch('vllm', choose('demo', None, load()), load())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = started(record)
    assert wait_until_gone(found["pid"]) and wait_until_gone(found["child"])


def test_a_program_that_is_not_there(cli: Cli, monkeypatch: pytest.MonkeyPatch, local: Path) -> None:
    missing = cli("run", "demo", "hi", "--engine", "vllm")
    assert missing.code == 1 and "vLLM is not on PATH" in missing.err
    assert "ENV/bin/pip install vllm" in missing.err and len(missing.err.splitlines()) == 2
    monkeypatch.setenv("DFLASH_VLLM", str(local / "vllm"))
    wrong = cli("chat", "demo", "--engine", "vllm", stdin="hi\n")
    assert wrong.code == 3 and "is no program" in wrong.err
    (local / "vllm").write_text("#!/no/such/interpreter\n", encoding="utf-8")
    (local / "vllm").chmod(0o755)
    broken = cli("run", "demo", "hi", "--engine", "vllm")
    assert broken.code == 1 and "vLLM cannot be started" in broken.err


def test_a_name_that_only_a_server_may_know_is_not_launched(cli: Cli, record: Path) -> None:
    result = cli("run", "house-model", "hi", "--engine", "vllm")
    assert result.code == 3 and "unknown model" in result.err and not record.exists()


def test_a_race_launches_both_one_after_the_other(cli: Cli, opened: Opened, record: Path, own_home: Path) -> None:
    """The drafting server first; the plain one is the same command without its drafter, and never runs beside it."""
    found = cli("race", "demo", "hi", "--engine", "vllm", "--engine-args", "--enforce-eager")
    assert found.code == 0 and not opened.sessions, found.err
    assert found.out.index("drafted:") < found.out.index("plain,") and "identical: yes\n" in found.out
    assert "acceptance length              -        2.33" in found.out
    assert len(logs(own_home)) == 2, "neither was launched twice"
    plain = started(record)
    assert plain["argv"][:2] == ["serve", str(bundled.find("demo").target)] and "--enforce-eager" in plain["argv"]
    assert not [word for word in plain["argv"] if "speculative" in word]
    assert plain["alive_before"] == [] and not is_alive(plain["pid"])


def test_a_certificate_asks_all_of_one_before_the_other_is_launched(
    cli: Cli, opened: Opened, record: Path, own_home: Path
) -> None:
    argv = ("certify", "demo", "--prompt", "hi", "--prompt-ids", "3,1", "--engine", "vllm", "--json")
    found = cli(*argv)
    assert found.code == 0 and not opened.sessions, found.err
    assert found.json["verdict"] == "identical" and len(found.json["runs"]) == 2 and len(logs(own_home)) == 2
    assert [found.json["servers"][name]["drafts"] for name in ("drafting", "plain")] == [True, False]
    refused = cli(*argv, "--planted")
    assert refused.code == 2 and "a server drafts as it was started" in refused.err and len(logs(own_home)) == 2


def test_one_that_does_not_draft_is_no_side_of_a_race(cli: Cli, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRAFTS", "no")
    found = cli("race", "demo", "hi", "--engine", "vllm")
    assert found.code == 2 and "does not draft: there is nothing to compare" in found.err
    assert not is_alive(started(record)["pid"])
    both = cli("race", "demo", "hi", "--engine", "vllm", "--plain-url", "http://127.0.0.1:9")
    assert both.code == 2 and "--url is missing" in both.err


def test_a_plain_server_that_does_not_start_costs_the_race(
    cli: Cli, record: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULT", "dies without drafts")
    found = cli("race", "demo", "hi", "--engine", "vllm")
    assert found.code == 7 and "No room for one request, 9 GiB are needed" in found.err and len(logs(own_home)) == 2
    assert not is_alive(started(record)["pid"])


def test_llama_cpp_is_launched_with_the_file_of_the_pair(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = ROOT / "tests" / "golden" / "gguf" / "llama.gguf"
    record = fake_program(tmp_path / "program", monkeypatch, "DFLASH_LLAMA_CPP")
    result = cli("certify", str(gguf), "--engine", "llama.cpp", "--prompt", "hi", "--max-new-tokens", "12")
    said = "verdict: 1 of 1 greedy replies equal, token by token; the server accepted no draft"
    assert result.code == 0 and said in result.out, result.err
    assert result.err.count("is drafted by lookup in the text") == 1, "of the drafting one alone"
    found = started(record)
    argv = found["argv"]
    assert argv[:2] == ["--model", str(gguf)] and "--spec-type" not in argv, "the plain one came last"
    assert argv[argv.index("--alias") + 1] == str(gguf) and len(found["pids"]) == 2 and not found["alive_before"]
    assert found["environ"]["LLAMA_API_KEY"] not in " ".join(argv)
    drafter = gguf.with_name("drafter-qwen3-dflash2-b16.gguf")
    choice = choose(str(gguf), str(drafter), load_settings())
    words, remark = llama_cpp_words(choice, None, True)
    assert not remark and words[-4:] == ("--spec-type", "draft-dflash", "--spec-draft-model", str(drafter))


def test_llama_cpp_takes_gguf_files_and_has_a_program_of_another_name(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cli("run", "demo", "hi", "--engine", "llama.cpp")
    assert result.code == 2 and "llama.cpp reads GGUF files, and none of demo is on this machine" in result.err
    monkeypatch.setenv("PATH", "/nowhere")
    gguf = ROOT / "tests" / "golden" / "gguf" / "llama.gguf"
    result = cli("run", str(gguf), "hi", "--engine", "llama.cpp")
    assert result.code == 1 and "llama-server of llama.cpp is not on PATH" in result.err
    assert "DFLASH_LLAMA_CPP=FILE" in result.err
