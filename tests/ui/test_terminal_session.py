"""``dflash chat`` in a real terminal, driven from outside through tmux: start, chat, stop, race, quit."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dflash_local.catalog import bundled
from tests.fake_hub import FakeHub

try:
    import readline
except ImportError:  # Python was built without it
    readline = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parents[2]
TMUX = shutil.which("tmux")
pytestmark = [pytest.mark.needs_torch, pytest.mark.skipif(TMUX is None, reason="tmux is not installed")]


# The engine that is loaded in a third of the time; the one of a machine without a card is in the third session.
CHAT = ("chat", "demo", "--temperature", "0", "--engine", "fused")


class Terminal:
    """A shell in a terminal of its own."""

    def __init__(self, folder: Path, size: str) -> None:
        self.socket = str(folder / "tmux")
        width, height = size.split("x")
        shell = "env -i PS1='shell> ' TERM=$TERM HOME=$HOME PATH=$PATH LC_ALL=C.UTF-8 OMP_NUM_THREADS=1 sh"
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", width, "-y", height, shell)

    def tmux(self, *words: str) -> str:
        assert TMUX is not None
        command = [TMUX, "-S", self.socket, *words]
        environ = {**os.environ, "HOME": str(Path(self.socket).parent), "LC_ALL": "C.UTF-8"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environ).stdout

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)

    def enter(self, line: str) -> None:
        self.type(line)
        self.keys("Enter")

    def paste(self, text: str) -> None:
        """As a terminal pastes: bracketed where the program wants that, a carriage return for each line's end."""
        self.tmux("set-buffer", text)
        self.tmux("paste-buffer", "-p")

    @property
    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def until(self, ready: Callable[[str], bool], seconds: float = 60) -> str:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if ready(shown := self.text):
                return shown
            time.sleep(0.1)
        raise AssertionError(f"not reached; the terminal shows\n{self.text}")

    def until_left(self) -> str:
        return self.until(lambda text: re.search(r"left with \d", text) is not None)

    def start(self, *words: str) -> None:
        self.run("-m", "dflash_local", *words)

    def run(self, *arguments: str) -> None:
        """Python with these arguments."""
        self.until(lambda text: "shell>" in text)
        command = shlex.join([sys.executable, *arguments])
        self.enter(f"clear; cd {shlex.quote(str(ROOT))}; {command}; echo left with $?")

    @property
    def program(self) -> psutil.Process:
        """What the shell runs."""
        (child,) = psutil.Process(int(self.tmux("display-message", "-p", "#{pane_pid}"))).children()
        return child

    @property
    def modes(self) -> str:
        """What a full screen program has to put back: alternate screen, cursor, mouse."""
        flags = ("alternate_on", "cursor_flag", "mouse_any_flag")
        return self.tmux("display-message", "-p", " ".join(f"#{{{flag}}}" for flag in flags)).strip()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, "100x30")
    yield opened
    opened.tmux("kill-server")


def test_chat_race_sleep_stop_and_quit_restore_the_terminal(terminal: Terminal) -> None:
    terminal.start(*CHAT)
    terminal.until(lambda text: "ready" in text)
    assert terminal.modes.startswith("1 ")
    terminal.enter("Count from 1 to 30.")
    terminal.until(lambda text: "28, 29, 30" in text and "· first token" in text)
    terminal.keys("F5")
    terminal.until(lambda text: "identical: yes" in text)
    terminal.keys("Escape")
    terminal.until(lambda text: "race:" in text)
    terminal.enter("/mode ar")
    terminal.until(lambda text: "mode ar" in text)
    terminal.enter("Count from 1 to 30.")
    terminal.until(lambda text: "4, 5, 6" in text.partition("mode ar")[2])
    terminal.keys("C-z")
    terminal.until_left()
    assert terminal.modes == "0 1 0"
    assert terminal.program.status() == psutil.STATUS_STOPPED, "a reply waits as well"
    terminal.enter("clear; fg; echo left with $?")
    terminal.until(
        lambda text: "Speed" in text and re.search("mode ar.*28, 29, 30.*· first token", text, re.S) is not None
    )
    assert terminal.modes.startswith("1 ")
    terminal.enter("Count from 1 to 99.")  # long enough to be stopped on a busy machine
    terminal.until(lambda text: "1, 2, 3" in text.partition("1 to 99.")[2])
    terminal.keys("Escape")
    terminal.until(lambda text: "stopped" in text)
    terminal.keys("C-c")
    terminal.until(lambda text: "again leaves" in text)
    terminal.keys("C-c", "C-c")  # two, should the first have come too late to be the second
    text = terminal.until_left()
    assert "left with 0" in text and "28, 29" not in text and terminal.modes == "0 1 0"


@pytest.mark.skipif("GNU" not in (getattr(readline, "__doc__", "") or ""), reason="pastes need GNU readline")
def test_pasted_lines_are_one_message_of_the_line_chat(terminal: Terminal) -> None:
    code = (
        "from dflash_local.cli import repl; from dflash_local.cli.console import Console\n"
        "repl._act = lambda message, *_: print('got', ascii(message))\n"
        "repl.repl(None, Console({}))"
    )
    terminal.enter(shlex.join(["cd", str(ROOT)]))
    terminal.enter(shlex.join([sys.executable, "-c", code]))
    terminal.until(lambda text: re.search("^>>> $", text, re.M) is not None or text.rstrip().endswith(">>>"))
    terminal.paste("one\n\ntwo\nthree")
    terminal.until(lambda text: "three" in text.splitlines())
    terminal.keys("Enter")
    assert "got 'one\\n\\ntwo\\nthree'" in terminal.until(lambda text: "got " in text.split(">>>", 1)[-1])


