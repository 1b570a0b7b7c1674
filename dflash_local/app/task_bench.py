"""Tasks of the model cards, or a list of prompts, answered by a loaded pair or by servers: a kept result each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local import __version__
from dflash_local.app.loading import engine_session
from dflash_local.app.notices import Notify, progress_of
from dflash_local.bench import provenance
from dflash_local.bench.prompts import Prompt
from dflash_local.bench.report import Found, Progress, header, opening
from dflash_local.bench.tasks import card_table, figures, report, table
from dflash_local.bench.tasks.results import ResultsFile
from dflash_local.bench.tasks.table import Item, Subject, TaskOptions
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.row import Published
from dflash_local.errors import UsageError
from dflash_local.events import Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.settings import Settings
from dflash_local.store import datasets
from dflash_local.store.hub import Hub

if TYPE_CHECKING:
    from dflash_local.remote.openai_server import OpenAIServer
    from dflash_local.remote.server_checks import ServerFacts

OpenServer = Callable[[], "AbstractContextManager[OpenAIServer]"]


@dataclass(frozen=True, slots=True)
class TaskBench:
    """What is measured, beside the pair.

    Attributes:
        folder: of the results. fresh: forget what an earlier run left. published: of the pair, by the registry.
    """

    subjects: tuple[Subject, ...]
    options: TaskOptions
    folder: Path
    fresh: bool
    published: tuple[Published, ...]

    def open(
        self, files: ExitStack, subject: Subject, name: str, title: str, identity: Mapping[str, Any], notify: Notify
    ) -> ResultsFile:
        """Open one side's results, as their only writer; says what need not be measured again."""
        whole = {
            **identity,
            "task": subject.name,
            "data": dict(subject.data),
            "program": __version__,
            **asdict(self.options),
        }
        file = files.enter_context(ResultsFile.locked(self.folder, name, whole, self.fresh))
        done = file.answered(item.id for item in subject.items)
        if done:
            notify(Notice(f"{title}: {done} of {len(subject.items)} prompts are answered in {file.path}"))
        return file


def fetch_subjects(names: str, limit: int | None, accept_new: bool, user: Settings, notify: Notify) -> list[Subject]:
    """Have the tasks' data, all of them before a model is loaded.

    Raises:
        UsageError: an unknown task. DownloadError: data that cannot be had, or are not what they should be.
    """
    hub, store = Hub.of(user), datasets.DataStore.of(user)
    found = []
    for task in table.chosen(names):
        try:
            data, raw = datasets.fetch(
                hub,
                store,
                task.repo,
                task.file,
                task.limit,
                accept_new=accept_new,
                check=partial(task.items, limit=limit),
                notify=lambda text: notify(Notice(text, "warning")),
            )
        except OSError as error:
            raise UsageError(f"{task.repo} cannot be kept: {error.strerror or error}", "free some space") from error
        known = {name: value for name, value in asdict(data).items() if name != "recorded_at"}
        note = f"; {task.note}" if task.note else ""
        where = f"{data.path} of {data.repo} at {data.commit}, sha256 {data.sha256}, {task.split}{note}"
        found.append(Subject(task.name, task.title, task.items(raw, limit), known, where))
    return found


def prompts_subject(name: str, prompts: Sequence[Prompt], limit: int | None) -> Subject:
    """Make a subject of prompts that are of no task. UsageError: some of them are token ids."""
    if any(prompt.ids for prompt in prompts):
        raise UsageError(f"{name} gives prompts as token ids", "a server gets text: give them as prompt")
    items = tuple(Item(str(place), (prompt.text,)) for place, prompt in enumerate(prompts, 1))
    digest = hashlib.sha256(json.dumps([asdict(item) for item in items]).encode()).hexdigest()
    data = {"prompts": name, "sha256": digest}
    return Subject("prompts", "Prompts", items[:limit], data, f"{name} prompts, sha256 {digest}")


