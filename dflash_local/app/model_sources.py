"""Where models come from: pairs of this machine, or servers of another program that run or are launched.

A source tells which pair a name means and how it is loaded (``service.backend.Model``); chat, page and endpoint hold
one and never ask which.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from dflash_local.app.load_planning import planned_context
from dflash_local.app.loading import open_for_replies, warn_of
from dflash_local.app.models import installed, registry
from dflash_local.app.notices import Notify
from dflash_local.app.recommending import suited
from dflash_local.app.resolve import Obtain, choose, resolve
from dflash_local.app.server_pairs import known_pair, wanted_model
from dflash_local.app.thinking import default_thinking
from dflash_local.app.two_servers import (
    HOW,
    HOW_FIRST,
    HOW_LAUNCHED,
    TwoServers,
    require_drafts,
    require_no_drafts,
)
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.chat.tokenizer_files import chat_template, takes_effort
from dflash_local.chat.tool_calls import GENERAL_FORM, format_of
from dflash_local.checkpoint_files.source import is_on_disk, open_source
from dflash_local.errors import DFlashError, UsageError
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.service.backend import Backend, Model
from dflash_local.settings import Settings
from dflash_local.tables import amount

if TYPE_CHECKING:
    from dflash_local.remote.endpoint import ServerEndpoint
    from dflash_local.remote.openai_server import OpenAIServer
    from dflash_local.remote.programs.server_program import Program

NAMES_S = 2.0  # a status waits for them, and those that ask for it wait 5 s (``remote.serve_status``)
Progress = Callable[[LoadProgress], None]


class ModelSource(Protocol):
    """Tells what a name means and how it is loaded.

    Attributes:
        notify: told of what is found. label: what stands for a server in messages; empty where pairs are loaded here.
    """

    notify: Notify

    @property
    def label(self) -> str: ...

    def pair(self, name: str | None, drafter: str | None = None, load: LoadConfig | None = None) -> Pair:
        """Return the pair that a name means, after a download if the user agrees to one."""

    def model(self, pair: Pair, load: LoadConfig, thinking: bool) -> Model:
        """Return how a pair is loaded."""

    def find(self, name: str, load: LoadConfig | None) -> Model:
        """Return another model, known to be there before anything that runs is touched."""

    def names(self) -> tuple[str, ...]:
        """Return the models that ``find`` may find."""

    def check(self, pair: Pair) -> None:
        """Raise DFlashError where it will not do, before anything is served."""

    def without_questions(self) -> ModelSource:
        """Return the same source, which asks nobody before a download: a screen does that."""


def decided(source: ModelSource) -> str:
    """Return a line on why nothing is loaded in a server's place; empty where pairs are loaded here."""
    return f"{source.label} decides what is loaded, and how" if source.label else ""


@dataclass(slots=True)
class LocalModels(ModelSource):
    """Pairs that are loaded on this machine.

    Attributes:
        load: how, where nobody says. obtain: downloads what a pair that ``pair`` is asked for lacks.
        served: models are for an endpoint, which tells their context and reads their tool calls.
        keep: what is loaded stays when this program ends.
    """

    user: Settings
    load: LoadConfig
    notify: Notify
    obtain: Obtain = lambda _missing: False
    served: bool = False
    keep: bool = False

    @property
    def label(self) -> str:
        """See ``ModelSource``."""
        return ""

    def pair(self, name: str | None, drafter: str | None = None, load: LoadConfig | None = None) -> Pair:
        """See ``ModelSource`` and ``app.resolve.resolve``."""
        load = load or self.load
        suit = suited(load, self.user, self.notify)
        return resolve(name or "", drafter, self.user, self.notify, draft=load.draft, obtain=self.obtain, suit=suit)

    def model(self, pair: Pair, load: LoadConfig, thinking: bool) -> Model:
        """See ``ModelSource``. The model's id is a name, never a path of this machine."""
        source = open_source(pair.target)
        name, aliases = names_of(pair, self.user)

        def opened(progress: Progress) -> Backend:
            backend = open_for_replies(pair, load, self.user, _notify(self.notify, progress), self.keep)
            if self.keep and backend.facts.pid is not None:
                self.notify(Notice(_kept(name, backend.facts, self.user)))
            return backend

        model = Model(
            name=name,
            load=opened,
            pair=pair,
            aliases=aliases,
            sampling=sampling_defaults(source, pair.sampling),
            thinking=thinking,
            mode="dflash" if load.draft else "ar",
        )
        if not self.served:
            return model
        parts = source.tokenizer()
        template = None if parts is None else chat_template(parts)
        return replace(
            model,
            takes_effort=takes_effort(template),
            call_format=format_of(template) or GENERAL_FORM,
            context=planned_context(pair, load, self.user),
        )

    def find(self, name: str, load: LoadConfig | None) -> Model:
        """See ``ModelSource``. Its drafter decides whether it thinks."""
        load = load or self.load
        pair = resolve(name, None, self.user, self.notify, draft=load.draft)
        return self.model(pair, load, default_thinking(pair))

    def names(self) -> tuple[str, ...]:
        """See ``ModelSource``."""
        return installed(self.user)

    def check(self, pair: Pair) -> None:
        """Do nothing: what a load lacks, the load says."""

    def without_questions(self) -> LocalModels:
        """See ``ModelSource``."""
        return replace(self, obtain=lambda _missing: False)


