"""One server's life, from the free port to the exit code: the endpoint over a resident pair. See ``dflash serve``."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflash_local import settings
from dflash_local.api.app import guarded_app
from dflash_local.api.endpoint import Endpoint
from dflash_local.api.guard import Rules
from dflash_local.api.log import send_lines_to
from dflash_local.api.metrics import Metrics
from dflash_local.api.server import Server, listen, run
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.chat.tokenizer_files import read_files
from dflash_local.chat.tool_calls import GENERAL_FORM, format_of
from dflash_local.cli import session as loading
from dflash_local.cli.attaching import RECORD, attached, running_server
from dflash_local.cli.console import Console
from dflash_local.cli.places import places_or_none, registry, standing
from dflash_local.cli.resolve import resolve
from dflash_local.cli.serve import WILDCARDS, Address, curl_line
from dflash_local.cli.thinking import default_thinking
from dflash_local.errors import DFlashError, EngineError
from dflash_local.events import Event, LoadProgress
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.remote.attached import is_listening
from dflash_local.request import Request
from dflash_local.service.resident import Model, Resident
from dflash_local.service.service import Session
from dflash_local.store.kept import keep

if TYPE_CHECKING:
    from dflash_local.ui.web.mount import Page

PageOf = Callable[[Resident, str, Callable[[], bool]], "Page"]  # the pair, the address, whether the server is ending


class _Server(Console):
    """Nobody sits before a server: it asks nothing."""

    def __init__(self, console: Console, environ: Mapping[str, str]) -> None:
        super().__init__(environ, console.out, console.err)

    @property
    def can_ask(self) -> bool:
        """Never."""
        return False


class Serving:
    """One server's life, from the free port to the exit code."""

    def __init__(
        self,
        pair: Pair,
        load: LoadConfig,
        thinking: bool,
        user: settings.Settings,
        console: Console,
        page: PageOf | None = None,
        open_browser: bool = False,
    ) -> None:
        self._pair, self._load, self._thinking, self._user = pair, load, thinking, user
        self._console = _Server(console, user.environ)
        self._page, self._open_browser, self._url = page, open_browser, ""
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
        model = self._model(self._pair, self._thinking)
        resident = Resident(model, self._find, keep_alive_s, metrics.observe)
        with ExitStack() as stack:
            stack.callback(sock.close)
            stack.callback(resident.close)
            stack.callback(send_lines_to(self._console.note))
            endpoint = Endpoint(resident, metrics, lambda: _names_here(self._user))
            page = self._page(resident, address.url, lambda: endpoint.draining) if self._page is not None else None
            app = guarded_app(
                endpoint,
                rules_for(address),
                page.routes if page is not None else (),
                page.lifespan if page is not None else None,
            )
            server = Server(app, endpoint, ready=lambda: self._begin(server, resident, address, keep_alive_s))
            stack.enter_context(recorded(self._user, address, model.name))
            run(server, sock)
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
            import webbrowser

            webbrowser.open(f"{address.url}/")
        if keep_alive_s == 0:
            return

        def load() -> None:
            try:
                resident.load()
                facts = resident.facts
                if facts is not None:
                    self._console.note(f"loaded: {facts.loaded_as}; context {facts.context:,}")
            except DFlashError as error:
                self._failed = None if server.should_exit else error
                server.end()

        threading.Thread(target=load, name="dflash-first-load", daemon=True).start()

    def _find(self, name: str) -> Model:
        """Another model that is on this machine; its drafter decides whether it thinks."""
        pair = resolve(name, None, self._user, self._console, draft=self._load.draft)
        return self._model(pair, default_thinking(pair))

    def _model(self, pair: Pair, thinking: bool) -> Model:
        """A page uses what a running server has loaded already; ``dflash serve`` loads for itself."""
        attach_from = self._url if self._page is not None else None
        return model_of(pair, self._load, self._user, self._console, thinking, attach_from)


def model_of(
    pair: Pair,
    config: LoadConfig,
    user: settings.Settings,
    console: Console,
    thinking: bool,
    attach_from: str | None = None,
) -> Model:
    """A pair as the resident service keeps it. Its id is a name, never a path of this machine.

    Args:
        attach_from: the address of the server that asks, when another one may lend the pair.
    """
    files = read_files(pair.target)
    folder = os.path.isdir(os.path.expanduser(pair.name))
    return Model(
        name=(pair.target.resolve().name or "model") if folder else pair.name,
        load=lambda progress: _load(pair, config, user, console, progress, attach_from),
        aliases=() if folder else _aliases(pair, user),
        sampling=sampling_defaults(pair.target),
        thinking=thinking,
        mode="dflash" if config.draft else "ar",
        call_format=format_of(files.template if files is not None else None) or GENERAL_FORM,
        context=loading.planned_context(pair, config, user),
    )


def _aliases(pair: Pair, user: settings.Settings) -> tuple[str, ...]:
    row = registry(user).find(pair.name)
    return tuple(name for name in (row.aliases if row is not None else ()) if name != pair.name)


def _names_here(user: settings.Settings) -> tuple[str, ...]:
    """Models that can be switched to without a download."""
    places = places_or_none(user)
    rows = [standing(row, places) for row in registry(user).rows]
    return tuple(one.row.bundled or one.row.name for one in rows if one.state in ("bundled", "local"))


class _Held:
    """A session that lets go of its files when it is closed."""

    def __init__(self, session: Session, hold: ExitStack) -> None:
        self._session, self._hold = session, hold

    @property
    def facts(self) -> SessionFacts:
        """What was loaded, and how."""
        return self._session.facts

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The session's own."""
        return self._session.generate(request, cancelled)

    def close(self) -> None:
        """Release the model, then its files."""
        self._session.close()
        self._hold.close()


def _load(
    pair: Pair,
    config: LoadConfig,
    user: settings.Settings,
    console: Console,
    progress: Callable[[LoadProgress], None],
    attach_from: str | None,
) -> Session:
    elsewhere = attached(pair, config, user, console, attach_from) if attach_from is not None else None
    if elsewhere is not None:
        return elsewhere
    with ExitStack() as stack:
        stack.enter_context(loading.held(pair, user))
        session = loading.open_stepwise(pair, config, user, console, progress)
        return _Held(session, stack.pop_all())


def rules_for(address: Address) -> Rules:
    """The guard's rules for an address: which Host headers it answers to."""
    names = {address.host.lower(), *(name.lower() for name in address.more_hosts)}
    wild = address.host in WILDCARDS
    if wild:
        names |= {socket.gethostname().lower(), "host.docker.internal"}
    return Rules(hosts=frozenset(names - set(WILDCARDS)), any_address=wild, token=address.token)


@contextmanager
def recorded(user: settings.Settings, address: Address, model: str) -> Iterator[None]:
    """Within, ``serve.json`` in the cache folder tells other commands of this process."""
    if user.cache_dir is None:
        yield
        return
    path = user.cache_dir / RECORD
    other = running_server(user)
    if other is not None and other.get("model") == model and other["url"] != address.url and is_listening(other["url"]):
        yield  # who wants this model finds it there
        return
    record: dict[str, Any] = {
        "pid": os.getpid(),
        "url": address.url,
        "host": address.host,
        "port": address.port,
        "model": model,
        "token": address.token is not None,
        "started": time.time(),
    }
    keep(path, json.dumps(record, indent=2) + "\n")
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8")).get("pid") == os.getpid():
                path.unlink()
