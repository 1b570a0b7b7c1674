"""Where a server listens and what it asks of clients: the options of it, checked. No message shows the token."""

from __future__ import annotations

import ipaddress
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from dflash_local import settings
from dflash_local.cli.help_pages import MORE
from dflash_local.cli.options import named
from dflash_local.errors import UsageError

HOST = "127.0.0.1"
TOKEN_VARIABLE = "DFLASH_TOKEN"
KEEP_ALIVE = "30m"
WILDCARDS = ("0.0.0.0", "::", "")
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?")
USUAL_PORTS = {"http": 80, "https": 443}
SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

Host = Annotated[str, named("--host", "ADDRESS", "Others than this machine's own need a token.")]
Port = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")]
Token = Annotated[str | None, named("--token", "TEXT", "What clients must send; others see it in ps.")]
TokenFile = Annotated[Path | None, named("--token-file", "FILE", "A file that holds the token.", MORE)]
AllowHost = Annotated[list[str] | None, named("--allow-host", "NAME", "A further name of this server.", MORE)]
AllowOrigin = Annotated[
    list[str] | None,
    named("--allow-origin", "ORIGIN", "A web page that may use this server, as https://app.example; repeatable.", MORE),
]
KeepAlive = Annotated[
    str | None, named("--keep-alive", "TIME", "Unload when idle: 90s, 2h, 0, never; 30m if not given.", MORE)
]


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, and what to ask of clients."""

    host: str
    port: int
    token: str | None = field(repr=False)
    more_hosts: tuple[str, ...] = ()
    origins: frozenset[str] = frozenset()

    @property
    def url(self) -> str:
        """What a client on this machine uses."""
        name = "127.0.0.1" if self.host in WILDCARDS else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.port}"


def address_of(
    host: str,
    port: int,
    token: str | None,
    token_file: Path | None,
    more_hosts: Sequence[str] | None,
    user: settings.Settings,
) -> Address:
    """The options of an address, checked.

    Raises:
        UsageError: other machines could reach it without a token, or the token is given twice, unreadable or unusable.
    """
    address = Address(host, port, _token(token, token_file, user), tuple(more_hosts or ()))
    if address.token is None and not _is_loopback(host):
        raise UsageError(
            f"--host {host}: other machines could use this model, and there is no token",
            f"put a secret into {TOKEN_VARIABLE} or --token-file, or stay on {HOST} and reach it with "
            f"ssh -L {port}:{HOST}:{port}",
        )
    return address


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(given: str | None, file: Path | None, user: settings.Settings) -> str | None:
    """The token of the option, the file or the variable; None for none."""
    if given is not None and file is not None:
        raise UsageError("--token and --token-file both name a token", "give one of them")
    token = given if given is not None else user.environ.get(TOKEN_VARIABLE) or None
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--token-file {file} cannot be read: {error}", "give a readable text file") from error
    if token is not None and not re.fullmatch(r"[!-~]{8,4096}", token):
        raise UsageError("the token is not usable", "8 or more letters, digits or signs without spaces")
    return token


def keep_alive_of(given: str | None, kept_by: str = "") -> float | None:
    """Seconds after which an idle model is unloaded; None for never.

    Args:
        kept_by: what keeps it loaded, where that is not this program.

    Raises:
        UsageError: no time, or another program decides.
    """
    seconds = parse_duration(KEEP_ALIVE if given is None else given)
    if kept_by and given is not None:
        raise UsageError(f"--keep-alive: {kept_by} keeps its model loaded", "leave it out with --url")
    return None if kept_by else seconds


def parse_duration(text: str) -> float | None:
    """Seconds of ``90s``, ``30m``, ``2h``, ``0``; None for ``never``; UsageError for anything else."""
    if text.strip().lower() == "never":
        return None
    found = DURATION.fullmatch(text.strip().lower())
    seconds = float(found[1]) * SECONDS[found[2]] if found else math.inf
    if not math.isfinite(seconds):
        raise UsageError(f"--keep-alive {text!r} is not a time", "such as 90s, 30m, 2h, 0 or never")
    return seconds


def origins_of(given: Sequence[str] | None) -> frozenset[str]:
    """The web pages that may use the server, as browsers write them: in lower case, without a port that is usual.

    Raises:
        UsageError: one of them is not a scheme and a host.
    """
    return frozenset(map(_origin, given or ()))


def _origin(text: str) -> str:
    found = ORIGIN.fullmatch(text.lower())
    if found is None:
        raise UsageError(
            f"--allow-origin {text!r} is not the origin of a page",
            "give scheme and host of each page, without a path: https://app.example or http://localhost:3000",
        )
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and int(port) != USUAL_PORTS.get(scheme) else "")


def curl_line(address: Address, model: str) -> str:
    """A command that asks the server something; the token is named, not shown."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    secret = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if address.token else ""
    url = f"{address.url}/v1/chat/completions"
    return f"curl {shlex.quote(url)} -H 'Content-Type: application/json'{secret} -d {shlex.quote(body)}"
