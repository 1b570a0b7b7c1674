"""``dflash chat``: the line chat and its commands over a scripted session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.app.chat_commands import COMMANDS
from dflash_local.errors import ContextError, EngineError
from dflash_local.events import Piece, Step
from dflash_local.store import history
from dflash_local.store.records import Turn
from tests.cli.conftest import Cli, Opened
from tests.service.scripted import ScriptedFacts, ScriptedSession


def kept(chats: Path) -> list[Turn]:
    """The turns of the only chat there is."""
    (name,) = [entry.name for entry in history.entries(chats)]
    return list(history.load(chats, name)[1].turns)


def test_without_model_it_is_demo_and_says_so(cli: Cli, opened: Opened) -> None:
    result = cli("chat", stdin="")
    assert result.code == 0 and "talking to demo (toy pair) (no MODEL was given)" in result.err
    assert "no MODEL" not in cli("chat", "demo-hybrid", stdin="").err
    assert [pair.name for pair in opened.pairs] == ["demo", "demo-hybrid"]


def test_without_a_terminal_it_reads_lines_and_writes_plain_text(cli: Cli, opened: Opened) -> None:
    result = cli("chat", stdin="one\n\ntwo\n")
    assert result.code == 0 and result.out == "Hello, world!\n" * 2
    assert ">>>" not in result.out
    line = "6 tokens · 120 tok/s · 2.0x · 2.5 a step · first token 10 ms"
    assert result.err.splitlines()[-2:] == [line, line]


def test_the_conversation_grows_and_the_system_message_leads(cli: Cli, opened: Opened) -> None:
    cli("chat", "--system", "brief", stdin="one\ntwo\n")
    roles = [(m.role, m.content) for m in opened.session.requests[1].messages]
    assert roles == [("system", "brief"), ("user", "one"), ("assistant", "Hello, world!\n"), ("user", "two")]


def test_thinking_is_kept_apart_from_the_reply(cli: Cli, opened: Opened) -> None:
    steps = [Step((Piece("hm", "thinking"), Piece("yes")), (1,), 0, 0, 0, 0.0)]
    opened.make = lambda _pair: ScriptedSession(steps=steps)
    result = cli("chat", "--think", stdin="one\ntwo\n")
    reply = opened.session.requests[1].messages[1]
    assert (reply.content, reply.thinking) == ("yes", "hm")
    assert result.out == "yes\nyes\n" and "[thinking]" in result.err


def test_a_reply_cut_off_at_its_limit_says_so(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    opened.make = lambda _pair: ScriptedSession(end="length")
    result = cli("chat", stdin=f"one\n/export {tmp_path}/talk.md\n")
    assert "[cut off at its limit of 6 tokens]" in result.err
    assert "*(cut off at its limit of 6 tokens)*" in (tmp_path / "talk.md").read_text(encoding="utf-8")


def test_a_message_of_several_lines_and_one_that_begins_with_a_slash(cli: Cli, opened: Opened) -> None:
    cli("chat", stdin='"""first\n  second\n"""\n//etc is a folder\n"""one line"""\n"""open\nend')
    sent = [request.messages[-1].content for request in opened.session.requests]
    assert sent == ["first\n  second", "/etc is a folder", "one line", "open\nend"]


def test_sampling_comes_from_the_models_generation_config(cli: Cli, opened: Opened, toys: Path) -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (toys / "demo" / "target" / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    cli("chat", "--top-k", "3", stdin="hi\n/set temperature 0.1\nhi\n")
    first, second = (request.sampling for request in opened.session.requests)
    assert (first.temperature, first.top_k, first.top_p, first.seed) == (0.6, 3, 0.95, None)
    assert (second.temperature, second.top_k) == (0.1, 3)


def test_set_shows_changes_and_refuses(cli: Cli, opened: Opened) -> None:
    lines = ["/set", "/set top_k 5", "/set max-new-tokens 7", "/set seed 4", "/set thinking on", "/set block_size 2"]
    lines += [
        "/set full-context stop",
        "/set full-context never",
        "/set stop END",
        "hi",
        "/set seed random",
        "/set stop off",
        "/set block_size auto",
        "hi",
    ]
    result = cli("chat", stdin="\n".join(lines))
    first, second = opened.session.requests
    assert (first.sampling.top_k, first.sampling.seed, first.block_size, first.thinking) == (5, 4, 2, True)
    assert first.limits.max_new_tokens == 7 and first.limits.stop == ("END",)
    assert (second.sampling.seed, second.block_size, second.limits.stop) == (None, None, ())
    assert "full_context stop" in result.err and "must be one of drop, summarise, stop, got 'never'" in result.err
    assert "temperature" in result.err and "max_new_tokens       1024" in result.err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set temprature 1", "did you mean temperature?"),
        ("/set temperature hot", "temperature must be a number"),
        ("/set temperature 9", "outside 0..5"),
        ("/set seed -1", "seed -1"),
        ("/set top_k", "needs a value"),
        ("/set thinking maybe", "on or off"),
        ("/stast", "did you mean /stats?"),
        ("/xyzzy", "/help shows the commands"),
        ("/mode fast", "/mode dflash or /mode ar"),
        ("/model dmeo", "did you mean 'demo'?"),
        ("/model a b c", "too many words"),
        ('/model "demo', "close the quotes"),
        ("/stats", "no reply yet"),
        ("/regen", "no reply to make again"),
        ("/save", "needs a name"),
        ("/save mine", "nothing to save"),
        ("/title Rivers", "not kept on disk"),
        ("/load ../x", "no chat '../x'"),
        ("/load none", "no chat 'none'"),
        ("/export", "needs one file name"),
        ("/export talk.doc", "ends neither"),
        (f"/export {'x' * 5000}.md", "cannot be written"),
    ],
)
def test_a_bad_command_is_a_line_and_the_chat_goes_on(cli: Cli, opened: Opened, line: str, complaint: str) -> None:
    result = cli("chat", stdin=f"{line}\nhi\n")
    assert result.code == 0 and complaint in result.err and result.out == "Hello, world!\n"


