"""The six tasks, each described once: where its data are, and how a record becomes turns.

Prompts are those of the drafters' own benchmark program (z-lab/dflash, ``dflash/benchmark.py``) unless a task's note
gives another source. What is published as Parquet alone is taken from a copy of the same records as JSON, which the
task's note names: nothing that is installed with this program reads Parquet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dflash_local.bench.tasks.records import REFUSED, Form, TaskRecord, read
from dflash_local.bench.tasks.results import TaskReply
from dflash_local.errors import DownloadError, UsageError
from dflash_local.request import Message

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLUTION = "Write a solution to the following problem and make sure that it passes the tests:"
MIB = 2**20
Conversation = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a task. ``turns``: user messages, each sent after the reply to the one before."""

    id: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a task of the cards, or a list of prompts.

    Attributes:
        data: what its prompts are, JSON-able. origin: the same in a line.
    """

    name: str
    title: str
    items: tuple[Item, ...]
    data: Mapping[str, Any]
    origin: str


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What is run on every prompt."""

    max_new_tokens: int
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One data set and what is done with it.

    Attributes:
        title: as the cards spell it. repo, file, form: where its records are. split: which of them are meant.
        limit: the most bytes that the file may have.
        prompts: taken when nobody says how many: the first of the file, all where it has no more.
        item: a record as a prompt; None for one of another split.
        note: where prompts or data differ from the cards' program.
    """

    name: str
    title: str
    repo: str
    file: str
    form: Form
    split: str
    limit: int
    prompts: int
    item: Callable[[TaskRecord], Item | None]
    note: str = ""

    def items(self, raw: bytes, limit: int | None) -> tuple[Item, ...]:
        """The first prompts of the file's bytes, in its order.

        Raises:
            DownloadError: the file or one of these records is not what it should be, or none is of the split.
        """
        where = f"{self.file} of {self.repo}"
        found = (item for record in read(raw, self.form, where) if (item := self.item(record)) is not None)
        items = tuple(islice(found, self.prompts if limit is None else limit))
        if not items:
            raise DownloadError(f"{where} holds no prompts", REFUSED)
        if len({item.id for item in items}) < len(items):
            raise DownloadError(f"{where} holds two records of one id", REFUSED)
        return items


def converse(item: Item, ask: Callable[[Conversation], TaskReply]) -> tuple[TaskReply, ...]:
    """Send each user message of a prompt after the replies to those before."""
    messages: Conversation = ()
    replies = []
    for text in item.turns:
        messages = (*messages, Message("user", text))
        replies.append(ask(messages))
        messages = (*messages, Message("assistant", replies[-1].text))
    return tuple(replies)


def _gsm8k(record: TaskRecord) -> Item:
    return Item(record.where.rpartition(" ")[2], (record.text("question") + STEP_BY_STEP,))


def _math500(record: TaskRecord) -> Item:
    return Item(record.identity("unique_id"), (record.text("problem") + STEP_BY_STEP,))


def _humaneval(record: TaskRecord) -> Item:
    return Item(record.identity("task_id"), (f"{SOLUTION}\n```python\n{record.text('prompt')}\n```",))


def _mbpp(record: TaskRecord) -> Item | None:
    """The test split of MBPP is ids 11 to 510."""
    if not 11 <= record.number("task_id") <= 510:
        return None
    return Item(record.identity("task_id"), (record.text("prompt"),))


def _mt_bench(record: TaskRecord) -> Item:
    return Item(record.identity("question_id"), record.texts("turns"))


def _alpaca(record: TaskRecord) -> Item:
    instruction, given = record.text("instruction"), record.text("input", required=False)
    turn = f"{instruction}\n\nInput:\n{given}" if given.strip() else instruction
    return Item(record.where.rpartition(" ")[2], (turn,))


_ROWS = (
    Task(
        "gsm8k",
        "GSM8K",
        "DaertML/gsm8k-jsonl",
        "test.jsonl",
        "jsonl",
        "test",
        4 * MIB,
        128,
        _gsm8k,
        "data: a copy of openai/gsm8k (main), which is Parquet alone",
    ),
    Task(
        "math500",
        "Math500",
        "HuggingFaceH4/MATH-500",
        "test.jsonl",
        "jsonl",
        "test",
        4 * MIB,
        128,
        _math500,
    ),
    Task(
        "humaneval",
        "HumanEval",
        "bigcode/humanevalpack",
        "data/python/data/humanevalpack.jsonl",
        "jsonl",
        "test",
        8 * MIB,
        164,
        _humaneval,
        "data: the Python part of HumanEvalPack, whose prompts are those of openai/openai_humaneval (Parquet "
        "alone) with some corrections",
    ),
    Task(
        "mbpp",
        "MBPP",
        "Muennighoff/mbpp",
        "data/sanitized-mbpp.json",
        "json",
        "test (ids 11 to 510)",
        4 * MIB,
        128,
        _mbpp,
        "data: a copy of google-research-datasets/mbpp (sanitized), which is Parquet alone",
    ),
    Task(
        "mt-bench",
        "MT-Bench",
        "HuggingFaceH4/mt_bench_prompts",
        "raw/question.jsonl",
        "jsonl",
        "train",
        4 * MIB,
        80,
        _mt_bench,
    ),
    Task(
        "alpaca",
        "Alpaca",
        "yahma/alpaca-cleaned",
        "alpaca_data_cleaned.json",
        "json",
        "train",
        64 * MIB,
        128,
        _alpaca,
        "data: a cleaned copy of tatsu-lab/alpaca, which is Parquet alone; the form of the prompt is ours",
    ),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _ROWS}


def chosen(names: str) -> tuple[Task, ...]:
    """The tasks of ``gsm8k,math500``, each once, in the order given.

    Raises:
        UsageError: one of them is unknown, or there is none.
    """
    words = [word.strip().lower() for word in names.split(",") if word.strip()]
    unknown = [word for word in words if word not in TASKS]
    if unknown or not words:
        what = f"--tasks: {unknown[0]!r} is unknown" if unknown else "--tasks names no task"
        raise UsageError(what, f"one or several of {','.join(TASKS)}")
    return tuple(TASKS[word] for word in dict.fromkeys(words))
