"""Pictures of the page over the demo pair, by a real server and a real browser: ``make screenshots`` runs it.

``make_pictures.py FOLDER DOCS``: all of them into FOLDER, the README's into DOCS. Needs Chromium.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
THEMES = ("light", "dark")
README = "race-desktop-light"
STARTED_S = 120.0


@contextmanager
def served() -> Iterator[str]:
    """The address of a page over the demo pair, once that is loaded."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-m", "dflash_local", "web", "demo", "--port", str(port)]
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
    field.fill("Count from 3 to 17.")
    field.press("Enter")
    page.get_by_text("tok/s · acceptance").first.wait_for()


def race(page: Page) -> None:
    """A race that was run and replayed."""
    _open(page, "Race")
    expect(page.locator("textarea:visible").first).not_to_have_value("")  # a prompt is put in when the tab is opened
    page.get_by_role("button", name="Race", exact=True).click()
    page.get_by_text("this run:").first.wait_for(timeout=60_000)


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


# Across every picture: its figures are of a toy pair.
STAMP = """body::after { content: "TOY"; position: fixed; inset: 0; display: flex; align-items: center;
  justify-content: center; font: bold 20vw "DejaVu Sans", sans-serif; color: #ff7043; opacity: 0.28;
  transform: rotate(-18deg); pointer-events: none; z-index: 9999; }"""


def main(folder: Path, docs: Path) -> None:
    """Take them all."""
    if CHROMIUM is None:
        raise SystemExit("Chromium is not installed: no pictures of the page were made")
    folder.mkdir(parents=True, exist_ok=True)
    with served() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for size in SIZES:
            for theme in THEMES:
                for name, play in SCENES.items():
                    _picture(browser, url, f"{name}-{size}-{theme}", size, theme, play, folder)
        browser.close()
    shutil.copy(folder / f"{README}.png", docs / "web.png")


def _picture(browser: Browser, url: str, name: str, size: str, theme: str, play, folder: Path) -> None:  # type: ignore[no-untyped-def]
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(f"{url}?__theme={theme}")
    page.get_by_role("tab", name="Chat").wait_for()
    play(page)
    page.wait_for_timeout(400)
    page.add_style_tag(content=STAMP)
    page.screenshot(path=str(folder / f"{name}.png"))
    page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
