"""A session in another dflash process on this machine (``dflash serve``), used as if it were loaded here.

Speaks the native routes of that process over loopback; refuses to know engines and screens.
"""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from dflash_local import errors
from dflash_local.errors import BusyError, DFlashError, EngineError, UnknownModelError, UsageError
from dflash_local.events import Event, Finished, from_dict
from dflash_local.loaded import SessionFacts
from dflash_local.remote.endpoint import Endpoint
from dflash_local.request import Request

ANSWER_S = 5.0
LOAD_S = 1800.0  # a large pair from a slow disk
SILENCE_S = 60.0  # the server sends an empty line every ten seconds while it has nothing to say
POLL_S = 0.1
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
        except (OSError, http.client.HTTPException, ValueError, DFlashError):
            return None
        return answer if isinstance(answer.get("model"), str) and "state" in answer else None

    def load(self, model: str) -> dict[str, Any]:
        """Have it load the model that it keeps; its status afterwards.

        Raises:
            DFlashError: it cannot.
        """
        try:
            return self._call("POST", "/dflash/v1/load", {"model": model}, LOAD_S)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _lost(self.url) from error

    def cancel(self, name: str) -> None:
        """Stop the reply to a request; whether it was still running does not matter."""
        with suppress(OSError, http.client.HTTPException, ValueError, DFlashError):
            self._call("POST", "/dflash/v1/cancel", {"id": name}, ANSWER_S)

    def generate(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The lines of a reply.

        Raises:
            DFlashError: the request was refused.
        """
        with closing(self._endpoint.connection(SILENCE_S)) as connection:
            response = self._sent(connection, "POST", "/dflash/v1/generate", body)
            while line := response.readline():
                if line.strip():
                    yield json.loads(line)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        with closing(self._endpoint.connection(timeout_s)) as connection:
            answer = json.loads(self._sent(connection, method, path, body).read())
        if not isinstance(answer, dict):
            raise ValueError("not an object")
        return answer

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.token)

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        """The answer to a request, whose status was 200."""
        response = self._endpoint.send(connection, method, path, body)
        if response.status != http.client.OK:
            raise _refusal(response.status, response.read())
        return response


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
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(name, cancelled, done), daemon=True)
        watcher.start()
        try:
            yield from self._events(asdict(request) | {"model": self._model, "id": name})
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _lost(self._server.url) from error
        finally:
            done.set()

    def _events(self, body: Mapping[str, Any]) -> Iterator[Event]:
        for content in self._server.generate(body):
            if "error" in content:
                raise _named_error(content["error"])
            event = from_dict(content)
            yield event
            if isinstance(event, Finished):
                return
        raise _lost(self._server.url)

    def _watch(self, name: str, cancelled: Callable[[], bool], done: threading.Event) -> None:
        """Pass a cancel on, again and again: the request may still be on its way."""
        while not done.wait(POLL_S):
            if cancelled():
                self._server.cancel(name)

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


def _refusal(status: int, body: bytes) -> DFlashError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered with status {status}"
    return BY_STATUS.get(status, EngineError)(message)


def _named_error(content: Mapping[str, Any]) -> DFlashError:
    """The error that ended a reply there, as the class it was."""
    kind = getattr(errors, str(content.get("type")), EngineError)
    known = kind if isinstance(kind, type) and issubclass(kind, DFlashError) else EngineError
    return known(str(content.get("message", "the reply failed")), str(content.get("hint", "")))


def _lost(url: str) -> EngineError:
    return EngineError(f"the server at {url} is gone", "start it again with dflash serve, or set DFLASH_ATTACH=0")
