"""One server's life, from the free port to the exit code: the endpoint over a pair. See ``dflash serve``."""

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
from dflash_local.api.server import ApiServer, listen, run
from dflash_local.app.agents import Served
from dflash_local.app.process_records import recorded
from dflash_local.cli.address import WILDCARDS, Address, curl_line
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.server_options import Origin
from dflash_local.errors import DFlashError, EngineError
from dflash_local.service.service import Service

if TYPE_CHECKING:
    from dflash_local.cli.for_agent import ForAgent
    from dflash_local.ui.web.mount import Page

PageOf = Callable[[Service, str, Callable[[], bool]], "Page"]  # the service, the address, whether the server is ending


class Serving:
    """One server's life, from the free port to the exit code."""

    def __init__(
        self,
        call: Invocation,
        source: Origin,
        thinking: bool,
        page: PageOf | None = None,
        open_browser: bool = False,
        agent: ForAgent | None = None,
    ) -> None:
        self._user, self._console = call.user, call.console
        self._agent = agent
        self._source, self._thinking = source, thinking
        self._page, self._open_browser = page, open_browser
        self._failed: DFlashError | None = None

    def run(self, address: Address, keep_alive_s: float | None) -> int:
        """Serve until a signal, or the end of the agent that is run; returns that one's exit status, else 0.

        Raises:
            UsageError: the port cannot be had. EngineError: the engine was broken at the end.
            DFlashError: the model could not be loaded.
        """
        sock = listen(address.host, address.port)
        address = replace(address, port=sock.getsockname()[1])
        metrics = Metrics()
        models = self._source.models
        model = models.model(self._source.pair, self._source.load, self._thinking)
        service = Service(model, models.find, keep_alive_s, metrics.observe)
        with ExitStack() as stack:
            stack.callback(sock.close)
            stack.callback(service.close)
            if self._agent is not None:
                models.notify = self._agent.notify
                stack.callback(self._agent.close)
            stack.callback(send_lines_to(self._console.note if self._agent is None else self._agent.note))
            endpoint = Endpoint(service, metrics, models.names)
            page = self._page(service, address.url, lambda: endpoint.draining) if self._page is not None else None
            routes, lifespan = ((), None) if page is None else (page.routes, page.lifespan)
            app = guarded_app(endpoint, rules_for(address), routes, lifespan)
            listener = ApiServer(app, endpoint, ready=lambda: self._begin(listener, service, address, keep_alive_s))
            stack.enter_context(recorded(self._user, address.url, model.name, address.token is not None))
            run(listener, sock)
            code = 0 if self._agent is None else self._agent.code  # of its own end: what still runs is ended now
            broken = service.status.error
        if self._failed is not None:
            raise self._failed
        if isinstance(broken, EngineError):
            raise EngineError(f"the engine broke while serving: {broken.message}", broken.hint)
        return code

    def _begin(self, server: ApiServer, service: Service, address: Address, keep_alive_s: float | None) -> None:
        """Say where it is and load the model, while the first requests may already wait for it."""
        label = self._source.pair.label
        if self._page is not None:
            self._console.note(f"{label} in a browser: {address.url}/")
            if address.token is not None:
                self._console.note("the page asks for a password: it is the token; the name does not matter", "dim")
        self._console.note(f"{label} at {address.url}/v1, model id {service.model.name}; Ctrl-C stops it")
        self._console.note(f"try: {curl_line(address, service.model.name)}", "dim")
        if self._open_browser:
            browse = child_process.python_command("webbrowser", ["-t", f"{address.url}/"])
            child_process.run(browse, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)

        def load() -> None:
            try:
                if keep_alive_s != 0:
                    facts = service.load()
                    if not facts.in_server:
                        self._console.note(f"loaded: {facts.loaded_as}; context {facts.context:,}")
                self._ready(server, service, address)
            except DFlashError as error:
                self._failed = None if server.should_exit else error
                server.end()

        threading.Thread(target=load, name="dflash-first-load", daemon=True).start()

    def _ready(self, server: ApiServer, service: Service, address: Address) -> None:
        """Do what an agent was asked for; its end is the server's."""
        if self._agent is None:
            return
        server.leaves_interrupts = self._agent.runs
        model, facts = service.model, service.facts
        context = model.context if facts is None else facts.context or None
        if self._agent.ready(Served(address.url, model.name, address.token, context)):
            server.end()


def rules_for(address: Address) -> Rules:
    """The guard's rules for an address: which Host headers it answers to."""
    names = {address.host.lower(), *(name.lower() for name in address.more_hosts)}
    wild = address.host in WILDCARDS
    if wild:
        names |= {socket.gethostname().lower(), "host.docker.internal"}
    hosts = frozenset(names - set(WILDCARDS))
    return Rules(hosts=hosts, any_address=wild, token=address.token, origins=address.origins)
