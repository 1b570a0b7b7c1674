"""One server's life, from the free port to the exit code: the endpoint over a resident pair. See ``dflash serve``."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from subprocess import DEVNULL
from typing import TYPE_CHECKING

from dflash_local import child_process
from dflash_local.api.app import guarded_app
from dflash_local.api.endpoint import Endpoint
from dflash_local.api.guard import Rules
from dflash_local.api.log import send_lines_to
from dflash_local.api.metrics import Metrics
from dflash_local.api.server import Server, listen, run
from dflash_local.app.models import installed
from dflash_local.app.resident_model import model_of
from dflash_local.app.resolve import resolve
from dflash_local.app.serve_records import recorded
from dflash_local.app.thinking import default_thinking
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.address import WILDCARDS, Address, curl_line
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import DFlashError, EngineError
from dflash_local.load_config import LoadConfig
from dflash_local.service.resident import Model, Resident

if TYPE_CHECKING:
    from dflash_local.app.resident_server import ResidentServer
    from dflash_local.ui.web.mount import Page

PageOf = Callable[[Resident, str, Callable[[], bool]], "Page"]  # the pair, the address, whether the server is ending


class Serving:
    """One server's life, from the free port to the exit code."""

    def __init__(
        self,
        call: Invocation,
        pair: Pair,
        load: LoadConfig,
        thinking: bool,
        page: PageOf | None = None,
        open_browser: bool = False,
        server: ResidentServer | None = None,
    ) -> None:
        """Take what is served; ``server``: whose replies are passed on, in place of a pair that is loaded here."""
        self._user, self._console = call.user, call.console
        self._pair, self._load, self._thinking = pair, load, thinking
        self._page, self._open_browser, self._url, self._server = page, open_browser, "", server
        self._failed: DFlashError | None = None

    def run(self, address: Address, keep_alive_s: float | None) -> None:
        """Serve until a signal.

        Raises:
            UsageError: the port cannot be had. EngineError: the engine was broken at the end.
            DFlashError: the model could not be loaded.
        """
        sock = listen(address.host, address.port)
        address = replace(address, port=sock.getsockname()[1])
        metrics = Metrics()
        self._url = address.url
        model = self._model(self._pair, self._thinking, self._load)
        resident = Resident(model, self._find, keep_alive_s, metrics.observe)
        with ExitStack() as stack:
            stack.callback(sock.close)
            stack.callback(resident.close)
            server = self._server
            stack.callback(server.close if server else lambda: None)
            stack.callback(send_lines_to(self._console.note))
            endpoint = Endpoint(resident, metrics, server.names if server else lambda: installed(self._user))
            page = self._page(resident, address.url, lambda: endpoint.draining) if self._page is not None else None
            routes, lifespan = ((), None) if page is None else (page.routes, page.lifespan)
            app = guarded_app(endpoint, rules_for(address), routes, lifespan)
            listener = Server(app, endpoint, ready=lambda: self._begin(listener, resident, address, keep_alive_s))
            facts = {"host": address.host, "port": address.port, "token": address.token is not None}
            facts |= {"replies_from": server.label} if server else {}
            stack.enter_context(recorded(self._user, address.url, model.name, **facts))
            run(listener, sock)
            broken = resident.status.error
        if self._failed is not None:
            raise self._failed
        if isinstance(broken, EngineError):
            raise EngineError(f"the engine broke while serving: {broken.message}", broken.hint)

    def _begin(self, server: Server, resident: Resident, address: Address, keep_alive_s: float | None) -> None:
        """Say where it is and load the model, while the first requests may already wait for it."""
        if self._page is not None:
            self._console.note(f"{self._pair.label} in a browser: {address.url}/")
            if address.token is not None:
                self._console.note("the page asks for a password: it is the token; the name does not matter", "dim")
        self._console.note(f"{self._pair.label} at {address.url}/v1, model id {resident.model.name}; Ctrl-C stops it")
        self._console.note(f"try: {curl_line(address, resident.model.name)}", "dim")
        if self._open_browser:
            browse = child_process.python_command("webbrowser", ["-t", f"{address.url}/"])
            child_process.run(browse, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        if keep_alive_s == 0:
            return

        def load() -> None:
            try:
                resident.load()
                facts = resident.facts
                if facts is not None and not facts.in_server:
                    self._console.note(f"loaded: {facts.loaded_as}; context {facts.context:,}")
            except DFlashError as error:
                self._failed = None if server.should_exit else error
                server.end()

        threading.Thread(target=load, name="dflash-first-load", daemon=True).start()

    def _find(self, name: str, load: LoadConfig | None) -> Model:
        """Another model that is on this machine, or of the server; its drafter decides whether it thinks."""
        if self._server is not None:
            return self._server.find(name, load)
        load = load or self._load
        pair = resolve(name, None, self._user, self._console.notify, draft=load.draft)
        return self._model(pair, default_thinking(pair), load)

    def _model(self, pair: Pair, thinking: bool, load: LoadConfig) -> Model:
        if self._server is not None:
            return self._server.model(pair, thinking)
        return model_of(pair, load, self._user, self._console.notify, thinking)


def rules_for(address: Address) -> Rules:
    """The guard's rules for an address: which Host headers it answers to."""
    names = {address.host.lower(), *(name.lower() for name in address.more_hosts)}
    wild = address.host in WILDCARDS
    if wild:
        names |= {socket.gethostname().lower(), "host.docker.internal"}
    return Rules(hosts=frozenset(names - set(WILDCARDS)), any_address=wild, token=address.token)