EMPTY_MACHINE = """
import os, sys
os.environ["HF_ENDPOINT"] = sys.argv[1]
from dflash_local.app import load_choices
from dflash_local.catalog import shapes
from dflash_local.cli.main import main
from dflash_local.planner.machine import named
from tests.toy_variant import CARD_GIB, STANDS_FOR
real, card = shapes.shape, named(None, CARD_GIB)
shapes.shape = lambda repo: real(STANDS_FOR.get(str(repo), str(repo)))
load_choices.machine = lambda *_, **_more: card
sys.exit(main(["chat", "demo", "--temperature", "0", "--max-new-tokens", "8"]))
"""


def paste_lines(terminal: Terminal, folder: Path) -> None:
    """Pasted lines reach the model as lines."""
    few, many = "Count from 3 to 7.\n\n\tAnd no further.", "\n".join(f"line {n}" for n in range(1, 201))
    terminal.paste(few)
    assert "␍" not in terminal.until(lambda text: "And no further." in text)
    terminal.keys("Enter")
    terminal.until(lambda text: "cut off" in text and "· first token" in text)
    terminal.paste(many)
    terminal.until(lambda text: "[200 lines pasted]" in text)
    terminal.keys("Enter")
    terminal.until(lambda text: "cut off" in text.partition("180 more lines were sent")[2])
    terminal.enter(f"/export {folder}/talk.json")
    terminal.until(lambda text: "written" in text)
    messages = json.loads((folder / "talk.json").read_text(encoding="utf-8"))["messages"]
    assert [message["content"] for message in messages if message["role"] == "user"] == [few, many]


def kill_and_reset(terminal: Terminal) -> None:
    """After kill -9 no process is left, and reset helps."""
    family = [terminal.program, *terminal.program.children(recursive=True)]
    terminal.program.kill()
    assert not psutil.wait_procs(family, timeout=60)[1], "a process was left behind"
    terminal.type("reset")
    terminal.keys("C-j")  # Enter alone may not be one yet
    terminal.until(lambda text: text.strip() == "shell>")
    assert terminal.modes.endswith(" 1 0"), "a cursor and no mouse"
    terminal.enter("echo it 'w'orks")
    terminal.until(lambda text: "it works" in text)


def test_from_an_empty_machine_by_pastes_and_keys_to_a_chat_with_what_fits(terminal: Terminal, tmp_path: Path) -> None:
    from tests.toy_variant import DRAFTER, TARGET, VARIANT, publish_variant

    with FakeHub() as hub:
        for repo, part in ((TARGET, "target"), (DRAFTER, "drafter")):
            hub.add_folder(repo, bundled.FOLDER / "demo" / part)
        publish_variant(hub, tmp_path, tmp_path / "made")
        terminal.run("-c", EMPTY_MACHINE, hub.url)
        terminal.until(lambda text: "ready" in text)
        paste_lines(terminal, tmp_path)
        terminal.enter("/model toy-9b")
        text = terminal.until(lambda text: "Esc closes" in text)
        assert f"{TARGET} on RTX 4060" in text and f"{VARIANT}: published in 4 bits" in text
        assert "Enter downloads and loads" in text
        terminal.keys("Enter")
        terminal.until(lambda text: f"Download {VARIANT}" in text and "free for" in text and "Esc does not" in text)
        terminal.keys("Enter")
        terminal.until(lambda text: f"now talking to {VARIANT}" in text and "ready" in text)
        terminal.enter("/clear")
        terminal.until(lambda text: "now talking to" not in text)
        terminal.enter("one two three")
        terminal.until(lambda text: " · first token" in text)
        fetched = [get.path for get in hub.gets()]
        assert all(any(f"/{repo}/" in path for path in fetched) for repo in (VARIANT, DRAFTER))
        assert not any(f"/{TARGET}/" in path for path in fetched)
        kill_and_reset(terminal)


NO_UTF8 = {"LC_ALL": "C", "LANG": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_without_utf8_screens_draw_with_what_there_is_and_a_signal_restores_the_terminal(terminal: Terminal) -> None:
    terminal.enter("export " + " ".join(f"{name}={value}" for name, value in NO_UTF8.items()))
    terminal.start(*CHAT)
    terminal.until(lambda text: "ready" in text)
    terminal.type("naïve 模型 Count from 1 to 30.")
    assert "+-----" in terminal.until(lambda text: "na?ve ??" in text and "to 30." in text)
    terminal.keys("Enter")
    text = terminal.until(
        lambda text: " . first token" in text and " 1 ####" in text
    )  # the meter is drawn a moment later
    assert text.isascii()
    terminal.program.send_signal(signal.SIGTERM)
    text = terminal.until_left()
    assert f"left with {128 + signal.SIGTERM}" in text and "Error" not in text and terminal.modes == "0 1 0"