@dataclass(slots=True)
class ServerModels(ModelSource):
    """Models of a server of another program that runs, or that is launched for each pair that is wanted.

    Attributes:
        url: where it runs; None launches one. program: that it must be; None takes both.
        plain_url: of a second running server, which does not draft. drafter: that the first is to draft with, instead
            of the registry's.
        extra: arguments of the program behind those of the registry; ``--trust-remote-code`` among them is the user's
            leave to run code of a model's repository. gpus: that it splits layers over. visible: its
            ``CUDA_VISIBLE_DEVICES``, the user's own where empty. drafts: False launches it without its drafter. keep:
            leave it running in the end. compares: requests in mode ``ar`` go to a second server, see ``two_servers``.
    """

    user: Settings
    notify: Notify
    url: str | None
    program: Program | None = None
    plain_url: str | None = None
    drafter: str | None = None
    extra: tuple[str, ...] = ()
    gpus: int | None = None
    visible: str = ""
    drafts: bool = True
    keep: bool = False
    compares: bool = False

    @property
    def label(self) -> str:
        """See ``ModelSource``."""
        from dflash_local.remote.programs import PROGRAMS

        if self.url is not None:
            return f"the server at {self.endpoint(self.url).url}"
        assert self.program is not None  # what is launched is named
        return f"the launched {PROGRAMS[self.program].title}"

    def pair(self, name: str | None, drafter: str | None = None, load: LoadConfig | None = None) -> Pair:
        """Return what is known here of a pair; the only model of a running server without a name.

        Nothing is launched or downloaded.

        Raises:
            UsageError: a bad address or ``drafter``; or no name, and it is launched. UnknownModelError: no such pair,
                or no name, and it serves several models. ServerError: no such server answers.
        """
        if self.url is None:
            if name is None:
                raise UsageError("no MODEL was given", "dflash models lists all")
            choose(name, drafter, self.user, draft=self.drafts)  # a name that only a running server knows is none here
            return known_pair(name, drafter, self.user)
        from dflash_local.remote import server_checks

        where = self.endpoint(self.url)
        if name is None:
            name = server_checks.probe(where, server_checks.WantedModel(), self.program).served
        return known_pair(name, drafter, self.user)

    def model(self, pair: Pair, load: LoadConfig, thinking: bool) -> Model:
        """See ``ModelSource``; loading is checking the server, or launching one."""
        name, aliases = names_of(pair, self.user)

        def opened(progress: Progress) -> Backend:
            notify = _notify(self.notify, progress)
            if self.plain_url is not None or self.compares:
                return self.both(pair, notify)
            server = self.open(pair, self.drafts, notify)
            if self.keep and server.process is not None:
                with ExitStack() as stack:
                    stack.callback(server.close)
                    notify(Notice(server.process.keep()))
                    stack.pop_all()
            return server

        return Model(
            name=name,
            load=opened,
            pair=pair,
            aliases=aliases,
            sampling=sampling_defaults(open_source(pair.target), pair.sampling),
            thinking=thinking,
            mode="dflash" if self.drafts else "ar",
            call_format="server",
            kept_by=self.label if self.url is not None else "",
        )

    def find(self, name: str, load: LoadConfig | None) -> Model:
        """See ``ModelSource``.

        Raises:
            UsageError: the server decides that. UnknownModelError: it does not serve it. ServerError: it is gone.
        """
        if load is not None or self.url is None:
            raise UsageError(decided(self), "end it, and start it as wanted")
        pair = known_pair(name, None, self.user)
        self.attach(pair, self.url, None)
        return self.model(pair, self.user.load_config, default_thinking(pair))

    def names(self) -> tuple[str, ...]:
        """Return the models that a running server has now; none while it does not answer."""
        from dflash_local.remote.endpoint import within
        from dflash_local.remote.server_checks import served_models

        if self.url is not None:
            with suppress(DFlashError):
                return tuple(model.id for model in served_models(self.endpoint(self.url), within(NAMES_S)))
        return ()

    def check(self, pair: Pair) -> None:
        """Ask all servers that run, or see whether the program to launch is installed."""
        if self.url is None:
            from dflash_local.app.server_launch import program_of

            assert self.program is not None
            program_of(self.program, self.user)
        elif self.plain_url is not None:
            self.both(pair, lambda _event: None)
        else:
            self.attach(pair, self.url, self.drafter)

    def without_questions(self) -> ServerModels:
        """See ``ModelSource``."""
        return self

    def both(self, pair: Pair, notify: Notify) -> TwoServers:
        """Return the backend over a server that drafts and one that does not.

        Raises:
            UsageError: the first does not draft, or the second does or does not report it; they are one server, or two
                programs. DFlashError: one of them does not answer or start, or serves another model.
        """

        def opened(drafts: bool, cancelled: Callable[[], bool]) -> OpenAIServer:
            return self.open_compared(pair, drafts, notify, cancelled)

        found = TwoServers(opened, in_turn=self.url is None)
        if self.url is not None and self.plain_url is not None:
            drafting, plain = found.both
            if drafting.program != plain.program:
                raise UsageError(
                    f"{drafting.title} and {plain.title} compute differently: both servers must be of one program", HOW
                )
            notify(Notice(f"plain replies come from {plain.loaded_as}"))
            if self.endpoint(self.plain_url).in_the_clear:
                notify(Notice(f"the token goes unencrypted to {plain.url}: use https, or ssh -L", "warning"))
        elif self.url is not None:
            notify(Notice(f"plain replies come from {found.both[1].loaded_as}"))
        return found

    def open_compared(
        self, pair: Pair, drafts: bool, notify: Notify, cancelled: Callable[[], bool] = lambda: False
    ) -> OpenAIServer:
        """Return one of two servers that are compared; see ``both``.

        Without a second address the plain one is launched, or the first one whose requests switch drafting off.
        """
        by_request = not drafts and self.url is not None and self.plain_url is None
        if drafts or self.url is None:
            server = self.open(pair, drafts, notify, cancelled)
        else:
            server = self.attach(pair, self.url if by_request else self._checked_plain_url(), None)
        with ExitStack() as stack:
            stack.callback(server.close)
            if drafts:
                require_drafts(server.facts, HOW_LAUNCHED if self.url is None else HOW_FIRST)
            elif by_request:
                server.switch_off(HOW)
            else:
                require_no_drafts(server.facts, HOW_LAUNCHED if self.url is None else HOW)
            stack.pop_all()
        return server

    def open(
        self, pair: Pair, drafts: bool, notify: Notify, cancelled: Callable[[], bool] = lambda: False
    ) -> OpenAIServer:
        """Return the backend over the running server, or over one that is launched now and ends with it.

        Raises:
            DFlashError: it does not answer, serves another model, or does not start.
        """
        if self.url is not None:
            if self.plain_url is not None:
                self._checked_plain_url()
            server = self.attach(pair, self.url, self.drafter)
        else:
            from dflash_local.app.server_launch import launch
            from dflash_local.remote.openai_server import attach

            assert self.program is not None
            choice = choose(pair.name, self.drafter, self.user, draft=drafts)
            choice.announce(notify)
            with ExitStack() as stack:
                process = stack.enter_context(
                    launch(
                        *(self.program, choice, self.user, drafts, self.extra, notify),
                        cancelled=cancelled,
                        gpus=self.gpus,
                        visible=self.visible,
                    )
                )
                wanted = wanted_model(pair, self.drafter if drafts else None, self.user)
                server = attach(process.endpoint, wanted, self.program, process=process)
                stack.pop_all()
        notify(Notice(f"replies come from {server.facts.loaded_as}"))
        warn_of(server, notify)
        return server

    def attach(self, pair: Pair, url: str, drafter: str | None) -> OpenAIServer:
        """Return the backend over the server at an address, and say nothing."""
        from dflash_local.remote.openai_server import attach

        return attach(self.endpoint(url), wanted_model(pair, drafter, self.user), self.program)

    def endpoint(self, url: str) -> ServerEndpoint:
        """Return where a server listens. UsageError: that is no address."""
        from dflash_local.remote.endpoint import TOKEN_VARIABLE, endpoint

        return endpoint(url, self.user.environ.get(TOKEN_VARIABLE))

    def _checked_plain_url(self) -> str:
        """Return the second address. UsageError: there is none, it is none, or the same as the first."""
        assert self.plain_url is not None and self.url is not None
        try:
            plain = self.endpoint(self.plain_url)
        except UsageError as error:
            raise UsageError(error.message.replace("--url", "--plain-url"), error.hint) from None
        if plain.url == self.endpoint(self.url).url:
            raise UsageError("--url and --plain-url are the same server", HOW)
        return self.plain_url


def names_of(pair: Pair, user: Settings) -> tuple[str, tuple[str, ...]]:
    """Return what a pair's id is, never a path of this machine, and its aliases of the registry's row."""
    if is_on_disk(pair.name):
        return pair.target.resolve().name or "model", ()
    row = registry(user).find(pair.name)
    return pair.name, tuple(name for name in (row.aliases if row is not None else ()) if name != pair.name)


def _notify(notify: Notify, progress: Progress) -> Notify:
    """Return what tells notices to one and how far a load is to the other."""
    return lambda event: progress(event) if isinstance(event, LoadProgress) else notify(event)


def _kept(name: str, facts: SessionFacts, user: Settings) -> str:
    """Return a line on the memory that stays in use, and how to end it."""
    from dflash_local.planner.occupancy import occupancy

    used = occupancy(facts.device, user.environ, facts.pid).used
    size = "" if used is None else f" ({amount(used)})"
    return f"{name} stays loaded{size}, process {facts.pid}: dflash stop {name} ends it"
