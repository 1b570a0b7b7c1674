"""A task's prompts on one loaded session, plain and drafted, each result kept before the next prompt begins."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflash_local.bench.speed import WARM_UP_TOKENS, Progress
from dflash_local.bench.tasks.results import PromptResult, Reply, ResultsFile, Turn
from dflash_local.bench.tasks.table import Item, Task
from dflash_local.bench.trial import Written, write
from dflash_local.engine.session import Session
from dflash_local.errors import DeviceLostError, DFlashError, Interrupted
from dflash_local.request import Limits, Message, Request

Block = int | None  # None is the trained size
PLAIN = "ar"


@dataclass(slots=True)
class TaskOptions:
    """What is run on every prompt."""

    max_new_tokens: int
    thinking: bool = False
    progress: Progress = field(default=lambda _text, _fraction: None)


def measure(
    session: Session, task: Task, items: Sequence[Item], files: Mapping[Block, ResultsFile], options: TaskOptions
) -> None:
    """Answer every prompt that a file has no answer of, greedily and from cold caches.

    The plain reply of a prompt is written once, whatever the number of blocks. A prompt that fails is a result like any
    other, and is tried again by the next run.

    Args:
        files: of each block size, whose results are kept in a file of its own.

    Raises:
        DeviceLostError: no further prompt can be answered. Interrupted: the user stopped it.
        OSError: a result cannot be kept.
    """
    warm = False
    for number, item in enumerate(items):
        options.progress(f"{task.title}: prompt {number + 1} of {len(items)}", number / len(items))
        kept = {block: file.results[item.id] for block, file in files.items() if item.id in file.results}
        missing = [block for block in files if block not in kept or kept[block].error]
        if not missing:
            continue
        try:
            if not warm:
                _warm_up(session, item, options, tuple(files))
                warm = True
            written = _turns(session, item, options, missing, _plain_of(kept), number)
            found = {block: PromptResult(item.id, turns) for block, turns in written.items()}
        except (DeviceLostError, Interrupted):
            raise
        except DFlashError as error:
            found = dict.fromkeys(missing, PromptResult(item.id, error=f"{error.kind}: {error.message}"))
        for block, result in found.items():
            files[block].add(result)


def _plain_of(kept: Mapping[Block, PromptResult]) -> PromptResult | None:
    """A result whose plain replies hold for other blocks too."""
    whole = (one for one in kept.values() if not one.error and all(turn.ar.ids for turn in one.turns))
    return next(whole, None)


def _warm_up(session: Session, item: Item, options: TaskOptions, blocks: tuple[Block, ...]) -> None:
    ids = _rendered(session, (Message("user", item.turns[0]),), options)
    for request in (_plain(ids, WARM_UP_TOKENS), *(_drafted(ids, block, WARM_UP_TOKENS) for block in blocks)):
        write(session, request)


def _turns(
    session: Session,
    item: Item,
    options: TaskOptions,
    blocks: Sequence[Block],
    known: PromptResult | None,
    number: int,
) -> dict[Block, tuple[Turn, ...]]:
    """Each user message after the replies to those before; drafted replies go on, as in the cards' program.

    Of several blocks the first one's replies go on in all, so that all answer the same prompts as the plain reply.

    Args:
        known: holds the plain replies already. number: of the prompt: which way goes first changes with it, so that a
            machine that warms up or slows down favours none.
    """
    messages: list[Message] = []
    found: dict[Block, tuple[Turn, ...]] = dict.fromkeys(blocks, ())
    runs: list[Block | str] = [*([PLAIN] if known is None else []), *blocks]
    start = number % len(runs)
    for index, text in enumerate(item.turns):
        messages.append(Message("user", text))
        ids = _rendered(session, tuple(messages), options)
        written = {}
        for run in (*runs[start:], *runs[:start]):
            tokens = options.max_new_tokens
            request = _drafted(ids, run, tokens) if not isinstance(run, str) else _plain(ids, tokens)
            written[run] = _reply(write(session, request))
        plain = written[PLAIN] if known is None else known.turns[index].ar
        for block in blocks:
            turn = Turn(len(ids), plain.ids == written[block].ids, plain, written[block])
            found[block] = (*found[block], turn)
        goes_on = written[blocks[0]] if known is None else known.turns[index].dflash
        messages.append(Message("assistant", goes_on.text))
    return found


def _rendered(session: Session, messages: tuple[Message, ...], options: TaskOptions) -> tuple[int, ...]:
    return session.render(Request(messages=messages, thinking=options.thinking)).ids


def _plain(ids: tuple[int, ...], tokens: int) -> Request:
    return Request(prompt_ids=ids, limits=Limits(tokens), mode="ar")


def _drafted(ids: tuple[int, ...], block: Block, tokens: int) -> Request:
    return Request(prompt_ids=ids, limits=Limits(tokens), block_size=block)


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
        ids=hashlib.sha256(",".join(map(str, written.ids)).encode()).hexdigest()[:16],
    )