def test_help_names_every_command(cli: Cli, opened: Opened) -> None:
    result = cli("chat", stdin="/help\n")
    assert all(name in result.err for name in COMMANDS) and len(COMMANDS) == 15


@pytest.mark.parametrize("word", ["/quit", "/bye", "/exit", "/QUIT"])
def test_quitting(cli: Cli, opened: Opened, word: str) -> None:
    result = cli("chat", stdin=f"{word}\nhi\n")
    assert result.code == 0 and result.out == "" and opened.session.closed


def test_mode_changes_the_next_reply(cli: Cli, opened: Opened) -> None:
    result = cli("chat", stdin="/mode ar\nhi\n/mode\n/mode dflash\nhi\n")
    assert [request.mode for request in opened.session.requests] == ["ar", "dflash"]
    assert "mode ar" in result.err and result.err.count(" · plain · ") == result.err.count(" a step · ") == 1


def test_model_changes_the_pair_and_keeps_the_conversation(cli: Cli, opened: Opened) -> None:
    result = cli("chat", stdin="hi\n/model demo-hybrid\nho\n/model\n")
    assert opened.sessions[0].closed and "now talking to demo-hybrid (toy pair)" in result.err
    assert len(opened.sessions[1].requests[0].messages) == 3


def test_a_folder_needs_its_drafter_named(cli: Cli, opened: Opened, local: Path) -> None:
    result = cli("chat", stdin=f"/model {local}\n/model {local} {local}\n/mode ar\n/model {local}\nhi\n/mode dflash\n")
    assert "no drafter is known" in result.err and [pair.drafter for pair in opened.pairs][1:] == [local, None]
    assert opened.loads[-1].draft is False and opened.session.requests[0].mode == "ar"


def test_a_model_without_tokenizer_cannot_chat(cli: Cli, opened: Opened) -> None:
    opened.make = lambda _pair: ScriptedSession(ScriptedFacts(has_tokenizer=False))
    result = cli("chat", stdin="hi\n")
    assert result.code == 2 and "no tokenizer" in result.err and opened.session.closed


def test_stats_are_told_in_full(cli: Cli, opened: Opened) -> None:
    err = cli("chat", stdin="hi\n/stats\n").err
    assert "accepted per position: 100%, 50%, 0%" in err and "draft 0.020 s, verify 0.020 s" in err
    assert "acceptance length 2.50 per cycle, 3.00 per turn (2 cycles)" in err and "seed 99" in err
    assert "plain step 16.7 ms (60 tok/s), measured at load" in err
    assert "how often each acceptance length" in err and "1 replies, 6 tokens" in err


def test_regen_draws_a_fresh_seed_and_replaces_the_reply(cli: Cli, opened: Opened, chats: Path) -> None:
    cli("chat", "--seed", "7", "--temperature", "1", typed="hi\n/regen\n/regen\n")
    requests = opened.session.requests
    assert requests[0].sampling.seed == 7 and len({request.sampling.seed for request in requests}) == 3
    assert all([m.content for m in request.messages] == ["hi"] for request in requests)
    assert [turn.role for turn in kept(chats)] == ["user", "assistant"]
    assert kept(chats)[1].figures["seed"] == requests[2].sampling.seed


def test_a_regen_that_fails_keeps_the_old_reply(cli: Cli, opened: Opened, chats: Path) -> None:
    opened.make = lambda _pair: ScriptedSession(faults=[None, ContextError("too long")])
    result = cli("chat", typed="hi\n/regen\nho\n")
    assert "error: too long" in result.err
    assert [m.role for m in opened.session.requests[2].messages] == ["user", "assistant", "user"]
    assert [turn.content for turn in kept(chats)][:2] == ["hi", "Hello, world!\n"]


def test_a_failed_message_is_taken_back(cli: Cli, opened: Opened, chats: Path) -> None:
    opened.make = lambda _pair: ScriptedSession(faults=[ContextError("too long", "/clear begins anew")])
    result = cli("chat", typed="long\nshort\n")
    assert result.code == 0 and "error: too long" in result.err
    assert [m.content for m in opened.session.requests[1].messages] == ["short"]
    assert [turn.content for turn in kept(chats)] == ["short", "Hello, world!\n"]


def test_a_broken_engine_is_loaded_again_by_the_next_message(cli: Cli, opened: Opened, chats: Path) -> None:
    opened.make = lambda _pair: ScriptedSession(faults=[None, EngineError("dead context", "load again")])
    result = cli("chat", typed="hi\nho\nhe\n")
    assert result.code == 0 and "error: dead context\nhint: load again\n" in result.err
    assert [turn.content for turn in kept(chats)] == ["hi", "Hello, world!\n", "he", "Hello, world!\n"]
    opened.make = lambda _pair: ScriptedSession(faults=[EngineError("dead context", "load again")])
    last = cli("chat", "--no-history", typed="hi\n")
    assert last.code == 7 and last.err.endswith("error: the engine is broken: dead context\nhint: load again\n")
