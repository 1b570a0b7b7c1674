"""``dflash cards``: for usual sizes of GPU memory, which pairs run, in which form, and how fast."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError

Memory = Annotated[
    float | None, typer.Option("--gpu-memory", metavar="GIB", help="Only the card of the table with so much memory.")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="As a page of docs.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cards")(cards)


def cards(
    gpu_memory: Memory = None,
    prefer: opt.Prefer = opt.PreferenceChoice.balanced,
    markdown: Markdown = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Say which pairs run on which card, with which weights and context, at which predicted speed."""
    from dflash_local.app.cards import CARDS, card_tables
    from dflash_local.ui import card_text

    call = Invocation.begin()
    chosen = [card for card in CARDS if gpu_memory is None or round(card[1]) == round(gpu_memory)]
    if not chosen:
        sizes = ", ".join(f"{round(gib)}" for _, gib in CARDS)
        raise UsageError(
            f"--gpu-memory {gpu_memory:g} is none of the table's", f"it has {sizes}; dflash plan takes any"
        )
    tables = card_tables(call.user, chosen, prefer.value)
    if as_json:
        found = [{"machine": each.machine.as_dict(), "pairs": [row.as_dict() for row in each.rows]} for each in tables]
        call.console.json({"cards": found})
        return
    lines = card_text.markdown(tables) if markdown else card_text.lines(tables, call.console.columns)
    for line in lines:
        call.console.data(line)
