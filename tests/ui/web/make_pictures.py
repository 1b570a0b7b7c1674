"""Pictures of the page over ``smollm2`` where it is here, by a real server and browser: ``make screenshots`` runs it.

``make_pictures.py FOLDER DOCS``: all of them into FOLDER, the README's into DOCS. Needs Chromium.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from dflash_local import settings  # noqa: E402
from dflash_local.app.default_model import default_model  # noqa: E402
from dflash_local.app.resolve import resolve  # noqa: E402
from tests.ui.make_screenshots import PROMPT  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
THEMES = ("light", "dark")
README = "race-desktop-light"
STARTED_S, REPLY_MS = 120.0, 600_000.0


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a page over a pair, once that is loaded."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-m", "dflash_local", "web", model, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        until = time.monotonic() + STARTED_S
        try:
            while not _is_ready(url) and time.monotonic() < until:
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "health", timeout=2) as answer:
            return b'"ready"' in answer.read()
    except OSError:
        return False


def chat(page: Page) -> None:
    """A reply and its figures."""
    field = page.locator("#df-field textarea")
    field.fill(PROMPT)
    field.press("Enter")
    page.get_by_text("a step · first token").first.wait_for(timeout=REPLY_MS)


def race(page: Page) -> None:
    """A race that was run and replayed."""
    _open(page, "Race")
    prompt = page.locator("textarea:visible").first
    expect(prompt).not_to_have_value("")  # one is put in when the tab is opened
    prompt.fill(PROMPT)
    page.get_by_role("button", name="Race", exact=True).click()
    page.frame_locator(".df-replay").locator(".won").wait_for(timeout=REPLY_MS)


def models(page: Page) -> None:
    """The pairs of the registry."""
    _open(page, "Models")
    page.get_by_text("Qwen/Qwen3-8B", exact=True).first.wait_for()


def about(page: Page) -> None:
    """Versions and machine."""
    _open(page, "About")
    page.get_by_text("dflash-local").first.wait_for()


def _open(page: Page, name: str) -> None:
    """Go to a tab, which a narrow page keeps in a menu."""
    tab = page.get_by_role("tab", name=name)
    if not tab.is_visible():
        page.locator("button.overflow-menu, .overflow-menu button").first.click()
        page.get_by_text(name, exact=True).last.click()
        return
    tab.click()


SCENES = {"chat": chat, "race": race, "models": models, "about": about}


# Across a picture whose figures are of a toy pair.
STAMP = """body::after { content: "TOY"; position: fixed; inset: 0; display: flex; align-items: center;
  justify-content: center; font: bold 20vw "DejaVu Sans", sans-serif; color: #ff7043; opacity: 0.28;
  transform: rotate(-18deg); pointer-events: none; z-index: 9999; }"""


def main(folder: Path, docs: Path) -> None:
    """Take them all."""
    if CHROMIUM is None:
        raise SystemExit("Chromium is not installed: no pictures of the page were made")
    folder.mkdir(parents=True, exist_ok=True)
    user = settings.load()
    pair = resolve(default_model(user).name, None, user, lambda _: None)
    with served(pair.name) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for size in SIZES:
            for theme in THEMES:
                for name, play in SCENES.items():
                    _picture(browser, url, folder / f"{name}-{size}-{theme}.png", size, theme, play, pair.toy)
        browser.close()
    shutil.copy(folder / f"{README}.png", docs / "web.png")


def _picture(
    browser: Browser, url: str, file: Path, size: str, theme: str, play: Callable[[Page], None], toy: bool
) -> None:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
    page.goto(f"{url}?__theme={theme}")
    page.get_by_role("tab", name="Chat").wait_for()
    play(page)
    page.wait_for_timeout(400)
    if toy:
        page.add_style_tag(content=STAMP)
    page.screenshot(path=str(file))
    page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
