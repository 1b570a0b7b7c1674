"""What a target is asked for its drafter to learn from the replies: prompts as ids, each with its kind of text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dflash_local.adapt.openings import KINDS, frame_of, openings
from dflash_local.bench.trial import write
from dflash_local.engine.session import Session
from dflash_local.errors import UsageError
from dflash_local.request import Limits, Request, SamplingParams
from dflash_local.transcripts.source_conversation import HELD_OUT, SourceConversation

OWN = 4  # prompts for each question of the target's own
QUESTION = 160  # tokens of one that the target writes
MIN_P = 0.05
SEED = 1


class AskedPrompt(NamedTuple):
    """A prompt, the kind of text that its reply is counted with, a name of its conversation without any text of it, and
    whether it is never trained on.
    """

    ids: tuple[int, ...]
    kind: str
    conversation: str
    held_out: bool


def of_conversations(
    session: Session, conversations: Sequence[SourceConversation], reply: int
) -> Iterator[AskedPrompt]:
    """Yield the prompts of conversations behind which the context has room for a reply; others, and those that the
    target's template refuses, are left out.
    """
    for conversation in conversations:
        for messages in conversation.prompts:
            try:
                ids = session.render(Request(messages=messages)).ids
            except UsageError:
                continue
            if len(ids) + reply <= session.facts.context:
                yield AskedPrompt(tuple(ids), conversation.kind, conversation.digest, conversation.held_out)


def with_its_own(session: Session, asked: Iterator[AskedPrompt]) -> Iterator[AskedPrompt]:
    """Yield prompts, and before each ``OWN``-th a question of the target's own, so that a drafter does not forget what
    it knew of other text; these are a kind, whose acceptance must not fall either.
    """
    own = of_itself(session)
    for number, each in enumerate(asked):
        if number % OWN == 0:
            yield next(own)._replace(kind="its own questions")
        yield each


def of_itself(session: Session) -> Iterator[AskedPrompt]:
    """Yield questions that the target writes behind a given beginning, without end. UsageError: it has no tokenizer."""
    if session.tokenizer is None:
        raise UsageError(f"{session.facts.target} has no tokenizer", "give a target with tokenizer.json")
    frame = frame_of(session.tokenizer)
    for number, opening in enumerate(openings(session.tokenizer, SEED, greedy_share=1.0)):
        begun = (*frame.before, *opening.ids)
        if not begun:  # without a template a question begins with nothing
            continue
        sampling = SamplingParams(temperature=1.0, min_p=MIN_P, seed=number)
        written = write(session, Request(prompt_ids=begun, sampling=sampling, limits=Limits(QUESTION))).ids
        ends = (at for at, token in enumerate(written) if token in frame.special or token in frame.stop)
        question = (*opening.ids, *written[: next(ends, len(written))])
        name = hashlib.sha256(repr(question).encode())
        if question:
            ids, held = (*frame.before, *question, *frame.after), name.digest()[0] % HELD_OUT == 0
            yield AskedPrompt(ids, KINDS[opening.kind], name.hexdigest(), held)
