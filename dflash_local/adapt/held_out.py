"""What a drafter does for prompts that nothing was learnt from: tokens and cycles of its replies to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dflash_local.adapt.asked import AskedPrompt
from dflash_local.adapt.gain import HeldOut
from dflash_local.bench.report import Progress
from dflash_local.bench.trial import write
from dflash_local.engine.session import Session
from dflash_local.request import Limits, Request, SamplingParams

REPLY = 256  # tokens of a reply at most
MEASURED = 48  # prompts whose cycles are counted
TEMPERATURE = 0.8


class Measured(NamedTuple):
    """What the drafter does for held-out conversations."""

    conversations: list[HeldOut]
    tokens_per_s: float


def chosen(prompts: Sequence[AskedPrompt]) -> list[AskedPrompt]:
    """Return those that are measured: the first of each conversation, then the second ones, and so on. Conversations
    differ more than what is asked in one does.
    """
    seen = Counter[str]()
    turns = list[int]()
    for each in prompts:
        turns.append(seen[each.conversation])
        seen[each.conversation] += 1
    return [prompts[at] for at in sorted(range(len(prompts)), key=turns.__getitem__)][:MEASURED]


def measure(session: Session, prompts: Sequence[AskedPrompt], progress: Progress) -> Measured:
    """Count tokens and cycles of a greedy and a sampled reply to each prompt, and tokens a second of all.

    What one conversation's prompts gain is alike, so they are counted as one, by kind of text.
    """
    counted = dict[tuple[str, str], HeldOut]()
    written, seconds = 0, 0.0
    block = session.facts.block_size
    for number, prompt in enumerate(prompts):
        progress(f"held-out replies, {number + 1} of {len(prompts)}", number / len(prompts))
        lengths = list[int]()
        for sampling in (SamplingParams(), SamplingParams(temperature=TEMPERATURE, seed=number)):
            request = Request(prompt_ids=tuple(prompt.ids), sampling=sampling, limits=Limits(REPLY), block_size=block)
            found = write(session, request)
            lengths += found.stats.acceptance_lengths
            written += len(found.ids)
            seconds += found.stats.decode_s
        _, tokens, cycles = counted.get(of := (prompt.kind, prompt.conversation), (prompt.kind, 0, 0))
        counted[of] = HeldOut(prompt.kind, tokens + sum(lengths), cycles + len(lengths))
    return Measured(list(counted.values()), written / max(seconds, 1e-9))