def bench_tasks(
    pair: Pair, load: LoadConfig, asked: TaskBench, block_sizes: Sequence[int], user: Settings, notify: Notify
) -> Found:
    """Load the pair and answer what is not answered yet, plain and with each block size.

    Args:
        block_sizes: none is the trained one.
    """
    with engine_session(pair, load, user, notify) as session, ExitStack() as files:
        from dflash_local.bench.tasks import run

        facts = session.facts
        blocks = (*(block_sizes or (facts.block_size,)), run.PLAIN)
        measured = []
        for subject in asked.subjects:
            sides = {}
            for block in blocks:
                title = f"{subject.title}, {f'block {block}' if block else 'plain'}"
                known = _identity(facts, pair, load, block)
                sides[block] = asked.open(files, subject, f"{pair.name}-{subject.name}", title, known, notify)
            run.measure(session, subject, sides, asked.options, progress_of(notify))
            ids = [item.id for item in subject.items]
            of = {block: figures.of_file(file, ids, alone=True) for block, file in sides.items()}
            plain = report.Side("plain", sides[run.PLAIN], of[run.PLAIN])
            cells = card_table.cells(asked.published, subject.name, blocks[:-1])
            for block in blocks[:-1]:
                drafted = report.Side(f"DFlash, block {block}", sides[block], of[block], block)
                below = cells if block == blocks[-2] else ()  # published rows stand once, below those of all blocks
                measured.append(report.MeasuredTask(subject, 1, drafted, plain, below))
        head = {**header("dflash bench --tasks", pair, facts), "block_sizes": list(blocks[:-1])}
        how = f": {facts.engine} engine, {facts.formats} on {facts.device}, block {', '.join(map(str, blocks[:-1]))}"
        return report.presented(head, f"{how}, one request at a time", pair, measured, asked.options)


def _identity(facts: SessionFacts, pair: Pair, load: LoadConfig, block: int) -> dict[str, Any]:
    """Name what results may be put together: the same models, load and device; the data and settings come to it.

    Args:
        load: as asked for: a context that was not is what fitted at the time, and says nothing.
    """
    drafted = {"drafter": asdict(provenance.checkpoint_identity(pair.drafter))} if block and pair.drafter else {}
    return {
        **drafted,
        "target": asdict(provenance.checkpoint_identity(pair.target)),
        "load": {**asdict(facts.load), "context": load.context},
        "weights": facts.weights,
        "gpus": provenance.machine()["gpus"],
        "block_size": block,
    }


def bench_servers(
    pair: Pair,
    drafter: str | None,
    servers: Sequence[OpenServer],
    levels: Sequence[int],
    asked: TaskBench,
    notify: Notify,
    progress: Progress,
) -> Found:
    """Answer what is not answered yet, so many requests at a time.

    Args:
        drafter: that was named. servers: the one that drafts and then the plain one, where there is one.
    """
    from dflash_local.bench.tasks import server_run

    cases = [(subject, level) for subject in asked.subjects for level in levels]
    sides: list[list[report.Side]] = [[] for _ in cases]
    facts: list[ServerFacts] = []
    with ExitStack() as files:
        for opened, title in zip(servers, ("DFlash", "plain"), strict=False):
            with opened() as session:
                facts.append(session.facts)
                for (subject, level), found in zip(cases, sides, strict=True):
                    known: dict[str, Any] = {"pair": pair.name, "drafter": drafter, "concurrency": level}
                    known["server"] = server_identity(session.facts)
                    name = f"{pair.name}-{subject.name}-{session.facts.program}-{level}"
                    what = f"{subject.title}, {level} at a time on {session.facts.title}"
                    file = asked.open(files, subject, name, what, known, notify)
                    options = server_run.LoopOptions(asked.options.max_new_tokens, asked.options.thinking, level)
                    server_run.measure(session, subject, file, options, progress)
                    numbers = figures.of_file(file, [item.id for item in subject.items])
                    found.append(report.Side(title, file, numbers, session.facts.block_size))
    drafting, plain = facts[0], facts[1] if len(facts) > 1 else None
    measured = []
    for (subject, level), (drafted, *other) in zip(cases, sides, strict=True):
        cells = card_table.cells(asked.published, subject.name, (drafting.block_size,), level)
        measured.append(report.MeasuredTask(subject, level, drafted, other[0] if other else None, cells))
    head = {
        **opening("dflash bench --url", pair.name, pair.toy),
        "server": server_identity(drafting),
        "plain_server": None if plain is None else server_identity(plain),
        "notices": [*drafting.notices, *(plain.notices if plain is not None else ())],
    }
    how = f" on {drafting.title}, block {drafting.block_size or 'not known'}"
    how += "" if plain is None else f", plain on {plain.title}"
    return report.presented(head, how, pair, measured, asked.options)


def server_identity(facts: ServerFacts) -> dict[str, Any]:
    """Name what tells one server's figures from another's: all that it reports of itself, without its address."""
    names = ("program", "version", "served", "drafts", "drafter", "method", "block_size", "context")
    return {{"served": "model"}.get(name, name): getattr(facts, name) for name in names}
