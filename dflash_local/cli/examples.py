"""The prompts that the first screens offer: what the pair can do, so that the first reply is a good one."""

from __future__ import annotations

from dflash_local.bench.prompts import built_in
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.demo import built_in_prompt

TOY = (  # of the topics that the toys were taught; ``tests`` hold the right answers
    "Count from 3 to 7.",
    "Put these words in order: pear, apple, melon, fig.",
    "Make a table of name and score: Anna 70, Ben 94, Ida 15.",
)


def examples(pair: Pair) -> tuple[str, ...]:
    """Prompts to try with a pair, a longer one first, which a race can show something with."""
    return (built_in_prompt(), *TOY) if pair.toy else tuple(prompt.text for prompt in built_in())
