"""The six tasks, each described once: where its data are, how a record becomes turns, how its answer is scored.

Prompts are those of the drafters' own benchmark program (z-lab/dflash, ``dflash/benchmark.py``) unless a task's note
gives another source. What is published as Parquet alone is taken from a copy of the same records as JSON, which the
task's note names: nothing that is installed with this program reads Parquet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from dflash_local.bench.tasks.records import REFUSED, Form, Record, read
from dflash_local.bench.tasks.scoring import Scoring, math_gold, number_gold
from dflash_local.errors import DownloadError, UsageError

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLUTION = "Write a solution to the following problem and make sure that it passes the tests:"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a task.

    Attributes:
        turns: user messages, each sent after the reply to the one before.
        gold: the right answer, normalised; empty where none is compared.
        before: program text that stands before the reply's. tests: that must run through after it.
        entry: the function that the tests call.
    """

    id: str
    turns: tuple[str, ...]
    gold: str = ""
    before: str = ""
    tests: str = ""
    entry: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """One data set and what is done with it.

    Attributes:
        title: as the cards spell it. repo, file, form: where its records are. split: which of them are meant.
        limit: the most bytes that the file may have.
        prompts: taken when nobody says how many: the first of the file, all where it has no more.
        item: a record as a prompt; None for one of another split.
        scoring: number or mathematics: the final answer compared; tests: the reply's code run; text: the whole reply
            compared; none: nothing is right.
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
    item: Callable[[Record], Item | None]
    scoring: Scoring
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


def _gsm8k(record: Record) -> Item:
    question, answer = record.text("question"), record.text("answer")
    gold = number_gold(answer)
    if gold is None:
        raise DownloadError(f"{record.where}: answer has no number after ####", REFUSED)
    return Item(record.where.rpartition(" ")[2], (question + STEP_BY_STEP,), gold=gold)


def _math500(record: Record) -> Item:
    return Item(
        record.identity("unique_id"), (record.text("problem") + STEP_BY_STEP,), gold=math_gold(record.text("answer"))
    )


def _humaneval(record: Record) -> Item:
    prompt, entry = record.text("prompt"), _identifier(record, "entry_point")
    turn = (
        f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
    )
    tests = record.text("test")
    if f"\ncheck({entry})" not in tests:
        tests += f"\ncheck({entry})\n"
    return Item(record.identity("task_id"), (turn,), before=prompt, tests=tests, entry=entry)


def _mbpp(record: Record) -> Item | None:
    """The test split of MBPP is ids 11 to 510."""
    if not 11 <= record.number("task_id") <= 510:
        return None
    lines = (*record.texts("test_imports", required=False), *record.texts("test_list"))
    return Item(record.identity("task_id"), (record.text("prompt"),), tests="\n".join(lines) + "\n")


def _mt_bench(record: Record) -> Item:
    return Item(record.identity("question_id"), record.texts("turns"))


def _alpaca(record: Record) -> Item:
    instruction, given = record.text("instruction"), record.text("input", required=False)
    turn = f"{instruction}\n\nInput:\n{given}" if given.strip() else instruction
    return Item(record.where.rpartition(" ")[2], (turn,))


def _identifier(record: Record, name: str) -> str:
    """A field that stands in a program as a name, and must be no more than that."""
    text = record.text(name)
    if not text.isidentifier():
        raise DownloadError(f"{record.where}: {name} {ascii(text[:40])} is no name of a function", REFUSED)
    return text


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
        "number",
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
        "mathematics",
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
        "tests",
        "data: the Python part of HumanEvalPack, whose prompts and tests are those of openai/openai_humaneval "
        "(Parquet alone) with some corrections",
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
        "tests",
        "data: a copy of google-research-datasets/mbpp (sanitized), which is Parquet alone; the prompt does not name "
        "the function that the tests call: the last one of the reply stands for it",
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
        "none",
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
        "none",
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
