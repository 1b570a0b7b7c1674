"""``--url`` and ``--engine``: replies of a pair that is loaded here, of a running server or of a launched one."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local.app.engine_server import EngineServer, starter
from dflash_local.app.loading import Start, start_service
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import PANEL
from dflash_local.errors import UsageError
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from dflash_local.service.service import Service

if TYPE_CHECKING:
    from dflash_local.app.engine_launch import LaunchingEngine

EXAMPLE = "http://127.0.0.1:8000"


class EngineChoice(str, Enum):
    """What runs a pair: an engine of ours, or a server of another program."""

    auto = "auto"
    fused = "fused"
    reference = "reference"
    vllm = "vllm"
    sglang = "sglang"


Engine = Annotated[
    EngineChoice | None,
    typer.Option(
        "--engine",
        help=f"{LOAD_OPTIONS['engine'].help} vllm, sglang: the server at --url, else one that is launched.",
        rich_help_panel=PANEL,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="Replies of a running vLLM or SGLang server; its token in DFLASH_ENGINE_TOKEN."
    ),
]
EngineArgs = Annotated[
    str | None,
    typer.Option(
        "--engine-args",
        metavar="ARGS",
        help="More arguments for the launched server, as one text: '--max-model-len 8192'.",
        rich_help_panel=PANEL,
    ),
]
KeepServer = Annotated[
    bool, typer.Option("--keep", help="Leave the launched server running; says how to use it.", rich_help_panel=PANEL)
]
PlainUrl = Annotated[
    str | None,
    typer.Option(
        "--plain-url",
        metavar="URL",
        help="A second server, of the same target without drafts: it writes the plain text.",
    ),
]


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
    engine: EngineChoice | None,
    url: str | None,
    default: str | None = None,
    engine_args: str | None = None,
    keep: bool = False,
) -> Origin:
    """What the options mean.

    Args:
        default: the model of a command that was given none, where it is not a running server's to say.
        engine_args, keep: of a server that is launched.

    Raises:
        UsageError: an option that a server decides, or one that only a server has. DFlashError: no such pair.
    """
    program = engine.value if engine in (EngineChoice.vllm, EngineChoice.sglang) else None
    launching = url is None and program is not None
    if (engine_args is not None or keep) and not launching:
        option = "--keep" if engine_args is None else "--engine-args"
        raise UsageError(f"{option} is for a server that is launched", "give --engine vllm or sglang, and no --url")
    if url is None and program is None:
        load = load if engine is None else replace(load, engine=engine.value)
        return Origin(call.pair(model or default or "", drafter, load), load, start_service)
    if engine in (EngineChoice.fused, EngineChoice.reference):
        raise UsageError(f"--engine {engine.value} loads a pair here, and --url takes a server's", "leave one out")
    decided = (replace(load, draft=True) if launching else load).arguments(call.user.load_config)
    if decided:
        hint = "--engine-args passes on what it calls that" if launching else "leave it out with --url"
        which = "launched server" if launching else "server at --url"
        raise UsageError(f"{' '.join(decided)}: the {which} decides that when it is started", hint)
    source: EngineServer | LaunchingEngine
    if url is None:
        from dflash_local.app.engine_launch import LaunchingEngine

        assert program is not None
        source = LaunchingEngine(program, _words(engine_args), load.draft, keep)
        return Origin(source.pair(model or default, drafter, call.user), load, starter(source, drafter), source)
    source = EngineServer(url, program)
    return Origin(source.pair(model, drafter, call.user), load, starter(source, drafter), source)


def _words(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"--engine-args: {error}", "close the quotes") from error
