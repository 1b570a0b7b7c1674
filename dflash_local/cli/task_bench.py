"""``dflash bench --tasks``: the cards' tasks on this machine, a result kept for every prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.catalog.bundled import Pair
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.request import MAX_BLOCK_SIZE, check_integer

if TYPE_CHECKING:
    from dflash_local.bench.tasks.results import ResultsFile
    from dflash_local.bench.tasks.run import Block, TaskOptions
    from dflash_local.bench.tasks.table import Item, Task
    from dflash_local.bench.tasks.task_report import Settings
    from dflash_local.catalog.row import Row
    from dflash_local.engine.session import Session
    from dflash_local.store.datasets import DataFile

MAX_LIMIT = 100_000
TOKENS = 2048  # as the drafters' benchmark program


@dataclass(frozen=True, slots=True)
class TaskBench:
    """What was asked for, beside the pair and whether it thinks.

    Attributes:
        tasks: their names; None measures prompts instead, and the options of tasks alone are refused.
        block_sizes: each of them is measured; none is the trained one.
        resume: False forgets what an earlier run left. out: the folder of the results; None is the user's data folder.
    """

    tasks: str | None
    limit: int | None
    max_new_tokens: int | None
    block_sizes: tuple[int, ...]
    resume: bool | None
    accept_new_data: bool
    out: Path | None

    def check(self, fidelity: bool, prompts: str | None, server: bool = False) -> None:
        """Raises UsageError for options that do not go together; ``server``: prompts are measured on one."""
        if server and fidelity:
            raise UsageError("--fidelity compares weights that are loaded here", "leave the server out")
        if server and self.block_sizes:
            raise UsageError("--block-size: a server decides that when it is started", "leave it out")
        own = {
            "--resume" if self.resume else "--no-resume": self.resume is not None,
            "--out": self.out is not None,
            "--accept-new-data": self.accept_new_data,
        }
        given = next((name for name, value in own.items() if value), "")
        if self.tasks is None and given and not (server and given in ("--resume", "--no-resume", "--out")):
            raise UsageError(f"{given} is for --tasks", "name tasks, such as --tasks gsm8k")
        if self.tasks is None and len(self.block_sizes) > 1:
            raise UsageError("--block-size is given more than once", "several go with --tasks")
        for size in self.block_sizes:
            check_integer("block_size", size, 1, MAX_BLOCK_SIZE)
        if self.tasks is not None and (fidelity or prompts is not None):
            raise UsageError(
                f"--tasks does not go with {'--fidelity' if fidelity else '--prompts'}", "give one of them"
            )
        if self.tasks is not None or server:
            check_limit(self.limit)


def check_limit(limit: int | None) -> None:
    """Raises UsageError for a number of prompts that cannot be one."""
    if limit is not None:
        check_integer("limit", limit, 1, MAX_LIMIT)


def fetched(call: Invocation, asked: TaskBench) -> list[tuple[Task, DataFile, tuple[Item, ...]]]:
    """The tasks with their data, all of them before a model is loaded.

    Raises:
        UsageError: an unknown task. DownloadError: data that cannot be had, or are not what they should be.
    """
    from dflash_local.bench.tasks import table
    from dflash_local.store import datasets
    from dflash_local.store.hub import Hub

    tasks, hub, store = table.chosen(asked.tasks or ""), Hub.of(call.user), datasets.DataStore.of(call.user)
    found = []
    for task in tasks:
        try:
            data, raw = datasets.fetch(
                hub,
                store,
                task.repo,
                task.file,
                task.limit,
                accept_new=asked.accept_new_data,
                check=partial(task.items, limit=asked.limit),
                notify=call.console.warn,
            )
        except OSError as error:
            raise UsageError(f"{task.repo} cannot be kept: {error.strerror or error}", "free some space") from error
        found.append((task, data, task.items(raw, asked.limit)))
    return found


def results_folder(call: Invocation, asked: TaskBench) -> Path:
    """Where results go. Raises UsageError without a home folder or a name."""
    if asked.out is not None:
        return asked.out.expanduser()
    if call.user.data_dir is None:
        raise UsageError("there is no home folder to keep results in", "name a folder with --out")
    return call.user.data_dir / "bench"


def task_bench(
    call: Invocation, row: Row | None, pair: Pair, load: LoadConfig, asked: TaskBench, thinking: bool
) -> tuple[dict[str, Any], list[str]]:
    """Fetch the data, load the pair, answer what is not answered yet: the report and its lines.

    Args:
        row: of the registry, that describes the drafter.
    """
    folder, data = results_folder(call, asked), fetched(call, asked)
    published = row.published if row is not None else ()
    length = TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
    with call.session(pair, load) as session, ExitStack() as files:
        from dflash_local.bench.tasks import card_table, figures, task_report
        from dflash_local.bench.tasks.results import ResultsFile
        from dflash_local.bench.tasks.run import TaskOptions

        asked_blocks: tuple[Block, ...] = asked.block_sizes or (None,)
        blocks = {block: block or session.facts.block_size for block in asked_blocks}
        settings = task_report.Settings(tuple(blocks.values()), length, thinking)
        measured = []
        with call.console.progress() as line:
            options = TaskOptions(length, thinking, line)
            for task, file, items in data:
                kept: dict[Block, ResultsFile] = {}
                for block, size in blocks.items():
                    known = identity(session.facts, pair, load, task, file, settings, size)
                    held = ResultsFile.held(folder, f"{pair.name}-{task.name}", known, fresh=asked.resume is False)
                    kept[block] = files.enter_context(held)
                    done = kept[block].answered(item.id for item in items)
                    note_resumed(call, f"{task.title}, block {size}", done, len(items), kept[block].path)
                _answer(session, task, items, kept, options)
                cells = card_table.cells(published, task.name, settings.block_sizes)
                for block, own in kept.items():
                    results = tuple(own.results[item.id] for item in items)
                    numbers, path = figures.of_results(results), str(own.path)
                    one = task_report.Measured(task, blocks[block], file, results, numbers, cells, path)
                    measured.append(one)
    report = task_report.task_report(pair, session.facts, measured, settings)
    return report, task_report.task_lines(pair, session.facts, measured, settings)


def note_resumed(call: Invocation, title: str, done: int, prompts: int, path: Path) -> None:
    """Say what need not be measured again."""
    if done:
        call.console.note(f"{title}: {done} of {prompts} prompts are answered in {path}")


def _answer(
    session: Session, task: Task, items: Sequence[Item], kept: Mapping[Block, ResultsFile], options: TaskOptions
) -> None:
    from dflash_local.bench.tasks import run

    try:
        run.measure(session, task, items, kept, options)
    except OSError as error:
        raise cannot_write(next(iter(kept.values())).path, error) from error


def cannot_write(path: Path, error: OSError) -> UsageError:
    """The error of a disk that takes no more results."""
    return UsageError(f"{path} cannot be written: {error.strerror}", "run it again: it goes on there")


def identity(
    facts: SessionFacts,
    pair: Pair,
    load: LoadConfig,
    task: Task,
    data: DataFile,
    settings: Settings,
    block_size: int,
) -> dict[str, Any]:
    """What results may be put together: the same models, data, settings, program and device.

    Args:
        load: as asked for: a context that was not is what fitted at the time, and says nothing.
    """
    from dflash_local import __version__
    from dflash_local.bench import provenance

    return {
        "task": task.name,
        "data": {name: value for name, value in asdict(data).items() if name != "recorded_at"},
        "target": asdict(provenance.checkpoint_identity(pair.target)),
        "drafter": asdict(provenance.checkpoint_identity(pair.drafter)) if pair.drafter else None,
        "load": {**asdict(facts.load), "context": load.context},
        "weights": facts.weights,
        "gpus": provenance.machine()["gpus"],
        "program": __version__,
        "block_size": block_size,
        "max_new_tokens": settings.max_new_tokens,
        "thinking": settings.thinking,
    }
