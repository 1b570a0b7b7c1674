"""``--url``, ``--engine`` and more: replies of a pair that is loaded here, of a running server or of a launched one."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local.app import fitting
from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.fetch import obtain
from dflash_local.cli.help_pages import MORE, MORE_LOADING
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.load_config import BALANCED, FUSED, LOAD_OPTIONS, REFERENCE, LoadConfig, gpus_named
from dflash_local.planner.accelerators import visible_value
from dflash_local.settings import LAUNCHED

if TYPE_CHECKING:
    from dflash_local.app.model_sources import ModelSource, ServerModels
    from dflash_local.remote.programs.server_program import Program
    from dflash_local.service.service import Service

EXAMPLE = "http://127.0.0.1:8000"
# What runs a pair: an engine of ours, or a server of another program.
EngineChoice = Enum("EngineChoice", [(each, each) for each in (*LOAD_OPTIONS["engine"].choices, *LAUNCHED)])  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Of a command whose replies may be a server's; ``load_options.add_command`` makes an option of each field."""

    url: Annotated[
        str | None,
        opt.named(
            "--url", "URL", "Replies of a running server (vLLM, SGLang, llama.cpp); its token in DFLASH_ENGINE_TOKEN."
        ),
    ] = None
    engine: Annotated[
        EngineChoice | None,
        typer.Option(
            "--engine",
            help=f"{LOAD_OPTIONS['engine'].help} {', '.join(LAUNCHED)}: that server at --url, else launched.",
            rich_help_panel=MORE_LOADING,
        ),
    ] = None
    engine_args: Annotated[
        str | None,
        typer.Option(
            "--engine-args",
            metavar="ARGS",
            help="More arguments for the launched server, as one text: '--max-model-len 8192'.",
            rich_help_panel=MORE_LOADING,
        ),
    ] = None
    own: Annotated[
        bool,
        typer.Option(
            "--own", help="Load the pair again where another command has it loaded.", rich_help_panel=MORE_LOADING
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Let the launched server run Python code of the model's repository, where it needs that.",
            rich_help_panel=MORE_LOADING,
        ),
    ] = False

    @property
    def program(self) -> Program | None:
        """That a server must be; None where any will do, or an engine of ours is asked for."""
        return self.engine.value if self.engine is not None and self.engine.value in LAUNCHED else None

    @property
    def order(self) -> tuple[Mode, Mode]:
        """The order of replies with and without drafts that costs least: a plain server is asked for margins last."""
        return ("dflash", "ar") if self.url is None and self.program is not None else ("ar", "dflash")


