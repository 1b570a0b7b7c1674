"""``--url`` and ``--engine``: whether replies come from a pair that is loaded here or from a running server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

import typer

from dflash_local.app.engine_server import EngineServer
from dflash_local.app.loading import Start, start_service
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import PANEL
from dflash_local.errors import UsageError
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from dflash_local.service.service import Service

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
        "--engine", help=f"{LOAD_OPTIONS['engine'].help} vllm, sglang: the server at --url.", rich_help_panel=PANEL
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="Replies of a running vLLM or SGLang server; its token in DFLASH_ENGINE_TOKEN."
    ),
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
    server: EngineServer | None = None

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
) -> Origin:
    """What the options mean.

    Args:
        default: the model of a command that was given none, where it is loaded here.

    Raises:
        UsageError: an option that a server decides, or one that only a server has. DFlashError: no such pair.
    """
    server = engine in (EngineChoice.vllm, EngineChoice.sglang)
    if url is None:
        if engine is not None and server:
            raise UsageError(
                f"--engine {engine.value} needs --url: dflash-local starts no server itself yet",
                f"dflash show MODEL prints the command; then --url {EXAMPLE}",
            )
        load = load if engine is None else replace(load, engine=engine.value)
        return Origin(call.pair(model or default or "", drafter, load), load, start_service)
    if engine in (EngineChoice.fused, EngineChoice.reference):
        raise UsageError(f"--engine {engine.value} loads a pair here, and --url takes a server's", "leave one out")
    decided = load.arguments(call.user.load_config)
    if decided:
        raise UsageError(
            f"{' '.join(decided)}: the server at --url decides that when it is started", "leave it out with --url"
        )
    program = engine.value if engine in (EngineChoice.vllm, EngineChoice.sglang) else None
    found = EngineServer(url, program)
    return Origin(found.pair(model, drafter, call.user), load, found.starter(drafter), found)
