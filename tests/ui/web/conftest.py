"""One browser and one profile for the tests of this folder; of what a test left the next one finds the cache alone."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
HERE = "/ui/web/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without Gradio there is no page to test."""
    if importlib.util.find_spec("gradio") is not None:  # which takes seconds to import, and not every worker needs it
        return
    missing = pytest.mark.skip(reason="gradio is not installed: pip install gradio")
    for item in items:
        if HERE in str(item.path):
            item.add_marker(missing)


class Shared:
    """The browser that is launched when a test first asks for it.

    While it runs, this thread has a running event loop, which tests of servers cannot have: it ends with the folder,
    in others that borrow it with the file.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._profile: BrowserContext | None = None

    def profile(self) -> BrowserContext:
        """Of desktop size. Its cache keeps the page's scripts, which take as long to fetch and compile as a test."""
        if CHROMIUM is None:
            pytest.skip("chromium is not installed")
        playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
        if self._profile is None:
            driver = self._open.enter_context(playwright.sync_playwright())
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            self._open.callback(browser.close)
            self._profile = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
        return self._profile

    def close(self) -> None:
        self._profile = None
        self._open.close()


SHARED = Shared()
CUT_OFF = re.compile("AbortError: signal is aborted|Unexpected error Connection errored out")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or HERE not in str(nextitem.path):
        SHARED.close()


class Visitor:
    """A browser window that notes what a test must not overlook.

    Attributes:
        foreign: requests to any other machine. complaints: errors of the page's scripts and its policy.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.foreign: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(30_000)  # three workers share two cores
        page.on("request", self._requested)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._said)

    def reload(self) -> None:
        """Load the page anew. What Gradio says of a request that this cuts off is no complaint."""
        before = len(self.complaints)
        self.page.reload()
        self.complaints[before:] = [each for each in self.complaints[before:] if not CUT_OFF.match(each)]

    def _requested(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            self.foreign.append(request.url)

    def _said(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)


@pytest.fixture(scope="module")
def profile(request: pytest.FixtureRequest) -> Iterator[BrowserContext]:
    yield SHARED.profile()
    if HERE not in str(request.path):
        SHARED.close()


@pytest.fixture
def visitor(profile: BrowserContext) -> Iterator[Visitor]:
    """A fresh window; what pages have stored goes when it is closed."""
    yield Visitor(profile.new_page())
    left = profile.pages or [profile.new_page()]
    kept = "cookies,file_systems,indexeddb,local_storage,service_workers,cache_storage"
    profile.new_cdp_session(left[0]).send("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": kept})
    profile.clear_cookies()
    for page in left:
        page.close()
