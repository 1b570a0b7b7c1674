"""A download from the picker or by /pull: the question, the bar, the end, an error, and stopping it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dflash_local.app.model_entries import ModelEntry
from dflash_local.errors import DownloadError, Interrupted
from dflash_local.events import Notice, PullProgress
from dflash_local.ui.downloads import DownloadProgress
from dflash_local.ui.tui.dialogs import PullScreen
from tests.ui.stage import Stage, play, staged

MIB = 2**20
FITS = ModelEntry("own/Fits-9B", "absent", "fits in nf4", "19.0 GiB")
BIG = ModelEntry("own/Big-99B", "partial", "needs 99 GiB", "90.0 GiB")
HERE = ModelEntry("demo", "bundled", "fits", "")


class Pull:
    """A download that goes on when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate, self.error, self.cancelled = threading.Event(), error, False

    def __call__(self, hear: Callable[..., None], cancelled: Callable[[], bool]) -> None:
        hear(PullProgress("own/Fits-9B", 24 * MIB, 96 * MIB))
        hear(PullProgress("z-own/Fits-9B-DFlash", 0, 4 * MIB))
        hear(Notice("\x1b]0;x\x07 an earlier download was cut off"))
        while not self.gate.wait(0.01):
            if cancelled():
                self.cancelled = True
                raise Interrupted("pull stopped; 2 finished files (24.0 MiB) are kept", "run it again to go on")
        if self.error is not None:
            raise self.error


def pulling(stage: Stage) -> PullScreen | None:
    screen = stage.app.screen
    return screen if isinstance(screen, PullScreen) else None


async def choose(stage: Stage, pull: Pull, *keys: str) -> None:
    stage.chat_session.on_pull = pull
    stage.chat_session.registry = [FITS, BIG, HERE]  # what is here comes first, the rest as the registry has it
    await stage.press("f7")
    await stage.shows("Fits this machine")
    await stage.press(*keys, "enter")
    await stage.until(lambda: pulling(stage) is not None and "Esc does not" in stage.screen_text)


@pytest.mark.parametrize("size", [(80, 24), (120, 36)], ids=["narrow", "wide"])
def test_the_picker_asks_downloads_with_a_bar_and_talks(size: tuple[int, int]) -> None:
    pull = Pull()

    async def act(stage: Stage) -> None:
        await choose(stage, pull, "down")
        assert "It takes 19.0 GiB of disk." in stage.screen_text
        assert "It fits this machine in nf4." in stage.screen_text
        await stage.press("enter")
        await stage.shows("24.0 MiB of 96.0 MiB")
        text = stage.screen_text
        assert "███████▌░" in text and " 25%" in text and "in all 24.0 MiB of 100.0 MiB" in text
        assert "␛]0;x␇ an earlier download" in text and "Esc stops it" in text
        pull.gate.set()
        await stage.shows("own/Fits-9B is here and verified")
        await stage.press("enter")
        await stage.until(lambda: stage.app.screen is stage.chat)
        await stage.idle()
        assert stage.chat_session.pulls == ["own/Fits-9B"] and stage.chat_session.executed == ["/model own/Fits-9B"]

    play(act, size=size)


@staged()
async def test_no_is_an_answer_and_what_does_not_fit_is_said(stage: Stage) -> None:
    await choose(stage, Pull(), "down", "down")
    assert "It takes 90.0 GiB of disk; a part of it is here already." in stage.screen_text
    assert "apache-2.0" in stage.screen_text and "512 GiB free for /models" in stage.screen_text
    assert "It needs 99 GiB, more" in stage.screen_text
    await stage.press("escape")
    await stage.until(lambda: pulling(stage) is None)
    await stage.shows("Fits this machine")  # back in the list
    await stage.press("escape")
    await stage.until(lambda: stage.app.screen is stage.chat)
    assert stage.chat_session.pulls == [] == stage.chat_session.executed


