"""A session in another dflash process on this machine (``dflash serve``), used as if it were loaded here.

Speaks the native routes of that process over loopback; refuses to know engines and screens.
"""

from __future__ import annotations

import http.client
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from dflash_local import errors, terminal
from dflash_local.errors import BusyError, DFlashError, EngineError, ServerError, UnknownModelError, UsageError
from dflash_local.events import Event, Finished, Notice, Step, from_dict
from dflash_local.loaded import SessionFacts, nothing_done
from dflash_local.remote.endpoint import MAX_MESSAGE, Endpoint, error_message, read_object, within
from dflash_local.remote.event_stream import Patience, ReplyStream
from dflash_local.request import Request

ANSWER_S = 5.0
LOAD_S = 1800.0  # a large pair from a slow disk
SILENCE_S = 60.0  # the server sends an empty line every ten seconds while it has nothing to say
PATIENCE = Patience(first=6 * 3600.0, silence=LOAD_S, notice=6 * 3600.0)  # long replies of others may come before
END_S = 3.0  # what a cancelled reply may take to end
POLL_S = 0.1
START_AGAIN = "start it again with dflash serve, or set DFLASH_ATTACH=0"
BY_STATUS: dict[int, type[DFlashError]] = {400: UsageError, 404: UnknownModelError, 429: BusyError}


@dataclass(frozen=True, slots=True)
class AttachedFacts(SessionFacts):
    """What the other process has loaded, and how."""


@dataclass(frozen=True, slots=True)
class Server:
    """A dflash process that listens on this machine."""

    url: str
    token: str | None = None

    def status(self) -> dict[str, Any] | None:
        """What it says of itself; None when nobody, or another program, answers there."""
        try:
            answer = self._call("GET", "/dflash/v1/status", None, ANSWER_S)
        except DFlashError:
            return None
        named = isinstance(answer.get("model"), str) and isinstance(answer.get("state"), str)
        return answer if named and isinstance(answer.get("aliases", []), list) else None

    def load(self, model: str) -> dict[str, Any]:
        """Have it load the model that it keeps; its status afterwards.

        Raises:
            DFlashError: it cannot.
        """
        return self._call("POST", "/dflash/v1/load", {"model": model}, LOAD_S)

    def cancel(self, name: str) -> None:
        """Stop the reply to a request; whether it was still running does not matter."""
        with suppress(DFlashError):
            self._call("POST", "/dflash/v1/cancel", {"id": name}, END_S)

    def reply(self, body: Mapping[str, Any], most: int) -> ReplyStream:
        """The stream of a reply of at most so many tokens."""
        return ReplyStream(self._endpoint, "/dflash/v1/generate", body, most, PATIENCE, SILENCE_S)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        with _errors_of_attached():
            status, raw = self._endpoint.fetch(method, path, within(timeout_s), body)
        answer = read_object(raw)
        if status != http.client.OK:
            raise self._endpoint.refusal(status, raw)
        if answer is None:
            raise EngineError(f"the server at {self.url} answers with no object", START_AGAIN)
        return answer

    @property
    def _endpoint(self) -> Endpoint:
        return _Endpoint(self.url, self.token)


class _Endpoint(Endpoint):
    def refusal(self, status: int, body: bytes) -> DFlashError:
        """As the other process means it."""
        return BY_STATUS.get(status, EngineError)(error_message(body) or f"the server answers with status {status}")


class AttachedSession:
    """The session of a server, for one ``Service`` of this process.

    Args:
        model: what the server calls the pair: a request fails when it has switched to another one.
    """

    def __init__(self, server: Server, model: str, facts: AttachedFacts) -> None:
        self.facts = facts
        self._server, self._model = server, model

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Answer ``request``: the events of the other process up to and including ``Finished``.

        Raises:
            DFlashError: the one that ended the request there. EngineError: the other process is gone.
        """
        name = secrets.token_hex(16)
        done, given_up = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, args=(name, cancelled, done, given_up), daemon=True).start()
        body = asdict(request) | {"model": self._model, "id": name}
        try:
            with _errors_of_attached(), closing(self._server.reply(body, request.limits.max_new_tokens)) as stream:
                yield from self._events(request, stream, given_up)
        finally:
            done.set()

    def _events(self, request: Request, stream: ReplyStream, given_up: threading.Event) -> Iterator[Event]:
        for line in stream.lines(given_up.is_set):
            if isinstance(line, Notice) or not line.strip():
                continue
            content = read_object(line) or {}
            if "error" in content:
                raise _named_error(content["error"])
            try:
                event = from_dict(content)
            except ValueError as error:
                raise EngineError(f"the server at {self._server.url} sends {error}", START_AGAIN) from error
            if isinstance(event, Step):
                stream.advance(event)
            yield event
            if isinstance(event, Finished):
                return
        if not given_up.is_set():
            raise EngineError(f"the server at {self._server.url} ended the reply without saying why", START_AGAIN)
        yield nothing_done(self.facts, request)

    def _watch(
        self, name: str, cancelled: Callable[[], bool], done: threading.Event, given_up: threading.Event
    ) -> None:
        """Pass a cancel on, again and again, as the request may still be on its way; then give the reply up."""
        until = math.inf
        while not done.wait(POLL_S):
            if cancelled():
                until = min(until, time.monotonic() + END_S)
                self._server.cancel(name)
            if time.monotonic() > until:
                given_up.set()

    def close(self) -> None:
        """Nothing of it is here."""


def attach(server: Server, model: str) -> AttachedSession:
    """The session of a server that keeps ``model``, loaded if it was not.

    Raises:
        DFlashError: it cannot be loaded there.
    """
    facts = facts_of(server.load(model))
    if facts is None:
        raise EngineError(
            f"the server at {server.url} has nothing loaded, or is of another version", "restart dflash serve"
        )
    return AttachedSession(server, model, facts)


def facts_of(status: Mapping[str, Any]) -> AttachedFacts | None:
    """What a server says that it has loaded; None when that is nothing, or said in the words of another version."""
    facts = status.get("facts")
    try:
        return AttachedFacts.from_dict(facts) if isinstance(facts, dict) else None
    except (TypeError, UsageError):
        return None


def is_listening(url: str) -> bool:
    """Whether anybody answers at the address; quick, where a whole request would wait."""
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname or "", address.port or 80), timeout=POLL_S):
            return True
    except OSError:
        return False


@contextmanager
def _errors_of_attached() -> Iterator[None]:
    """Within, a server that does not answer as it should is an engine that is gone."""
    try:
        yield
    except ServerError as error:
        raise EngineError(error.message, START_AGAIN) from error


def _named_error(content: Any) -> DFlashError:
    """The error that ended a reply there, as the class it was."""
    found = content if isinstance(content, dict) else {}
    kind = getattr(errors, str(found.get("type")), EngineError)
    known = kind if isinstance(kind, type) and issubclass(kind, DFlashError) else EngineError
    message, hint = (terminal.safe_line(str(found.get(name, "")))[:MAX_MESSAGE] for name in ("message", "hint"))
    return known(message or "the reply failed", hint)
