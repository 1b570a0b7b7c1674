"""The real Open WebUI beside ``dflash serve demo``, driven in a browser. Run by ``make test-clients``.

Its defaults stay: it sends its tools with every message, and asks for a title, tags and follow-ups in the background.
"""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.clients.conftest import OFFLINE, Demo, interpreter
from tests.clients.scripts.checks import FIRST, LONG, SECOND, assistant, user
from tests.ui.web.conftest import Visitor

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = pytest.mark.clients

START_S = 240.0
REPLY_MS = 60_000
PICTURE = Path(__file__).resolve().parents[2] / "build" / "clients" / "open-webui.png"
FIRST_VISIT = "Okay, Let's Go!"  # what closes the news of a first visit
# Every text that the last reply shows while it grows.
NOTE_TEXTS = """() => {
  window.shown = [];
  const note = () => {
    const replies = document.querySelectorAll('.chat-assistant #response-content-container');
    const text = replies.length ? replies[replies.length - 1].innerText : '';
    if (text && text !== window.shown[window.shown.length - 1]) window.shown.push(text);
  };
  new MutationObserver(note).observe(document.body, {childList: true, subtree: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def open_webui(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an Open WebUI without accounts, its data in a temporary folder."""
    home = tmp_path_factory.mktemp("open-webui")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {
        **OFFLINE,
        "HOME": str(home),
        "DATA_DIR": str(home),
        "WEBUI_SECRET_KEY": "test",
        "WEBUI_AUTH": "False",
        "OFFLINE_MODE": "True",
        "ENABLE_VERSION_UPDATE_CHECK": "False",
        "ENABLE_OLLAMA_API": "False",
        "RAG_EMBEDDING_ENGINE": "openai",  # else it looks for a model of its own
        "OPENAI_API_BASE_URL": f"{demo.url}/v1",
    }
    command = [str(Path(interpreter("open-webui")).with_name("open-webui")), "serve", "--host", "127.0.0.1"]
    with (home / "log.txt").open("wb") as log:
        process = subprocess.Popen([*command, "--port", str(port)], env=environ, cwd=home, stdout=log, stderr=log)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, home / "log.txt")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"Open WebUI did not start: {log.read_text(encoding='utf-8', errors='replace')[-3000:]}")


def send(visitor: Visitor, text: str) -> Locator:
    """Send a message; the place of its reply."""
    page = visitor.page
    before = page.locator(".chat-assistant").count()
    page.locator("#chat-input").click()
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")
    return page.locator(".chat-assistant").nth(before)


def visit(visitor: Visitor, url: str) -> None:
    """Open the page and choose the model."""
    page = visitor.page
    page.set_default_timeout(REPLY_MS)
    news = page.get_by_role("button", name=FIRST_VISIT)
    page.add_locator_handler(news, lambda button: button.click())
    page.goto(url)
    page.locator("#model-selector-model-button").click()
    page.get_by_role("option", name="demo").click()
    page.evaluate(NOTE_TEXTS)


def test_a_conversation(open_webui: str, demo: Demo, visitor: Visitor) -> None:
    visit(visitor, open_webui)
    page = visitor.page
    first = demo.said(user(FIRST))
    send(visitor, FIRST).get_by_text(first, exact=True).wait_for()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURE)
    second = demo.said(user(FIRST), assistant(first), user(SECOND))
    last_line = second.splitlines()[-1]
    send(visitor, SECOND).get_by_text(last_line).wait_for()
    long = demo.said(user(FIRST), assistant(first), user(SECOND), assistant(second), user(LONG))
    page.evaluate("window.shown = []")
    send(visitor, LONG).get_by_text(long, exact=True).wait_for()
    shown = page.evaluate("window.shown")
    assert len([text for text in shown if long.startswith(text)]) > 1, "the reply came all at once"
    demo.wait_idle()  # the title, the tags and the follow-ups
    assert {status for path, status in demo.answered() if path.startswith("/v1/")} == {200}
    assert "tools were left out of the prompt" in demo.log.read_text(encoding="utf-8")
    assert not visitor.foreign


def test_the_stop_button_stops_the_model(open_webui: str, demo: Demo, visitor: Visitor) -> None:
    visit(visitor, open_webui)
    cancelled = demo.cancelled
    send(visitor, "Count from 5 to 500.").get_by_text("9, 10").wait_for()
    visitor.page.get_by_role("button", name="Stop", exact=True).click()
    demo.wait_idle()
    assert demo.cancelled == cancelled + 1


def test_an_error_is_shown_in_the_conversation(open_webui: str, demo: Demo, visitor: Visitor) -> None:
    visit(visitor, open_webui)
    send(visitor, "word " * 3000).get_by_text("the context").wait_for()
    demo.wait_idle()
    assert ("/v1/chat/completions", 400) in demo.answered()
