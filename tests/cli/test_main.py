"""The program as a process: start-up, exit codes, closed pipes, poor locales; and the console."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import typing
from itertools import chain
from pathlib import Path

import pytest
import typer

from dflash_local import __version__
from dflash_local.cli import main as main_module
from dflash_local.cli.console import Console, OutputClosed
from dflash_local.errors import CODES, DFlashError
from dflash_local.events import LoadProgress, Notice
from tests.cli.conftest import Cli, Opened, Terminal

ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES = 180
HEAVY = ("torch", "transformers", "tokenizers", "numpy", "textual", "gradio", "jinja2", "huggingface_hub")
# main() with a scripted session behind it, for tests that need a real process
SCRIPTED = """
import sys
from pathlib import Path
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.app import loading
from dflash_local.cli import main
from dflash_local.app.model_sources import LocalModels
from dflash_local.events import Piece, Step
from tests.service.scripted import ScriptedSession
text = "caf\\u00e9 \\u2713\\U0001f34e line %d\\n"
steps = [Step((Piece(text % n),), (n,), 0, 0, 0, 0.0) for n in range(int(sys.argv[1]))]
loading.open_session = lambda *_: ScriptedSession(steps=steps)
LocalModels.pair = lambda *_: Pair("p\\u00e9ar", Path("t"), Path("d"), False)
sys.exit(main.main(sys.argv[2:]))
"""


def python(*arguments: str, **more: object) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, **more.pop("env", {})}  # type: ignore[dict-item]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        **more,  # type: ignore[call-overload]
    )


def test_help_is_quick_and_an_error_before_loading_imports_nothing_heavy_either() -> None:
    program = (
        "import sys; from dflash_local.cli.main import main\n"
        "for argv in (['--help'], ['run', 'dmeo', 'hi']): print(main(argv), *sys.modules, file=sys.stderr)"
    )
    done = python("-c", program)
    assert b"Models:" in done.stdout
    helped, *told, failed = done.stderr.decode().splitlines()
    assert told[0].startswith("error: unknown model 'dmeo'") and "did you mean 'demo'?" in told[1]
    assert (helped.split()[0], failed.split()[0]) == ("0", "3")
    assert not {name.split(".")[0] for name in failed.split()} & set(HEAVY)
    # What takes the time is importing; a clock would measure the test machine. 159 modules took 0.20 s.
    assert len(helped.split()) <= MOST_MODULES, len(helped.split())


@pytest.mark.parametrize("env", [{"LC_ALL": "C", "LANG": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_poor_locale_gets_replaced_characters(env: dict[str, str]) -> None:
    ran = python("-c", SCRIPTED, "2", "run", "x", "hé", env=env)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == b"caf? ?? line 0\ncaf? ?? line 1\n" and b"p?ar" in ran.stderr
    as_json = python("-c", SCRIPTED, "1", "run", "x", "hi", "--json", env=env)
    assert as_json.returncode == 0 and rb"caf\u00e9 \u2713\ud83c\udf4e" in as_json.stdout


def test_output_into_head_ends_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPTED, "20000", "run", "x", "hi"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) in (0, 141)
    assert b"Traceback" not in err and b"Exception ignored" not in err and b"BrokenPipe" not in err
    process.stderr.close()


@pytest.mark.parametrize("arguments", [("run", "--help"), ("--version",)])
def test_help_into_a_closed_pipe_ends_quietly(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "dflash_local", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(write)
    assert process.returncode in (0, 141) and process.stderr == b""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_closed_streams_are_no_failure() -> None:
    command = f'exec "{sys.executable}" -m dflash_local --version'
    for closing in (">&-", "2>&- <&-", ">&- 2>&- <&-"):
        closed = subprocess.run(["sh", "-c", f"{command} {closing}"], cwd=ROOT, capture_output=True, timeout=60)
        assert closed.returncode in (0, 141) and b"Traceback" not in closed.stderr, closing
        assert closed.stdout.decode() == ("" if closing.startswith(">") else f"dflash-local {__version__}\n"), closing


def test_without_a_command_the_commands_are_named(cli: Cli) -> None:
    result = cli()
    assert result.code == 0 and all(name in result.out for name in main_module.COMMANDS)
    assert len(main_module.COMMANDS) == 17


def test_an_unknown_command_or_option_is_one_line_with_the_fix(cli: Cli) -> None:
    for argv in (["--bogus"], ["run"], ["run", "a", "b", "c"]):
        result = cli(*argv)
        assert result.code == 2 and result.err.startswith("error: ") and "--help" in result.err
    assert cli("rnu").err == "error: No such command 'rnu'. Did you mean 'run'? dflash --help lists them\n"
    for former in ("list", "cards", "warm", "report", "demo", "version"):
        unknown = cli(former)
        assert unknown.code == 2 and len(unknown.err.splitlines()) == 1 and "dflash --help lists them" in unknown.err


def test_every_option_is_declared_by_its_name() -> None:
    """Names that typer derives differ between its versions: 0.27.2 took ``--DEVICE`` from a metavar."""
    commands = typing.cast(typing.Any, typer.main.get_command(main_module.app)).commands
    seen = 0
    for command in commands.values():
        options = {param.name: {*param.opts, *param.secondary_opts} for param in command.params}
        for name, hint in typing.get_type_hints(command.callback, include_extras=True).items():
            parts = (hint, *typing.get_args(hint))  # Python 3.10 puts what may be None into an Optional
            for found in chain.from_iterable(getattr(part, "__metadata__", ()) for part in parts):
                if isinstance(found, typer.models.OptionInfo):
                    given = [found.default, *(found.param_decls or ())]  # typer takes the first name for a default
                    names = [word for word in given if isinstance(word, str) and word.startswith("-")]
                    declared = {word for words in names for word in words.split("/")}
                    longs = {word for word in declared if word.startswith("--")}
                    assert longs, f"dflash {command.name}: {name} has no name of its own"
                    assert all(re.fullmatch(r"--[a-z][a-z-]+", word) for word in longs), (command.name, longs)
                    assert declared == options[name], (command.name, name)
                    seen += 1
    assert seen > 100


ODD = "a\nb\x1b[31mc\td"


@pytest.mark.parametrize(
    "argv",
    [
        ("run", "{}", "hi"),
        ("show", "{}"),
        ("plan", "{}"),
        ("pull", "{}"),
        ("rm", "{}"),
        ("certify", "{}"),
        ("race", "{}"),
    ],
)
def test_a_folder_whose_name_has_control_characters_stays_on_its_line(
    cli: Cli, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    result = cli(*(word.format(folder) for word in argv))
    shown = result.out + result.err
    assert "\x1b" not in shown and "\t" not in shown and "\x1b[31m" not in shown
    starts = ("error: ", "hint: ", str(tmp_path)) if argv[0] != "pull" else (str(tmp_path),)
    assert shown and all(line.startswith(starts) for line in shown.splitlines()), shown
    assert "a␊b␛[31mc␉d" in shown or "a\\nb\\x1b[31mc\\td" in shown, shown


def test_lines_of_the_console_are_lines_and_texts_keep_their_ends() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console({}, out=out, err=err)
    console.data(ODD)
    console.data_text("two\nlines")
    console.note(ODD)
    console.note_text("two\nlines")
    console.warn(ODD)
    console.error(DFlashError(ODD, ODD))
    odd = "a␊b␛[31mc␉d\n"
    assert out.getvalue() == f"{odd}two\nlines\n"
    assert err.getvalue() == f"{odd}two\nlines\nwarning: {odd}error: {odd}hint: {odd}"


def test_a_bad_setting_exits_3_and_names_itself(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_DTYPE", "fp8")
    result = cli("run", "demo", "hi")
    assert result.code == 3 and "DFLASH_DTYPE" in result.err and "bfloat16" in result.err


def test_every_kind_of_error_leaves_with_its_code(cli: Cli, opened: Opened) -> None:
    for kind, codes in CODES.items():

        def fail(_pair: object, kind: type[DFlashError] = kind) -> object:
            raise kind("it failed", "mend it")

        opened.make = fail  # type: ignore[assignment]
        result = cli("run", "demo", "hi")
        assert (result.code, result.err) == (codes.exit_code, "error: it failed\nhint: mend it\n")


def test_an_error_is_no_longer_than_a_page(cli: Cli) -> None:
    result = cli("run", "x" * 100_000, "hi")
    assert result.code == 3 and result.err.startswith("error: ") and "xxx" in result.err and len(result.err) < 9_000


def test_an_unexpected_failure_is_a_line_and_exits_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_arguments: list[str]) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(main_module, "_invoke", broken)
    result = cli("run")
    assert result.code == 1 and result.err.startswith("error: unexpected failure: RuntimeError: a bug\nhint: ")
    assert "Traceback" in cli("run", "--debug").err


class Closed(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_lost_reader_of_stdout_ends_the_program_and_one_of_stderr_does_not() -> None:
    console = Console({}, out=Closed(), err=Closed())
    console.note("nobody reads this")
    with pytest.raises(OutputClosed):
        console.data("nor this")


def test_progress_shows_on_a_terminal_only_and_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, term, shown in ((Terminal(), "xterm", True), (Terminal(), "dumb", False), (io.StringIO(), "", False)):
        with Console({"TERM": term, "COLUMNS": "30"}, out=io.StringIO(), err=stream).progress() as line:
            line("loading\x1b[2J " + "x" * 100, 0.5)
            line("b", 1.0)
        text = stream.getvalue()
        assert bool(text) == shown and "\x1b" not in text
        assert not shown or (text.endswith("\r") and max(map(len, text.split("\r"))) < 30)


def test_a_line_of_progress_goes_before_anything_else_is_said() -> None:
    err = Terminal()
    console = Console({"TERM": "xterm", "NO_COLOR": "1"}, out=io.StringIO(), err=err)
    console.notify(LoadProgress("loading", 0.5))
    console.notify(Notice("a warning", "warning"))
    console.notify(LoadProgress("loading", 0.9))
    console.data("a reply")
    assert err.getvalue() == f"\rloading 50%\r{' ' * 11}\rwarning: a warning\n\rloading 90%\r{' ' * 11}\r"
