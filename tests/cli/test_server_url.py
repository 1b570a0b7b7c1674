"""``dflash run`` and ``dflash chat`` over a vLLM or SGLang server: what they print, and what a server decides."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_local.store import history
from tests.cli.conftest import Cli, Opened
from tests.cli.served import record_by_hand
from tests.remote.hostile import PROBES, STREAMS, Mode
from tests.remote.launched_fake import ROOT
from tests.remote.openai_fake import Fake, Handler, running

pytestmark = pytest.mark.usefixtures("opened")

ROW = "Qwen/Qwen3.5-9B"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with running(Fake()) as server:
        yield server


def test_run_prints_the_reply_and_where_it_comes_from(cli: Cli, opened: Opened, fake: Fake) -> None:
    result = cli("run", "demo", "hi", "--url", f"{fake.url}/v1", "--seed", "7")
    assert result.code == 0 and result.out == "Hello, world!\n" and not opened.sessions
    assert f"replies come from vLLM 0.32.0 at {fake.url}, 7 drafts a cycle" in result.err
    assert "2.3 a step" in result.err and "x · " not in result.err  # no plain step of a server is known


def test_what_a_server_does_not_count_is_left_out(cli: Cli, fake: Fake) -> None:
    fake.usage = False
    result = cli("run", "demo", "hi", "--url", fake.url, "--max-new-tokens", "3")
    assert result.code == 0 and "[cut off at its limit]" in result.err and "2.3 a step · first token" in result.err
    chat = cli("chat", "demo", "--url", fake.url, stdin="hi\n/stats\n")
    assert chat.code == 0 and "first token after" in chat.err
    assert "0 tokens ·" not in result.err + chat.err and "0.0 tok/s" not in chat.err


def test_run_prints_one_object(cli: Cli, fake: Fake) -> None:
    found = cli("run", "demo", "hi", "--url", fake.url, "--engine", "vllm", "--json").json
    assert found["text"] == "Hello, world!\n" and found["token_ids"] == list(range(10, 18))
    assert (found["engine"], found["mode"], found["target"], found["dtype"]) == ("vllm", "dflash", "demo", None)
    assert found["mean_acceptance_length"] == pytest.approx(7 / 3) and found["turn_acceptance_length"] is None
    assert found["acceptance_lengths"] == [] and found["usage"] == {"prompt_tokens": 5, "completion_tokens": 8}


def test_a_pair_of_the_registry_needs_no_files(cli: Cli, fake: Fake) -> None:
    fake.model, fake.root = "mine", "/models/Qwen3.5-9B"
    for name in (ROW, "qwen3.5-9b"):
        result = cli("run", name, "hi", "--url", fake.url)
        assert result.code == 0 and result.out == "Hello, world!\n", result.err
    assert [body["model"] for _, body in fake.bodies] == ["mine", "mine"]
    assert "was trained for 15" in result.err  # the fake drafts seven


def test_a_target_that_runs_on_a_server_only_runs_there(cli: Cli, fake: Fake) -> None:
    fake.model = "moonshotai/Kimi-K2.5"
    assert "dflash chat moonshotai/Kimi-K2.5 --url" in cli("run", "moonshotai/Kimi-K2.5", "hi").err
    assert cli("run", "moonshotai/Kimi-K2.5", "hi", "--url", fake.url).out == "Hello, world!\n"


def test_a_model_that_only_the_server_knows(cli: Cli, fake: Fake) -> None:
    fake.model = "house-model"
    assert cli("run", "house-model", "hi", "--url", fake.url).out == "Hello, world!\n"
    refused = cli("run", "hous-model", "hi", "--url", fake.url)
    assert refused.code == 3 and "serves house-model, not hous-model" in refused.err
    result = cli("chat", "--url", fake.url, stdin="hi\n")
    assert result.code == 0 and "talking to house-model;" in result.err and "greedy unless --temperature" in result.err


def test_the_token_comes_from_its_variable(cli: Cli, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.token = "a-secret-of-mine"
    refused = cli("run", "demo", "hi", "--url", fake.url)
    assert refused.code == 7 and "wants a token" in refused.err and "DFLASH_ENGINE_TOKEN" in refused.err
    monkeypatch.setenv("DFLASH_ENGINE_TOKEN", "a-secret-of-mine")
    result = cli("run", "demo", "hi", "--url", fake.url)
    assert result.code == 0 and "a-secret-of-mine" not in result.err + result.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--url", "http://127.0.0.1:1", "--keep"), "--keep is for what this command starts"),
        (("--url", "http://127.0.0.1:1", "--own"), "--own is for what this command starts"),
        (("--url", "http://127.0.0.1:1", "--engine-args", "-x"), "--engine-args is for a server that is launched"),
        (("--engine", "vllm", "--engine-args", "'"), "--engine-args: No closing quotation"),
        (("--engine", "vllm", "--quantize", "int8"), "--quantize int8: the launched server decides"),
        (("--url", "http://127.0.0.1:1", "--engine", "fused"), "loads a pair here"),
        (("--url", "http://127.0.0.1:1", "--quantize", "int8"), "--quantize int8: the server at --url decides"),
        (("--url", "http://127.0.0.1:1", "--mode", "ar"), "--mode ar: the server at --url decides"),
        (("--url", "127.0.0.1:1"), "is not the address of a server"),
        (("--url", "http://me:pass@h:1"), "holds a user name or a password"),
    ],
)
@pytest.mark.parametrize("command", ["run", "chat"])
def test_options_that_do_not_go_together_are_a_line(
    cli: Cli, opened: Opened, command: str, argv: tuple[str, ...], words: str
) -> None:
    result = cli(command, "demo", *(["hi"] if command == "run" else []), *argv)
    assert result.code == 2 and words in result.err and not opened.sessions
    assert len(result.err.splitlines()) == 2


def test_an_engine_of_ours_is_still_an_option_of_loading(cli: Cli, opened: Opened) -> None:
    assert cli("run", "demo", "hi", "--engine", "reference").code == 0
    assert cli("chat", "demo", "--engine", "auto", stdin="").code == 0
    assert [load.engine for load in opened.loads] == ["reference", "auto"]


@pytest.mark.parametrize("fault", ["dies", "error"])
def test_a_chat_keeps_what_came_of_a_reply_and_goes_on(
    cli: Cli, fake: Fake, chats: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    real = Handler.do_POST

    def second_fails(self: Handler) -> None:
        fake.fault = fault if len(fake.bodies) == 1 else ""
        real(self)

    monkeypatch.setattr(Handler, "do_POST", second_fails)
    result = cli("chat", "demo", "--url", fake.url, typed="one\ntwo\nthree\n/stats\n")
    assert result.code == 0 and result.out == "Hello, world!\nHello, \nHello, world!\n"
    errors = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and f"the server at {fake.url}" in errors[0] and "Traceback" not in result.err
    sent = [(message["role"], message["content"]) for message in fake.bodies[-1][1]["messages"]]
    assert sent == [
        ("user", "one"),
        ("assistant", "Hello, world!\n"),
        ("user", "two"),
        ("assistant", "Hello, "),
        ("user", "three"),
    ]
    (name,) = [entry.name for entry in history.entries(chats)]
    turns = history.load(chats, name)[1].turns
    assert [(turn.content, turn.ending) for turn in turns][3] == ("Hello, ", "stopped")
    assert "2 replies" in result.err and "draft 0.000" not in result.err


def test_another_model_of_a_chat_is_one_of_the_server(cli: Cli, opened: Opened, fake: Fake) -> None:
    result = cli("chat", "demo", "--url", fake.url, stdin=f"/model {ROW}\nhi\n/model\n/model demo\n")
    assert result.code == 0 and result.out == "Hello, world!\n" and not opened.sessions
    assert f"error: the server at {fake.url} serves demo, not {ROW}" in result.err
    assert "block 8" in result.err and "now talking to demo" in result.err


def test_a_failed_run_prints_what_came_and_ends_with_7(cli: Cli, fake: Fake) -> None:
    fake.fault = "dies"
    result = cli("run", "demo", "hi", "--url", fake.url)
    assert result.code == 7 and result.out == "Hello, \n"
    assert "broke off in the middle of the reply" in result.err and "Traceback" not in result.err


def test_a_servers_text_cannot_reach_the_terminal_as_control(
    cli: Cli, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.remote.openai_fake.WORDS", ("a\x1b]0;owned\x07", "b", "c", "\x9b2J"))
    fake.version = "0.32.0\x1b[31m\nsecond"
    result = cli("run", "demo", "hi", "--url", fake.url)
    assert result.code == 0 and "a␛]0;owned␇bc" in result.out
    assert not {"\x1b", "\x9b", "\x07"} & set(result.out + result.err) and "␛[31m␊second" in result.err


INTERRUPTED: dict[str, tuple[str, Mode, list[str]]] = {
    "a probe": ("/v1/models", PROBES["a head byte by byte"], ["run", "demo", "hi"]),
    "a flood": ("/v1/models", PROBES["100 Continue without end"], ["chat", "demo"]),
    "the page before a reply": ("/metrics", PROBES["a body byte by byte"], ["run", "demo", "hi"]),
    "a reply": ("/v1/chat/completions", STREAMS["silence"], ["run", "demo", "hi"]),
    "another process": ("/dflash/v1/status", PROBES["a body byte by byte"], ["ps"]),
}


@pytest.mark.parametrize("what", INTERRUPTED)
def test_one_ctrl_c_ends_what_a_server_draws_out(own_home: Path, fake: Fake, what: str) -> None:
    path, mode, argv = INTERRUPTED[what]
    if what == "the page before a reply":  # the check before it is answered
        fake.metrics = lambda: str(fake.raw.setdefault(path, mode))
    else:
        fake.raw[path] = mode
    if argv == ["ps"]:
        record_by_hand(own_home, fake.url)
    else:
        argv = [*argv, "--url", fake.url]
    run = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored under nohup
        "from dflash_local.remote import server_metrics; server_metrics.SETTLE_S = 0.05\n"
        "from dflash_local.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", run, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert fake.asked.wait(60) and process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err, err
