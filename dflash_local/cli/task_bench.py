"""``dflash bench --tasks``: the cards' tasks on this machine, a result kept for every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.catalog.bundled import Pair
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.request import check_integer

if TYPE_CHECKING:
    from dflash_local.bench.tasks.results import ResultsFile
    from dflash_local.bench.tasks.run import RunProgram, TaskOptions
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
        resume: False forgets what an earlier run left. out: the folder of the results; None is the user's data folder.
    """

    tasks: str | None
    limit: int | None
    max_new_tokens: int | None
    block_size: int | None
    run_code: bool
    resume: bool | None
    accept_new_data: bool
    out: Path | None

    def check(self, fidelity: bool, prompts: str | None) -> None:
        """Raises UsageError for options that do not go together."""
        own = {
            "--run-code": self.run_code,
            "--resume" if self.resume else "--no-resume": self.resume is not None,
            "--out": self.out is not None,
            "--accept-new-data": self.accept_new_data,
        }
        given = next((name for name, value in own.items() if value), "")
        if self.tasks is None and given:
            raise UsageError(f"{given} is for --tasks", "name tasks, such as --tasks gsm8k")
        if self.tasks is not None and (fidelity or prompts is not None):
            raise UsageError(
                f"--tasks does not go with {'--fidelity' if fidelity else '--prompts'}", "give one of them"
            )
        if self.tasks is not None:
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
    run_program, isolation = _sandbox(asked, [task for task, _, _ in data])
    published = row.published if row is not None else ()
    length = TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
    with call.session(pair, load) as session:
        from dflash_local.bench.tasks import figures, task_report
        from dflash_local.bench.tasks.results import ResultsFile
        from dflash_local.bench.tasks.run import TaskOptions

        block = asked.block_size or session.facts.block_size
        settings = task_report.Settings(block, length, thinking, isolation)
        measured = []
        with call.console.progress() as line:
            options = TaskOptions(length, asked.block_size, thinking, run_program, line)
            for task, file, items in data:
                known = identity(session.facts, pair, load, task, file, settings)
                kept = ResultsFile(folder, f"{pair.name}-{task.name}", known, fresh=asked.resume is False)
                done = sum(item.id in kept.results and not kept.results[item.id].error for item in items)
                if done:
                    call.console.note(f"{task.title}: {done} of {len(items)} prompts are answered in {kept.path}")
                _answer(session, task, items, kept, options)
                results = tuple(kept.results[item.id] for item in items)
                cells = task_report.cells(published, task, block)
                numbers = figures.of_results(results)
                measured.append(task_report.Measured(task, file, results, numbers, cells, str(kept.path)))
    report = task_report.task_report(pair, session.facts, measured, settings)
    return report, task_report.task_lines(pair, session.facts, measured, settings)


def _answer(session: Session, task: Task, items: Sequence[Item], kept: ResultsFile, options: TaskOptions) -> None:
    from dflash_local.bench.tasks import run

    try:
        run.measure(session, task, items, kept, options)
    except OSError as error:
        raise UsageError(
            f"{kept.path} cannot be written: {error.strerror}", "run it again: it goes on there"
        ) from error


def identity(
    facts: SessionFacts, pair: Pair, load: LoadConfig, task: Task, data: DataFile, settings: Settings
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
        "target": asdict(provenance.folder_identity(pair.target)),
        "drafter": asdict(provenance.folder_identity(pair.drafter)) if pair.drafter else None,
        "load": {**asdict(facts.load), "context": load.context},
        "weights": facts.weights,
        "gpus": provenance.machine()["gpus"],
        "program": __version__,
        "block_size": settings.block_size,
        "max_new_tokens": settings.max_new_tokens,
        "thinking": settings.thinking,
    }


def _sandbox(asked: TaskBench, tasks: list[Task]) -> tuple[RunProgram | None, str | None]:
    """What runs code, and what shuts that off; nothing unasked."""
    if not asked.run_code or not any(task.scoring == "tests" for task in tasks):
        return None, None
    from dflash_local.bench.tasks import sandbox

    return (lambda program: sandbox.run(program).outcome), sandbox.isolation()