@staged()
async def test_it_can_be_stopped_and_says_what_is_kept_or_what_is_wrong_and_enter_tries_again(stage: Stage) -> None:
    pull = Pull()
    await choose(stage, pull, "down")
    for key in ("escape", "ctrl+c"):
        await stage.press("enter")
        await stage.shows("24.0 MiB of 96.0 MiB", "Esc stops it")
        await stage.press(key)
        await stage.shows("Enter tries again")
        assert "pull stopped; 2 finished files (24.0 MiB) are kept; run it again" in stage.screen_text
        assert "error" not in stage.screen_text and pull.cancelled
        pull.cancelled = False
    await stage.press("escape")
    await stage.shows("own/Fits-9B  partial")
    pull.error = DownloadError("the Hub cannot be reached", "is there a network?")
    pull.gate.set()
    await stage.press("enter")
    await stage.shows("Esc does not")
    await stage.press("enter")
    await stage.shows("error: the Hub cannot be reached; is there a network?")
    pull.error = None
    await stage.press("enter")
    await stage.shows("is here and verified")
    await stage.press("escape")
    await stage.shows("own/Fits-9B  local")
    assert stage.chat_session.pulls == ["own/Fits-9B"] * 4 and stage.chat_session.executed == []


@staged()
async def test_the_command_shows_the_same_and_asks_only_about_what_does_not_fit(stage: Stage) -> None:
    pull = Pull()
    stage.chat_session.on_pull, stage.chat_session.registry = pull, [BIG, FITS, HERE]
    for line, words in (("/pull", "needs the name"), ("/pull x", "unknown model"), ("/pull demo", "demo is here")):
        await stage.send(line)
        assert words in stage.screen_text and pulling(stage) is None
    await stage.send(f"/pull {BIG.name}")
    await stage.shows("Enter downloads it")
    await stage.press("escape")
    await stage.send(f"/pull {FITS.name}")
    await stage.shows("24.0 MiB of 96.0 MiB")
    pull.gate.set()
    await stage.shows("Enter talks to it")
    await stage.press("escape")
    await stage.shows(f"/model {FITS.name} talks to it")
    assert stage.chat_session.pulls == [FITS.name] and stage.chat_session.executed == []


def test_leaving_in_the_middle_lets_the_download_clear_up() -> None:
    pull = Pull()

    async def act(stage: Stage) -> None:
        stage.chat_session.on_pull, stage.chat_session.registry = pull, [FITS]
        await stage.send(f"/pull {FITS.name}")
        await stage.shows("24.0 MiB")
        await stage.press("ctrl+q")

    play(act)
    assert pull.cancelled


def test_speed_and_time_left_are_of_what_came_since() -> None:
    now = [0.0]
    download = DownloadProgress(lambda: now[0])
    download.take(PullProgress("a", 500 * MIB, 1000 * MIB))
    download.take(PullProgress("b", 0, 100 * MIB))
    assert download.line == "0.49 GiB of 1.07 GiB" and download.left_s is None
    now[0] = 2.0
    download.take(PullProgress("a", 520 * MIB, 1000 * MIB))
    assert download.bytes_per_s == 10 * MIB and download.left_s == 58.0
    assert download.line == "0.51 GiB of 1.07 GiB · 10.0 MiB/s · 58 s left"
    download.take(PullProgress("b", 60 * MIB, 100 * MIB, verified=40 * MIB, resumed=60 * MIB))
    assert download.bytes_per_s == 10 * MIB, "what was resumed came over no line"
    assert download.line == "0.57 GiB of 1.07 GiB · 40.0 MiB verified · 60.0 MiB resumed · 10.0 MiB/s · 52 s left"
    download.take(PullProgress("a", 1000 * MIB, 1000 * MIB))
    download.take(PullProgress("b", 100 * MIB, 100 * MIB))
    assert download.line == "1.07 GiB of 1.07 GiB"
