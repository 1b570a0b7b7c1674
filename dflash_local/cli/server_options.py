"""``--url``, ``--engine`` and more: replies of a pair that is loaded here, of a running server or of a launched one."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local.app.engine_server import EngineServer, starter
from dflash_local.app.loading import Start, start_service
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import PANEL
from dflash_local.errors import UsageError
from dflash_local.load_config import FUSED, LOAD_OPTIONS, REFERENCE, LoadConfig
from dflash_local.service.service import Service

if TYPE_CHECKING:
    from dflash_local.app.engine_launch import LaunchingEngine
    from dflash_local.remote.server_checks import Program

EXAMPLE = "http://127.0.0.1:8000"
PROGRAMS = ("vllm", "sglang")  # of ``remote.server_checks``, which --help must not import
# What runs a pair: an engine of ours, or a server of another program.
EngineChoice = Enum("EngineChoice", [(each, each) for each in (*LOAD_OPTIONS["engine"].choices, *PROGRAMS)])  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Of a command whose replies may be a server's; ``load_options.add_command`` makes an option of each field."""

    url: Annotated[
        str | None,
        opt.named("--url", "URL", "Replies of a running vLLM or SGLang server; its token in DFLASH_ENGINE_TOKEN."),
    ] = None
    engine: Annotated[
        EngineChoice | None,
        typer.Option(
            "--engine",
            help=f"{LOAD_OPTIONS['engine'].help} vllm, sglang: the server at --url, else one that is launched.",
            rich_help_panel=PANEL,
        ),
    ] = None
    engine_args: Annotated[
        str | None,
        typer.Option(
            "--engine-args",
            metavar="ARGS",
            help="More arguments for the launched server, as one text: '--max-model-len 8192'.",
            rich_help_panel=PANEL,
        ),
    ] = None

    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Let the launched server run Python code of the model's repository, where it needs that.",
            rich_help_panel=PANEL,
        ),
    ] = False

    @property
    def program(self) -> Program | None:
        """That a server must be; None where any will do, or an engine of ours is asked for."""
        return self.engine.value if self.engine is not None and self.engine.value in PROGRAMS else None


@dataclass(frozen=True, slots=True)
class KeptServerOptions(ServerOptions):
    """Of a command that may leave a launched server running."""

    keep: Annotated[
        bool,
        typer.Option("--keep", help="Leave the launched server running; says how to use it.", rich_help_panel=PANEL),
    ] = False


@dataclass(frozen=True, slots=True)
class TwoServerOptions(ServerOptions):
    """Of a command that compares replies with and without drafts."""

    plain_url: Annotated[
        str | None,
        opt.named(
            "--plain-url", "URL", "A second server, of the same target without drafts: it writes the plain text."
        ),
    ] = None

    def check(self) -> None:
        """Refuse a plain server without one that drafts. UsageError says what is missing."""
        if self.plain_url is not None and self.url is None:
            raise UsageError("--plain-url is the second of two servers: --url is missing", f"--url {EXAMPLE}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where replies come from.

    Attributes:
        server: None for a pair that is loaded here.
    """

    pair: Pair
    load: LoadConfig
    start: Start
    server: EngineServer | LaunchingEngine | None = None

    def service(self, call: Invocation) -> Service:
        """A service over the pair.

        Raises:
            DFlashError: it cannot be loaded, or the server does not serve it.
        """
        with call.console.progress():
            return self.start(self.pair, self.load, call.user, call.console.notify)


def origin(
    call: Invocation,
    model: str | None,
    drafter: str | None,
    load: LoadConfig,
    served: ServerOptions,
) -> Origin:
    """What the options mean.

    Args:
        model: None takes a running server's only one, else the default.

    Raises:
        UsageError: an option that a server decides, or one that only a server has. DFlashError: no such pair.
    """
    url, engine, program = served.url, served.engine, served.program
    keep = isinstance(served, KeptServerOptions) and served.keep
    launching = url is None and program is not None
    own = {"--engine-args": served.engine_args is not None, "--trust-remote-code": served.trust_remote_code}
    option = next((name for name, given in {**own, "--keep": keep}.items() if given), None)
    if option is not None and not launching:
        raise UsageError(f"{option} is for a server that is launched", "give --engine vllm or sglang, and no --url")
    if url is None and program is None:
        load = load if engine is None else replace(load, engine=engine.value)
        return Origin(call.pair(model or call.default_model(), drafter, load), load, start_service)
    if engine is not None and engine.value in (FUSED, REFERENCE):
        raise UsageError(f"--engine {engine.value} loads a pair here, and --url takes a server's", "leave one out")
    decided = (replace(load, draft=True) if launching else load).arguments(call.user.load_config)
    if decided:
        hint = "--engine-args passes on what it calls that" if launching else "leave it out with --url"
        which = "launched server" if launching else "server at --url"
        raise UsageError(f"{' '.join(decided)}: the {which} decides that when it is started", hint)
    source: EngineServer | LaunchingEngine
    if url is None:
        from dflash_local.app.engine_launch import LaunchingEngine
        from dflash_local.catalog.row import REMOTE_CODE

        assert program is not None
        source = LaunchingEngine(program, _words(served.engine_args), load.draft, keep)
        pair = source.pair(model or call.default_model(), drafter, call.user)
        if served.trust_remote_code or _trusts(call, source, pair, drafter):
            source = replace(source, extra=(*source.extra, REMOTE_CODE))
        return Origin(pair, load, starter(source, drafter), source)
    source = EngineServer(url, program)
    return Origin(source.pair(model, drafter, call.user), load, starter(source, drafter), source)


def _trusts(call: Invocation, source: LaunchingEngine, pair: Pair, drafter: str | None) -> bool:
    """Whether the user, asked, lets the server run code of the model's repository; False where nobody need be asked."""
    from dflash_local.app.engine_command import wants_remote_code
    from dflash_local.app.resolve import choose
    from dflash_local.catalog.row import REMOTE_CODE
    from dflash_local.remote.server_checks import PROGRAMS as TITLES

    choice = choose(pair.name, drafter, call.user, draft=source.drafts)
    if REMOTE_CODE in source.extra or not wants_remote_code(source.program, choice, source.drafts):
        return False
    question = f"{TITLES[source.program]} runs Python code of the repository of {pair.name} with your rights. Trust it?"
    return call.console.can_ask and call.console.ask(question, default=False)


def _words(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"--engine-args: {error}", "close the quotes") from error
