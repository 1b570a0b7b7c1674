"""The page on a real server over a scripted session, and what its tests ask of both."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from dflash_local.api.app import guarded_app
from dflash_local.api.endpoint import Endpoint
from dflash_local.api.guard import Rules
from dflash_local.api.metrics import Metrics
from dflash_local.api.server import ApiServer, listen
from dflash_local.app.download import BeforeDownload
from dflash_local.app.load_choices import LoadChoices
from dflash_local.app.model_entries import ModelEntry
from dflash_local.app.models import InstallStatus
from dflash_local.app.recommending import PairPlans, Summary
from dflash_local.app.served_pair import Details, ServedPair
from dflash_local.bench.prompts import Prompt
from dflash_local.catalog import registry
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import UnknownModelError, UsageError
from dflash_local.events import Notice, PullProgress
from dflash_local.planner.machine import named
from dflash_local.service.backend import Backend as Session
from dflash_local.service.backend import Find, Model
from dflash_local.service.service import Service
from dflash_local.settings import FullContext
from dflash_local.ui.web.streams import LAST_WORD, RECEIPT_PATH, STREAM_PATH
from tests.service.scripted import ScriptedSession

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.ui.web.conftest import Visitor

LIMIT_S = 30


@dataclass
class FakeServedPair(ServedPair):
    """A pair and a registry whose answers the test decides."""

    service: Service
    notes: Sequence[str] = ()
    examples: Sequence[str] = ("Say hello.",)
    chats: Path | None = None
    full_context: FullContext = "drop"
    registry: list[ModelEntry] = field(default_factory=lambda: [ModelEntry("scripted", "bundled", "fits", "")])
    prompts: Sequence[Prompt] = (Prompt("greeting", "Say hello."),)
    facts: Mapping[str, str] = field(default_factory=lambda: {"dflash-local": "0"})
    pulling: Callable[..., None] = lambda _name, _hear, _cancelled: None
    report: Mapping[str, Any] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    planning: Callable[..., LoadChoices | None] = lambda _name, _context, _draft: None
    decided: str = ""

    def listed_name(self, name: str) -> str:
        return name

    def entries(self) -> Sequence[ModelEntry]:
        return self.registry

    def entry(self, name: str) -> ModelEntry:
        found = next((entry for entry in self.registry if entry.name.casefold() == name.casefold()), None)
        if found is None:
            raise UnknownModelError(f"unknown model {name!r}")
        return found

    def details(self, name: str, context: int | None = None, draft: bool = True) -> Details:
        demo = registry.load().find("demo")
        assert demo is not None
        row = structs.replace(demo, name=f"all about {name}")
        return Details(
            InstallStatus(row, None, None), PairPlans(named("H200", None), None, Summary(row.name, "unknown")), None
        )

    def load_choices(self, name: str, context: int | None = None, draft: bool = True) -> LoadChoices | None:
        return self.planning(name, context, draft)

    def before_download(self, name: str) -> BeforeDownload:
        return BeforeDownload("apache-2.0", "100.0 GiB free for /models")

    def pull(
        self,
        name: str,
        hear: Callable[[PullProgress | Notice], None],
        cancelled: Callable[[], bool],
        draft: bool = True,
    ) -> None:
        self.pulling(name, hear, cancelled)

    def removal(self, name: str) -> str:
        return f"{name}: 1.0 GiB would be freed"

    def remove(self, name: str) -> str:
        self.removed.append(name)
        return f"{name}: 1.0 GiB freed"

    def bench_prompts(self) -> Sequence[Prompt]:
        return self.prompts

    def about(self) -> Mapping[str, str]:
        return self.facts

    def provenance(self) -> Mapping[str, Any]:
        return {"pair": self.service.model.name, "versions": dict(self.facts)}

    def certify(self, hear: Callable[[str, float], None], cancelled: Callable[[], bool]) -> Mapping[str, Any]:
        return self.report


@dataclass(slots=True)
class Site:
    """A running page."""

    port: int
    service: Service
    served: FakeServedPair
    server: ApiServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


_port = [0]


def _listening() -> socket.socket:
    """At the port of the last page, if it is free: a browser's cache has the scripts under that address."""
    try:
        sock = listen("127.0.0.1", _port[0])
    except UsageError:
        sock = listen("127.0.0.1", 0)
    _port[0] = sock.getsockname()[1]
    return sock


