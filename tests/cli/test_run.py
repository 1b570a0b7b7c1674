"""``dflash run`` over a scripted session."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local.cli import run as run_module
from dflash_local.errors import CheckpointError, ContextError, EngineError
from dflash_local.events import Notice, Piece, Step
from dflash_local.load_config import LoadConfig
from dflash_local.request import SamplingParams
from tests.cli.conftest import Cli, Opened
from tests.service.scripted import HELLO, ScriptedFacts, ScriptedSession

KEYS = {
    "text", "token_ids", "acceptance_lengths", "finish_reason", "usage", "timing", "mode", "engine", "target",
    "drafter", "block_size", "seed", "dtype", "device", "mean_acceptance_length", "turn_acceptance_length", "thinking",
    "verify_rows", "mean_verify_rows", "undrafted_cycles", "copied_cycles", "mtp_cycles", "distinct_experts", "load",
}  # fmt: skip
TIMING = {
    "prefill_s", "decode_s", "tokens_per_s", "end_to_end_tokens_per_s", "draft_s", "verify_s", "plain_step_s",
    "plain_from",
}  # fmt: skip
HOSTILE = "a\x1b]52;c;aGk=\x07b\x1b]0;t\x1b\\c\x1b[6nd\x1bce\x9b31mf\x90q\x9cg\x1b]8;;http://x\x07h\x1b]unterminated"


def steps(*pieces: Piece) -> list[Step]:
    return [Step((piece,), (index,), 0, 0, 0, 0.0) for index, piece in enumerate(pieces)]


def test_text_goes_to_stdout_and_figures_to_stderr(cli: Cli, opened: Opened) -> None:
    result = cli("run", "demo", "hi")
    assert (result.code, result.out) == (0, "Hello, world!\n")
    line = "6 tokens · 120 tok/s · 2.0x · 2.5 a step · first token 10 ms"
    assert result.err.splitlines() == ["demo (toy pair), reference float32 cpu", line]
    (request,) = opened.session.requests
    assert request.sampling == SamplingParams() and not request.thinking and request.limits.max_new_tokens == 512
    assert opened.session.closed


def test_a_line_end_is_added_where_the_model_wrote_none(cli: Cli, opened: Opened) -> None:
    opened.make = lambda _pair: ScriptedSession(steps=steps(Piece("no end")))
    assert cli("run", "demo", "hi").out == "no end\n"


def test_json_is_one_object_with_exactly_the_promised_keys(cli: Cli, opened: Opened) -> None:
    result = cli("run", "demo", "hi", "--json", "--seed", "7")
    content = result.json
    assert result.code == 0 and result.err == "" and result.out.count("\n") == 1
    assert set(content) == KEYS and set(content["timing"]) == TIMING
    assert content["text"] == "Hello, world!\n" and content["token_ids"] == [10, 11, 12, 13, 14, 15]
    assert content["acceptance_lengths"] == [3, 2] and content["seed"] == 7
    assert content["usage"] == {"prompt_tokens": 5, "completion_tokens": 6}
    assert (content["finish_reason"], content["mode"], content["engine"]) == ("stop", "dflash", "reference")
    assert LoadConfig(**content["load"]) == opened.session.facts.load


def test_every_option_reaches_the_request_and_the_load(cli: Cli, opened: Opened, local: Path, tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    options = (
        "--max-new-tokens 9 --temperature 0.8 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1"
        " --presence-penalty 0.2 --frequency-penalty 0.3 --seed 18446744073709551615 --block-size 3 --dtype bfloat16"
        " --device cuda:1 --engine reference --quantize bnb-nf4 --allow-mismatch --think --system sys --stop A --stop B"
    )
    result = cli("run", str(local), "hi", "--drafter", str(tmp_path / "drafter"), *options.split())
    assert result.code == 0, result.err
    (request,) = opened.session.requests
    assert request.sampling == SamplingParams(0.8, 5, 0.9, 0.1, 1.1, 0.2, 0.3, 2**64 - 1)
    assert request.limits.max_new_tokens == 9 and request.limits.stop == ("A", "B")
    assert (request.mode, request.block_size, request.thinking) == ("dflash", 3, True)
    assert [(m.role, m.content) for m in request.messages] == [("system", "sys"), ("user", "hi")]
    (config,) = opened.loads
    assert (config.dtype, config.device, config.quantize, config.allow_mismatch, config.draft) == (
        "bfloat16", "cuda:1", "bnb-nf4", True, True,
    )  # fmt: skip


def test_settings_change_the_defaults_and_options_win(
    cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TEMPERATURE", "0.4"), ("MAX_NEW_TOKENS", "3"), ("DEVICE", "cpu"), ("THINKING", "1")):
        monkeypatch.setenv(f"DFLASH_{name}", value)
    cli("run", "demo", "hi", "--temperature", "0", "--no-think")
    (request,) = opened.session.requests
    assert request.sampling.temperature == 0.0 and not request.thinking
    assert request.limits.max_new_tokens == 3 and opened.loads[0].device == "cpu"


def test_piped_text_is_appended_after_an_empty_line(cli: Cli, opened: Opened) -> None:
    cli("run", "demo", "Explain:", stdin="def f():\n    pass\n")
    assert opened.session.requests[0].messages[0].content == "Explain:\n\ndef f():\n    pass"
    cli("run", "demo", stdin="only piped\n")
    assert opened.session.requests[0].messages[0].content == "only piped"
    cli("run", "demo", "hi", stdin=b"\xff\xfe caf\xc3\xa9")
    assert opened.session.requests[0].messages[0].content == "hi\n\n\ufffd\ufffd caf\xe9"
    cli("run", "demo", "caf\udce9")
    assert opened.session.requests[0].messages[0].content == "caf\ufffd"


def test_stdin_is_left_alone_for_prompt_ids_and_devices(cli: Cli, opened: Opened) -> None:
    assert cli("run", "demo", "--prompt-ids", "1, 2,3", stdin="ignored").code == 0
    assert opened.session.requests[0].prompt_ids == (1, 2, 3)
    with open("/dev/zero", encoding="utf-8") as endless:
        assert run_module.piped_text(endless) == ""


@pytest.mark.parametrize("prompt", ["", "  ", "\n\t"])
def test_an_empty_prompt_is_a_usage_error(cli: Cli, opened: Opened, prompt: str) -> None:
    result = cli("run", "demo", prompt, stdin=" \n")
    assert result.code == 2 and "no prompt" in result.err and result.out == ""
    assert not opened.sessions, "refused before anything loads"


def test_every_64_bit_seed_is_taken(cli: Cli, opened: Opened) -> None:
    for seed, used in ((0, 0), (2**63, 2**63), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)):
        assert cli("run", "demo", "hi", "--json", "--seed", str(seed)).json["seed"] == used


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prompt-ids", "1,x"], "'x' is not a token id"),
        (["--prompt-ids", "1,-2"], "'-2' is not a token id"),
        (["--prompt-ids", "9" * 5000], "is not a token id"),
        (["--prompt-ids", ","], "--prompt-ids is empty"),
        (["hi", "--prompt-ids", "1"], "stands for the whole prompt"),
        (["hi", "--temperature", "6"], "temperature 6.0 is outside 0..5"),
        (["hi", "--temperature", "nan"], "temperature nan"),
        (["hi", "--top-p", "2"], "top_p"),
        (["hi", "--block-size", "0"], "block_size 0 is outside 1..64"),
        (["hi", "--max-new-tokens", "-1"], "max_new_tokens -1"),
        (["hi", "--seed", "-9223372036854775809"], "seed"),
        (["hi", "--seed", "18446744073709551616"], "seed"),
        (["hi", "--seed", "lucky"], "seed"),
        (["hi", "--seed", "1.5"], "seed"),
        (["hi", "--stop", ""], "stop string"),
        (["hi", "--mode", "fast"], "--mode"),
        (["hi", "--engine", "quick"], "--engine"),
        (["hi", "--quantize", "int3"], "--quantize"),
        (["hi", "--bogus"], "--bogus"),
        (["hi", "--drafter", "/nowhere"], "--drafter '/nowhere' is neither on this machine"),
    ],
)
def test_bad_options_exit_2_in_one_line_before_loading(
    cli: Cli, opened: Opened, options: list[str], complaint: str
) -> None:
    result = cli("run", "demo", *options)
    assert result.code == 2 and result.out == "" and not opened.sessions
    assert complaint in result.err.splitlines()[0] and len(result.err.splitlines()) <= 2


def test_a_local_folder_without_a_drafter_says_what_to_do(cli: Cli, opened: Opened, local: Path) -> None:
    result = cli("run", str(local), "hi")
    assert result.code == 2 and "--drafter" in result.err and "--mode ar" in result.err
    assert cli("run", str(local), "hi", "--mode", "ar").code == 0
    assert opened.loads[-1].draft is False and opened.session.requests[0].mode == "ar"


def test_a_folder_without_tokenizer_needs_ids_and_its_text_is_null(cli: Cli, opened: Opened) -> None:
    bare = [Step((), (5,), 0, 0, 0, 0.0)]
    opened.make = lambda _pair: ScriptedSession(ScriptedFacts(has_tokenizer=False), steps=bare)
    refused = cli("run", "demo", "hi")
    assert refused.code == 2 and "--prompt-ids" in refused.err
    assert cli("run", "demo", "--prompt-ids", "1,2").out == "5\n", "ids are all the reply there is"
    content = cli("run", "demo", "--prompt-ids", "1,2", "--json").json
    assert content["text"] is None and content["thinking"] is None and content["token_ids"] == [5]


def test_thinking_is_kept_off_stdout_and_marked(cli: Cli, opened: Opened) -> None:
    opened.make = lambda _pair: ScriptedSession(steps=steps(Piece("hm", "thinking"), Piece("yes")))
    result = cli("run", "demo", "hi", "--think")
    assert result.out == "yes\n" and "[thinking]\nhm\n[end of thinking]" in result.err
    content = cli("run", "demo", "hi", "--json").json
    assert (content["text"], content["thinking"]) == ("yes", "hm")


def test_no_control_sequence_reaches_the_terminal(cli: Cli, opened: Opened) -> None:
    pieces = steps(Piece(HOSTILE, "thinking"), Piece(HOSTILE))
    facts = ScriptedFacts(notices=(HOSTILE,), target=HOSTILE)
    opened.make = lambda _pair: ScriptedSession(facts, steps=pieces)
    for result in (cli("run", "demo", "hi"), cli("run", "demo", "hi", "--json"), cli("run", HOSTILE, "hi")):
        for stream in (result.out, result.err):
            assert not [c for c in stream if ord(c) < 32 and c not in "\n\t" or 0x7F <= ord(c) < 0xA0]
    assert "]52;c;" in cli("run", "demo", "hi").out, "shown as visible text"


def test_an_error_with_control_sequences_is_harmless(cli: Cli, opened: Opened) -> None:
    def broken(_pair: object) -> ScriptedSession:
        raise CheckpointError(f"bad tensor {HOSTILE}\nsecond line", HOSTILE)

    opened.make = broken
    result = cli("run", "demo", "hi")
    assert result.code == 6 and "\x1b" not in result.err and "\x07" not in result.err
    assert len(result.err.splitlines()) == 2


def answering(**how: Any) -> Callable[[object], ScriptedSession]:
    """Opens a scripted session for whatever is asked for."""
    return lambda _pair: ScriptedSession(**how)


def test_a_sequence_split_across_steps_gives_the_same(cli: Cli, opened: Opened) -> None:
    outputs = set()
    for cuts in ([], [1], [2, 3], list(range(1, len(HOSTILE)))):
        edges = [0, *cuts, len(HOSTILE)]
        parts = [Piece(HOSTILE[a:b]) for a, b in zip(edges, edges[1:])]
        opened.make = answering(steps=steps(*parts))
        outputs.add(cli("run", "demo", "hi").out)
    assert len(outputs) == 1


def test_errors_are_one_line_and_a_hint_with_their_exit_code(cli: Cli, opened: Opened) -> None:
    for error, code in ((ContextError("too long", "shorten it"), 2), (EngineError("dead", "load again"), 7)):
        opened.make = answering(faults=[error])
        result = cli("run", "demo", "hi")
        assert result.code == code and result.err.endswith(f"error: {error.message}\nhint: {error.hint}\n")


def test_under_json_an_error_is_one_object_on_stderr_and_stdout_is_empty(cli: Cli, opened: Opened) -> None:
    opened.make = lambda _pair: ScriptedSession(faults=[ContextError("too long", "shorten it")])
    for argv, code in ((["demo", "hi"], 2), (["dmeo", "hi"], 3), (["demo", "hi", "--seed", "x"], 2), ([], 2)):
        result = cli("run", *argv, "--json")
        assert result.code == code and result.out == ""
        error = json.loads(result.err)["error"]
        assert error["exit_code"] == code and set(error) == {"type", "message", "hint", "exit_code"}


def test_a_traceback_is_shown_with_debug_only(cli: Cli, opened: Opened) -> None:
    opened.make = lambda _pair: ScriptedSession(faults=[ZeroDivisionError("oops")])
    assert "Traceback" not in cli("run", "demo", "hi").err
    debugged = cli("run", "demo", "hi", "--debug")
    assert debugged.code == 7 and "Traceback" in debugged.err and "ZeroDivisionError: oops" in debugged.err


def test_notices_of_load_and_reply_are_shown_on_stderr(cli: Cli, opened: Opened) -> None:
    class Alarming(ScriptedSession):
        def generate(self, *arguments):  # type: ignore[no-untyped-def]
            yield Notice("acceptance is low", "warning")
            yield from super().generate(*arguments)

    opened.make = lambda _pair: Alarming(ScriptedFacts(notices=("odd pair",)))
    result = cli("run", "demo", "hi")
    assert "warning: odd pair" in result.err and "warning: acceptance is low" in result.err
    assert result.out == "Hello, world!\n"


def test_ctrl_c_stops_the_reply_keeps_what_came_and_exits_130(cli: Cli, opened: Opened) -> None:
    def press(index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
            session.gate = threading.Event()  # goes on only when cancelled

    session = ScriptedSession(steps=HELLO, on_step=press)
    opened.make = lambda _pair: session
    before = signal.getsignal(signal.SIGINT)
    result = cli("run", "demo", "hi")
    assert result.code == 130 and result.out == "Hello\n" and "Traceback" not in result.err
    assert session.closed and signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_under_json_leaves_stdout_empty(cli: Cli, opened: Opened) -> None:
    def press(_index: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        session.gate = threading.Event()

    session = ScriptedSession(on_step=press)
    opened.make = lambda _pair: session
    result = cli("run", "demo", "hi", "--json")
    assert result.code == 130 and result.out == "" and json.loads(result.err)["error"]["type"] == "Interrupted"


def test_ctrl_c_while_loading_exits_130(cli: Cli, opened: Opened) -> None:
    def interrupted(_pair: object) -> ScriptedSession:
        raise KeyboardInterrupt

    opened.make = interrupted
    result = cli("run", "demo", "hi")
    assert result.code == 130 and result.err == "error: interrupted\n"
