"""One request on a session from cold caches, gathered: ids, cycles, text and figures; and its prompt as ids."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.bench.prompts import Prompt
from dflash_local.engine.runner import ScoringTarget
from dflash_local.engine.session import Session
from dflash_local.errors import EngineError, UsageError
from dflash_local.events import Finished, FinishReason, Notice, Stats, Step
from dflash_local.request import Request, user_request


@dataclass(frozen=True, slots=True)
class CycleShape:
    """One cycle: rows verified, drafts proposed and accepted (uncut), tokens it emitted (after any cut)."""

    rows: int
    drafted: int
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True)
class Written:
    """A finished reply. The first token belongs to no cycle. ``text`` is the final channel, "" without tokenizer."""

    ids: tuple[int, ...]
    cycles: tuple[CycleShape, ...]
    text: str
    reason: FinishReason
    stats: Stats
    notices: tuple[str, ...]


def prompt_ids(session: Session, prompt: Prompt, thinking: bool) -> tuple[int, ...]:
    """The prompt as the model sees it, through the chat template when it is text. UsageError: there is no tokenizer."""
    if prompt.ids:
        return prompt.ids
    if session.tokenizer is None:
        raise UsageError(f"{session.facts.target} has no tokenizer", "give token ids: --prompt-ids 1,2,3")
    return session.render(user_request(prompt.text, thinking=thinking)).ids


def scored_target(session: Session) -> ScoringTarget:
    """What texts are scored with. UsageError: the target is in another process."""
    target = session.runner.target
    if target is None:
        raise UsageError(f"{session.facts.target} is not in this process", "texts are scored with the target itself")
    return target


def write(session: Session, request: Request) -> Written:
    """Answer the request from cold caches."""
    session.reset()
    return go_on(session, request)


def go_on(session: Session, request: Request) -> Written:
    """Answer the request from the caches as they are."""
    ids: list[int] = []
    cycles: list[CycleShape] = []
    pieces: list[str] = []
    notices: list[str] = []
    finished: Finished | None = None
    for event in session.generate(request):
        if isinstance(event, Step):
            ids += event.token_ids
            pieces += [piece.text for piece in event.pieces if piece.channel == "final"]
            if event.rows:
                cycles.append(CycleShape(event.rows, event.drafted, event.accepted, len(event.token_ids)))
        elif isinstance(event, Notice):
            notices.append(event.message)
        elif isinstance(event, Finished):
            finished = event
    if finished is None:
        raise EngineError("the engine ended a reply without saying why")
    return Written(tuple(ids), tuple(cycles), "".join(pieces), finished.reason, finished.stats, tuple(notices))