@contextmanager
def site(
    *sessions: Session,
    rules: Rules | None = None,
    change: Callable[[FakeServedPair], None] = lambda _served: None,
    make: Callable[[Service], Any] = FakeServedPair,
    find: Find | None = None,
    model: Model | None = None,
) -> Iterator[Site]:
    """Within, a server with the page and the endpoint; the sessions are loaded one after the other.

    Args:
        change: makes the pair what the test wants before the page is built. make: another one than the fake.
        find: what other names mean. model: instead of the scripted one.
    """
    from dflash_local.ui.web.page import page

    left = list(sessions)
    metrics = Metrics()
    pair = Pair("scripted", Path("nowhere"), None, bundled=False)
    scripted = Model("scripted", lambda _progress: left.pop(0) if left else ScriptedSession(), pair, aliases=("toy",))
    service = Service(model or scripted, find, None, metrics.observe)
    served = make(service)
    change(served)
    endpoint = Endpoint(service, metrics)
    built = page(served, lambda: endpoint.draining)
    sock = _listening()
    server = ApiServer(guarded_app(endpoint, rules or Rules(), built.routes, built.lifespan), endpoint, grace_s=0.0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Site(sock.getsockname()[1], service, served, server)
    finally:
        service.close()
        server.end()
        thread.join(60)


READY = {
    "Chat": ("#df-pair p",),  # the page has asked the server once
    "Race": (".df-lanes",),
    "Models": ("#df-details summary", ".df-plans"),  # the cards are drawn: no click falls between two drawings
    "Bench": ("#df-prompts label",),
    "About": ("#df-about td",),
}


def enter(page: Page, here: Site, tab: str = "Chat") -> None:
    """Load the page, and wait for what belongs to a tab."""
    page.goto(here.url)
    page.locator("#df-pair p").wait_for()
    page.get_by_role("tab", name=tab).click()
    for part in READY[tab]:
        page.locator(part).first.wait_for()


@contextmanager
def visiting(visitor: Visitor, tab: str, *sessions: Session, **how: Any) -> Iterator[tuple[Site, Page]]:
    """Within, a window at a tab of a site; it has asked no other machine for anything in the end."""
    with site(*sessions, **how) as here:
        enter(visitor.page, here, tab)
        yield here, visitor.page
        assert not visitor.foreign + visitor.complaints, visitor.foreign + visitor.complaints
        if not visitor.page.is_closed():
            visitor.page.goto("about:blank")  # or the server would wait for its connections


def saved(link: Locator) -> tuple[str, Any]:
    """Click a link; the name of the file that it saves, and what stands in it as JSON."""
    with link.page.expect_download() as saving:
        link.click()
    return saving.value.suggested_filename, json.loads(saving.value.path().read_text(encoding="utf-8"))


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def join(here: Site, window: str, handler: str, *data: Any) -> str:
    """Call a handler as a window does; the number of the request, as its receipt says."""
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/config")
        handlers = json.loads(connection.getresponse().read())["dependencies"]
        number = next(one["id"] for one in handlers if one["api_name"] == handler)
        body = json.dumps({"data": data, "fn_index": number, "session_hash": window})
        connection.request("POST", RECEIPT_PATH, body, {"Content-Type": "application/json"})
        return str(json.loads(connection.getresponse().read())["event_id"])
    finally:
        connection.close()


def listen_to(here: Site, window: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse, str]:
    """Read a window's stream up to its last word; it is not hung up."""
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=LIMIT_S)
    connection.request("GET", f"{STREAM_PATH}?session_hash={window}")
    stream = connection.getresponse()
    said = ""
    while LAST_WORD.decode() not in said:
        said += stream.readline().decode()
    return connection, stream, said
