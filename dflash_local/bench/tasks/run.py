"""A task's prompts on one loaded session, plain and drafted, each result kept before the next prompt begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_local.bench.speed import BOTH, WARM_UP_TOKENS, Progress
from dflash_local.bench.tasks import scoring
from dflash_local.bench.tasks.results import PromptResult, Reply, ResultsFile, Turn
from dflash_local.bench.tasks.table import Item, Task
from dflash_local.bench.trial import Written, write
from dflash_local.engine.session import Session
from dflash_local.errors import DeviceLostError, DFlashError, Interrupted
from dflash_local.events import Mode
from dflash_local.request import Limits, Message, Request

RunProgram = Callable[[str], str]


@dataclass(slots=True)
class TaskOptions:
    """What is run on every prompt.

    Attributes:
        run_program: runs a whole program and returns passed, failed or timed out; None runs no code.
    """

    max_new_tokens: int
    block_size: int | None = None
    thinking: bool = False
    run_program: RunProgram | None = None
    progress: Progress = field(default=lambda _text, _fraction: None)


def measure(session: Session, task: Task, items: Sequence[Item], file: ResultsFile, options: TaskOptions) -> None:
    """Answer every prompt that ``file`` has no answer of, greedily and from cold caches.

    A prompt that fails is a result like any other, and is tried again by the next run.

    Raises:
        DeviceLostError: no further prompt can be answered. Interrupted: the user stopped it.
        OSError: a result cannot be kept.
    """
    warm = False
    for number, item in enumerate(items):
        options.progress(f"{task.title}: prompt {number + 1} of {len(items)}", number / len(items))
        found = file.results.get(item.id)
        if found is None or found.error:
            try:
                if not warm:
                    _warm_up(session, item, options)
                    warm = True
                found = PromptResult(item.id, _turns(session, item, options, BOTH if number % 2 == 0 else BOTH[::-1]))
            except (DeviceLostError, Interrupted):
                raise
            except DFlashError as error:
                file.add(PromptResult(item.id, error=f"{error.kind}: {error.message}"))
                continue
        elif not _to_score(task, found, options):
            continue
        last = found.turns[-1]
        texts: dict[Mode, str] = {"ar": last.ar.text, "dflash": last.dflash.text}
        file.add(found.scored({mode: score(task, item, text, options.run_program) for mode, text in texts.items()}))


def _to_score(task: Task, result: PromptResult, options: TaskOptions) -> bool:
    """Code that an earlier run wrote and did not run."""
    return task.scoring == "tests" and options.run_program is not None and result.turns[-1].dflash.score is None


def score(task: Task, item: Item, text: str, run_program: RunProgram | None) -> str | None:
    """Of a reply's final text: right or wrong; of code passed, failed or timed out; None where nothing is compared."""
    if task.scoring == "tests":
        if run_program is None:
            return None
        return run_program(scoring.program(text, item.before, item.tests, item.entry))
    if task.scoring == "none":
        return None
    found = scoring.number_answer(text) if task.scoring == "number" else scoring.math_answer(text)
    return "right" if found is not None and found == item.gold else "wrong"


def _warm_up(session: Session, item: Item, options: TaskOptions) -> None:
    ids = _rendered(session, (Message("user", item.turns[0]),), options)
    for mode in BOTH:
        write(session, _request(ids, mode, options, WARM_UP_TOKENS))


def _turns(session: Session, item: Item, options: TaskOptions, order: Sequence[Mode]) -> tuple[Turn, ...]:
    """Each user message after the replies to those before; drafted replies go on, as in the cards' program."""
    messages: list[Message] = []
    turns = []
    for text in item.turns:
        messages.append(Message("user", text))
        ids = _rendered(session, tuple(messages), options)
        written = {mode: write(session, _request(ids, mode, options, options.max_new_tokens)) for mode in order}
        ar, dflash = written["ar"], written["dflash"]
        turns.append(Turn(len(ids), ar.ids == dflash.ids, _reply(ar), _reply(dflash)))
        messages.append(Message("assistant", dflash.text))
    return tuple(turns)


def _rendered(session: Session, messages: tuple[Message, ...], options: TaskOptions) -> tuple[int, ...]:
    return session.render(Request(messages=messages, thinking=options.thinking)).ids


def _request(ids: tuple[int, ...], mode: Mode, options: TaskOptions, tokens: int) -> Request:
    block = options.block_size if mode == "dflash" else None
    return Request(prompt_ids=ids, limits=Limits(tokens), mode=mode, block_size=block)


def _reply(written: Written) -> Reply:
    stats = written.stats
    return Reply(
        tokens=len(written.ids),
        finish_reason=written.reason,
        acceptance_lengths=stats.acceptance_lengths,
        ttft_s=stats.ttft_s,
        prefill_s=stats.prefill_s,
        decode_s=stats.decode_s,
        tokens_per_s=stats.tokens_per_s,
        end_to_end_tokens_per_s=stats.end_to_end_tokens_per_s,
        text=written.text,
    )
