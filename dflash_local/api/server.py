"""The HTTP server around the app: one socket, slow clients cut off, and an orderly end on a signal."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_local.api.endpoint import Endpoint
from dflash_local.api.guard import READ_S, App
from dflash_local.api.log import LOGGER
from dflash_local.errors import UsageError

GRACE_S = 2.0  # replies may come to their own end this long after the signal
WIND_DOWN_S = 1.5  # for the error events to be written
MAX_HEADER_BYTES = 64 * 1024
BACKLOG = 256
MAX_CONNECTIONS = 1024  # and half of the file descriptors at most: the program needs some for itself
RETRY_S = 1.0  # until a connection is taken again after the system had no room for one


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, port 0 takes a free one; UsageError where it cannot be had."""
    family, address = _resolved(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY by this word alone
    try:
        if os.name == "posix":  # elsewhere it would let two servers share the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _refused(host, port, error) from error
    return sock


def _resolved(host: str, port: int) -> tuple[int, Any]:
    """Return the address family and address; only a name is looked up."""
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return (socket.AF_INET6 if literal.version == 6 else socket.AF_INET), (host, port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host!r} is no address of this machine", "use 127.0.0.1") from error
    return found[0], found[4]


def _refused(host: str, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(f"port {port} on {host} is in use", "choose another with --port, 0 takes a free one")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UsageError(f"port {port} needs privileges", "choose one above 1023 with --port")
    return UsageError(f"cannot listen on {host} port {port}: {error.strerror}", "use --host 127.0.0.1")


def max_connections() -> int:
    """Return how many connections are held at once; further ones wait in the system's queue."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, limit // 2))


class _Protocol(H11Protocol):
    """Closes connections that do not get a request's headers sent in time, and starts the clock for its body.

    Attributes:
        places: for connections; this one's is given back when it is lost.
    """

    read_s = READ_S
    places: asyncio.Semaphore

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request: its first ones start the clock, the end of its headers stops it."""
        if self._waiting and self._cut is None:
            self._start_clock()
        super().data_received(data)
        if not self._waiting:
            self._stop_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self.places.release()
        super().connection_lost(exc)

    @property
    def _waiting(self) -> bool:
        """Return whether no request runs here: between two, and while the headers of one are coming."""
        return self.cycle is None or self.cycle.response_complete

    def _start_clock(self) -> None:
        self.app_state = {**self.app_state, "read_by": self.loop.time() + self.read_s}
        self._cut = self.loop.call_later(self.read_s, self.transport.close)

    def _stop_clock(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None


class ApiServer(uvicorn.Server):
    """Ends in order: new requests get 503, replies a moment to finish, the rest an error event.

    Args:
        read_s: seconds in which a request must be here whole. grace_s: that moment.
        ready: called once, when requests are taken.

    Attributes:
        leaves_interrupts: Ctrl-C is for a program that has the terminal meanwhile.
    """

    leaves_interrupts = False

    def __init__(
        self,
        app: App,
        endpoint: Endpoint,
        read_s: float = READ_S,
        grace_s: float = GRACE_S,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._places = asyncio.Semaphore(max_connections())
        protocol = type("Protocol", (_Protocol,), {"read_s": read_s, "places": self._places})
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=protocol,
            ws="none",
            loop="asyncio",
            lifespan="auto",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody may say that a request came from elsewhere
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        super().__init__(config)
        self._endpoint, self._grace_s, self._ready = endpoint, grace_s, ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        self._accepting: list[asyncio.Task[None]] = []

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until a signal, or ``end``, and the end of what runs."""
        self._loop = asyncio.get_running_loop()
        try:
            await super().serve(sockets)
        finally:
            self._endpoint.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take requests; the base class would take connections without any bound."""
        await super().startup([])
        self._accepting = [asyncio.create_task(self._accept(sock)) for sock in sockets or ()]
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, sock: socket.socket) -> None:
        """Take connections while there are places for them, until cancelled."""
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        while True:
            await self._places.acquire()
            try:
                taken, _ = await loop.sock_accept(sock)
                await loop.connect_accepted_socket(self._protocol, taken)
            except OSError as error:
                self._places.release()
                if error.errno != errno.ECONNABORTED:  # the client thought better of it
                    LOGGER.warning("no connection can be taken: %s", error.strerror or error)
                    await asyncio.sleep(RETRY_S)

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg,return-value]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the orderly end at the first signal; the second one does not wait for it."""
        if sig == signal.SIGINT and self.leaves_interrupts:
            return
        if self._endpoint.draining:
            self.should_exit = self.force_exit = True
        self.end()

    def end(self) -> None:
        """Begin the orderly end; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        if self._ending is None:
            self._endpoint.drain()
            self._ending = asyncio.get_running_loop().create_task(self._wind_down())

    async def _wind_down(self) -> None:
        await self._until_quiet(self._grace_s)
        self._endpoint.stop()
        await self._until_quiet(WIND_DOWN_S)
        self.should_exit = True

    async def _until_quiet(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        while self._endpoint.live and loop.time() < until:
            await asyncio.sleep(0.02)


def run(server: ApiServer, sock: socket.socket) -> None:
    """Serve on a bound socket until a signal ends it."""
    asyncio.run(server.serve([sock]))
