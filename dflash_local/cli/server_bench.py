"""``dflash bench`` over a vLLM or SGLang server that runs or is launched: tasks or prompts, so many at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from dflash_local.app.engine_server import EngineServer
from dflash_local.app.resolve import choose
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.options import named
from dflash_local.cli.server_options import Origin, TwoServerOptions, origin
from dflash_local.cli.task_bench import (
    TOKENS,
    TaskBench,
    cannot_write,
    fetched,
    note_resumed,
    results_folder,
)
from dflash_local.errors import UnknownModelError, UsageError
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from dflash_local.bench.prompts import Prompt
    from dflash_local.bench.tasks.server_report import Side
    from dflash_local.bench.tasks.server_results import LoopFile
    from dflash_local.bench.tasks.server_run import LoopOptions, Subject
    from dflash_local.catalog.row import Published
    from dflash_local.remote.openai_server import ServerSession
    from dflash_local.remote.server_checks import ServerFacts

MOST = 32  # requests at a time
PROMPT_TOKENS = 256  # of a reply to a prompt that is of no task, as without a server
Opened = Callable[[], "AbstractContextManager[ServerSession]"]
ChosenPrompts = Callable[[Pair], "tuple[str, tuple[Prompt, ...]]"]


@dataclass(frozen=True, slots=True)
class ServerBench(TwoServerOptions):
    """The options of a server as they were given."""

    concurrency: Annotated[
        str | None, named("--concurrency", "1,4,16", f"Over a server: requests at a time, each 1 to {MOST}; 1.")
    ] = None

    @property
    def used(self) -> bool:
        """Whether replies come from a server."""
        return self.url is not None or self.program is not None

    def checked(self, load: LoadConfig) -> LoadConfig:
        """How a pair is loaded where there is no server.

        Raises:
            UsageError: options that do not go together, or no number of requests.
        """
        self.levels()
        if self.plain_url is not None and self.url is None:
            raise UsageError("--plain-url is for --url", "give the server that drafts with --url")
        if self.used:
            return load
        if self.concurrency is not None:
            raise UsageError("--concurrency is for a server", "our own engine answers one request at a time")
        if self.engine_args is not None:
            raise UsageError("--engine-args is for a server that is launched", "give --engine vllm or sglang")
        return load if self.engine is None else replace(load, engine=self.engine.value)

    def levels(self) -> tuple[int, ...]:
        """The numbers of requests at a time, each once, in the order given. UsageError: one that is none."""
        words = [word.strip() for word in (self.concurrency or "1").split(",")]
        for word in words:
            if not (word.isascii() and word.isdigit() and len(word) <= len(str(MOST)) and 1 <= int(word) <= MOST):
                raise UsageError(f"--concurrency: {word[:20]!r} is not 1 to {MOST}", "give numbers such as 1,4,16")
        return tuple(dict.fromkeys(map(int, words)))


@dataclass(frozen=True, slots=True)
class Run:
    """What both servers are asked.

    Attributes:
        open: a file of results by its name and identity.
    """

    call: Invocation
    pair: Pair
    drafter: str | None
    options: LoopOptions
    open: Callable[[str, dict[str, Any]], AbstractContextManager[LoopFile]]

    def side(self, files: ExitStack, session: ServerSession, subject: Subject) -> Side:
        """Measure what is not measured yet on one server."""
        from dflash_local.bench.tasks import server_figures, server_run
        from dflash_local.bench.tasks.server_report import Side

        level, facts = self.options.concurrency, session.facts
        name = f"{self.pair.name}-{subject.name}-{facts.program}-{level}"
        file = files.enter_context(self.open(name, self._identity(facts, subject)))
        ids = [item.id for item in subject.items]
        title = f"{subject.title}, {level} at a time on {facts.title}"
        note_resumed(self.call, title, file.answered(ids), len(ids), file.path)
        try:
            server_run.measure(session, subject, file, self.options)
        except OSError as error:
            raise cannot_write(file.path, error) from error
        return Side(facts, file, server_figures.of_file(file, ids))

    def _identity(self, facts: ServerFacts, subject: Subject) -> dict[str, Any]:
        """What results may be put together: the same server as far as it reports itself, prompts and settings."""
        from dflash_local import __version__
        from dflash_local.bench.tasks.server_report import server_identity

        return {
            "task": subject.name,
            "data": dict(subject.data),
            "pair": self.pair.name,
            "drafter": self.drafter,
            "server": server_identity(facts),
            "concurrency": self.options.concurrency,
            "max_new_tokens": self.options.max_new_tokens,
            "thinking": self.options.thinking,
            "program": __version__,
        }


def server_bench(
    call: Invocation,
    served: ServerBench,
    named: tuple[str, str | None],
    load: LoadConfig,
    asked: TaskBench,
    think: bool | None,
    chosen: ChosenPrompts,
) -> tuple[dict[str, Any], list[str]]:
    """Answer what is not answered yet: the report and its lines.

    Args:
        named: model and drafter. chosen: the prompts of a pair, and their name, where no tasks are asked for.
    """
    model, drafter = named
    source = origin(call, model, drafter, load, served)
    pair = source.pair
    thinking = call.thinks(pair, think)
    folder, subjects = results_folder(call, asked), _subjects(call, asked, pair, chosen)
    servers = _servers(call, served, source, drafter)
    from dflash_local.bench.tasks import card_table, server_report
    from dflash_local.bench.tasks.server_results import LoopFile
    from dflash_local.bench.tasks.server_run import LoopOptions

    usual = TOKENS if asked.tasks is not None else PROMPT_TOKENS
    length = usual if asked.max_new_tokens is None else asked.max_new_tokens
    settings = server_report.Settings(length, thinking)
    published = _published(call, model, drafter)

    def held(name: str, identity: dict[str, Any]) -> AbstractContextManager[LoopFile]:
        return LoopFile.held(folder, name, identity, fresh=asked.resume is False)

    cases = [(subject, level) for subject in subjects for level in served.levels()]
    sides: list[list[Side]] = [[] for _ in cases]
    facts: list[ServerFacts] = []
    with ExitStack() as files, call.console.progress() as line:
        for opened in servers:
            with opened() as session:
                facts.append(session.facts)
                for (subject, level), found in zip(cases, sides):
                    options = LoopOptions(level, length, thinking, line)
                    found.append(Run(call, pair, drafter, options, held).side(files, session, subject))
    measured = [
        server_report.Measured(
            subject,
            level,
            found[0],
            found[1] if len(found) > 1 else None,
            card_table.cells(published, subject.name, (facts[0].block_size,), level),
        )
        for (subject, level), found in zip(cases, sides)
    ]
    plain_facts = facts[1] if len(facts) > 1 else None
    report = server_report.server_report(pair, facts[0], plain_facts, measured, settings)
    return report, server_report.server_lines(pair, facts[0], plain_facts, measured, settings)


def _servers(call: Invocation, served: ServerBench, source: Origin, drafter: str | None) -> list[Opened]:
    """The server that drafts and then the plain one, where there is one; launched ones are launched when opened.

    Raises:
        UsageError: one of them is what the other should be. DFlashError: one that runs does not answer.
    """
    from dflash_local.app.two_servers import ServersInTurn, TwoServers, require_drafts

    pair, user, notify, server = source.pair, call.user, call.console.notify, source.server
    assert server is not None
    if not isinstance(server, EngineServer):
        both = ServersInTurn(server.program, server.extra, drafter)
        return [partial(both.launched, pair, user, notify, drafts) for drafts in (True, False)]
    if served.plain_url is not None:
        both_running = TwoServers(server, served.plain_url, drafter).attached(pair, user, notify)
        return [partial(_running, session) for session in both_running]
    alone = server.session(pair, drafter, user, notify)
    require_drafts(alone.facts)
    return [partial(_running, alone)]


def _running(session: ServerSession) -> AbstractContextManager[ServerSession]:
    return nullcontext(session)


def _subjects(call: Invocation, asked: TaskBench, pair: Pair, chosen: ChosenPrompts) -> list[Subject]:
    from dflash_local.bench.tasks.server_run import Subject
    from dflash_local.bench.tasks.table import Item

    if asked.tasks is not None:
        found = []
        for task, data, items in fetched(call, asked):
            known = {name: value for name, value in asdict(data).items() if name != "recorded_at"}
            note = f"; {task.note}" if task.note else ""
            where = f"{data.path} of {data.repo} at {data.commit}, sha256 {data.sha256}, {task.split}{note}"
            found.append(Subject(task.name, task.title, items, known, where))
        return found
    name, prompts = chosen(pair)
    if any(prompt.ids for prompt in prompts):
        raise UsageError(f"{name} gives prompts as token ids", "a server gets text: give them as prompt")
    items = tuple(Item(str(place), (prompt.text,)) for place, prompt in enumerate(prompts, 1))
    whole = json.dumps([asdict(item) for item in items]).encode()
    digest = hashlib.sha256(whole).hexdigest()
    identity = {"prompts": name, "sha256": digest}
    return [Subject("prompts", "Prompts", items[: asked.limit], identity, f"{name} prompts, sha256 {digest}")]


def _published(call: Invocation, model: str, drafter: str | None) -> Sequence[Published]:
    """What the registry has of the pair; nothing of one that only the server knows."""
    try:
        row = choose(model, drafter, call.user, draft=False).drafter_row
    except UnknownModelError:
        return ()
    return row.published if row is not None else ()
