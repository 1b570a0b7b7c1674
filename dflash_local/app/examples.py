"""The prompts that the first screens offer: what the pair can do, so that the first reply is a good one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_local.catalog.bundled import EXAMPLES, HELD_OUT, Pair

if TYPE_CHECKING:
    from dflash_local.bench.prompts import Prompt

FALLBACK_PROMPT = "Write a Python function that returns the sum of a list of numbers."
TOY = "toy pair: first-run material, not a speed claim"
TOY_PROMPTS = (  # of the topics that the toys were taught; ``tests`` hold the right answers
    "Count from 3 to 7.",
    "Put these words in order: pear, apple, melon, fig.",
    "Make a table of name and score: Anna 70, Ben 94, Ida 15.",
)


def built_in_prompt() -> str:
    """Read the prompt of the demonstration."""
    try:
        prompts = json.loads(EXAMPLES.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return FALLBACK_PROMPT
    prompt = prompts.get("demo") if isinstance(prompts, dict) else None
    return prompt if isinstance(prompt, str) and prompt.strip() else FALLBACK_PROMPT


def examples(pair: Pair) -> tuple[str, ...]:
    """List prompts to try with a pair, a longer one first, which a race can show something with."""
    from dflash_local.bench.prompts import built_in

    return (built_in_prompt(), *TOY_PROMPTS) if pair.toy else tuple(prompt.text for prompt in built_in())


def bench_prompts(pair: Pair) -> Sequence[Prompt]:
    """List a few prompts to measure a pair with; a toy knows only what it was taught, so its own are held out ones."""
    from dflash_local.bench.prompts import a_few, built_in, held_out

    return a_few(held_out(HELD_OUT)) if pair.toy else built_in()