@dataclass(frozen=True, slots=True)
class KeptServerOptions(ServerOptions):
    """Options of a command that may leave the model loaded."""

    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Leave the model loaded at the end; says how to end it.", rich_help_panel=MORE_LOADING
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class TwoServerOptions(ServerOptions):
    """Of a command that compares replies with and without drafts."""

    plain_url: Annotated[
        str | None,
        opt.named(
            "--plain-url", "URL", "A second server, of the same target without drafts: it writes the plain text.", MORE
        ),
    ] = None

    def check(self) -> None:
        """Refuse a plain server without one that drafts. UsageError says what is missing."""
        if self.plain_url is not None and self.url is None:
            raise UsageError("--plain-url is the second of two servers: --url is missing", f"--url {EXAMPLE}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where replies come from: the pair, how it is loaded, and the source of it and of others."""

    pair: Pair
    load: LoadConfig
    models: ModelSource

    def service(self, call: Invocation) -> Service:
        """Return a service over the pair, which is loaded.

        Raises:
            DFlashError: it cannot be loaded, or the server does not serve it.
        """
        with call.console.progress():
            return self.serve(call.console.notify)

    def serve(self, notify: Notify) -> Service:
        """As ``service``, told how far it is where ``notify`` says."""
        from dflash_local.service.service import Service

        self.models.notify = notify
        with ExitStack() as stack:
            model = self.models.model(self.pair, self.load, thinking=False)
            service = stack.enter_context(Service(model, on_progress=notify))
            service.load()
            stack.pop_all()
        return service


def origin(
    call: Invocation,
    model: str | None,
    drafter: str | None,
    load: LoadConfig,
    served: ServerOptions,
    endpoint: bool = False,
) -> Origin:
    """Return what the options mean.

    Args:
        endpoint: it is for ``serve`` or ``web``. model: None takes a running server's only one, else the default.

    Raises:
        UsageError: an option that a server decides, or one that only a server has. DFlashError: no such pair.
    """
    from dflash_local.app.model_sources import LocalModels, ServerModels
    from dflash_local.catalog.row import REMOTE_CODE

    models: LocalModels | ServerModels
    url, engine, program = served.url, served.engine, served.program
    keep = isinstance(served, KeptServerOptions) and served.keep
    launching, here = url is None and program is not None, url is None and program is None
    own = {"--engine-args": served.engine_args is not None, "--trust-remote-code": served.trust_remote_code}
    option = next((name for name, given in own.items() if given), None)
    if option is not None and not launching:
        raise UsageError(
            f"{option} is for a server that is launched", f"give --engine {', '.join(LAUNCHED)}, and no --url"
        )
    if url is not None and (served.own or keep):
        raise UsageError(
            f"--{'own' if served.own else 'keep'} is for what this command starts", "leave it out with --url"
        )
    if here:
        load = load if engine is None else replace(load, engine=engine.value)
        user = replace(call.user, attach=call.user.attach and not served.own)
        get = obtain(call.user, call.console, load.allow_mismatch)
        models = LocalModels(user, load, call.console.notify, get, served=endpoint, keep=keep)
        return Origin(models.pair(model or call.default_model(), drafter), load, models)
    if engine is not None and engine.value in (FUSED, REFERENCE):
        raise UsageError(f"--engine {engine.value} loads a pair here, and --url takes a server's", "leave one out")
    gpus, visible = None, ""
    named = gpus_named(load.device)
    if launching and (named or load.device == BALANCED):
        gpus = len(fitting.machine(call.user, device=load.device).cards) or 1
        if named:
            visible = visible_value(named, call.user.environ.get("CUDA_VISIBLE_DEVICES"))
        load = replace(load, device=call.user.load_config.device)
    decided = (replace(load, draft=True) if launching else load).arguments(call.user.load_config)
    if decided:
        hint = "--engine-args passes on what it calls that" if launching else "leave it out with --url"
        which = "launched server" if launching else "server at --url"
        raise UsageError(f"{' '.join(decided)}: the {which} decides that when it is started", hint)
    plain_url = served.plain_url if isinstance(served, TwoServerOptions) else None
    models = ServerModels(call.user, call.console.notify, url, program, plain_url, drafter)
    if not launching:
        return Origin(models.pair(model, drafter), load, models)
    models = replace(models, extra=_words(served.engine_args), drafts=load.draft, keep=keep)
    models = replace(models, gpus=gpus, visible=visible)
    pair = models.pair(model or call.default_model(), drafter)
    if served.trust_remote_code or _trusts(call, models, pair):
        models = replace(models, extra=(*models.extra, REMOTE_CODE))
    return Origin(pair, load, models)


def compared(
    call: Invocation, model: str | None, drafter: str | None, load: LoadConfig, served: TwoServerOptions
) -> Origin:
    """Return what the options of a comparison mean; over servers, two of them answer, or one both ways.

    Raises:
        UsageError: the plain one without the other, or see ``origin``. DFlashError: no such pair.
    """
    from dflash_local.app.model_sources import ServerModels

    served.check()
    source = origin(call, model, drafter, load, served)
    if isinstance(source.models, ServerModels):
        return replace(source, models=replace(source.models, compares=True))
    return source


def _trusts(call: Invocation, models: ServerModels, pair: Pair) -> bool:
    """Whether the user, asked, lets the server run code of the model's repository; False where nobody need be asked."""
    from dflash_local.app.resolve import choose
    from dflash_local.app.server_command import wants_remote_code
    from dflash_local.catalog.row import REMOTE_CODE
    from dflash_local.remote.programs import PROGRAMS

    assert models.program is not None
    choice = choose(pair.name, models.drafter, call.user, draft=models.drafts)
    if REMOTE_CODE in models.extra or not wants_remote_code(models.program, choice, models.drafts):
        return False
    title = PROGRAMS[models.program].title
    question = f"{title} runs Python code of the repository of {pair.name} with your rights. Trust it?"
    return call.console.can_ask and call.console.ask(question, default=False)


def _words(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"--engine-args: {error}", "close the quotes") from error
