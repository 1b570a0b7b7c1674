"""The options several commands share, declared once so that they mean the same everywhere.

How a pair is loaded is declared in ``load_config`` and made into options by ``cli.load_options``.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dflash_local import settings
from dflash_local.cli.help_pages import MORE
from dflash_local.errors import DFlashError, UsageError
from dflash_local.load_config import LoadConfig

MAX_ID_DIGITS = 10  # more than any vocabulary; Python refuses to read thousands


class ModeChoice(str, Enum):
    """How a reply is produced; the text is the same."""

    dflash = "dflash"
    ar = "ar"


class PreferenceChoice(str, Enum):
    """What a plan puts first."""

    balanced = "balanced"
    quality = "quality"
    speed = "speed"
    context = "context"


def complete_model(incomplete: str) -> list[str]:
    """Return for the shell bundled pairs, targets, aliases and, when none fits, bare names; in any case of letters.

    What was typed stays as it was, since shells only add to it. Nothing but the bundled ones when the registry cannot
    be read.
    """
    from dflash_local.app.models import registry
    from dflash_local.catalog.bundled import BUNDLED

    try:
        rows = registry(settings.load()).rows
    except DFlashError:
        rows = ()
    names = [*BUNDLED, *(row.name for row in rows), *(alias for row in rows for alias in row.aliases)]
    found = _beginning(incomplete, names)
    return found or _beginning(incomplete, [name.partition("/")[2] for name in names])


def _beginning(start: str, names: list[str]) -> list[str]:
    matching = (name for name in names if name and name.lower().startswith(start.lower()))
    return list(dict.fromkeys(start + name[len(start) :] for name in matching))


def named(flag: str, metavar: str, help: str, panel: str | None = None) -> Any:
    """Return an option that takes a value. ``panel``: of the help, see ``help_pages``."""
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel)


def _model(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete_model)


Model = Annotated[str, _model("MODEL", "A name that dflash models lists, a folder or a GGUF file.")]
ModelOrNone = Annotated[
    str | None, _model("[MODEL]", "A name that dflash models lists, a folder or a GGUF file; --from needs none.")
]
ModelOrDefault = Annotated[
    str | None,
    _model(
        "[MODEL]",
        "A name that dflash models lists, a folder or a GGUF file; else smollm2 where it is here, a toy, or what the "
        "server at --url has.",
    ),
]
Models = Annotated[list[str], _model("MODEL", "Names that dflash models lists.")]
Drafter = Annotated[
    str | None,
    named(
        "--drafter",
        "FOLDER|REPO",
        "A folder or owner/name; mtp is the target's own layer, lookup copies what the text repeats.",
    ),
]
FromFolder = Annotated[
    Path | None,
    named(
        "--from",
        "FOLDER",
        "Plan for your own turns: those of coding agents, Open WebUI or dflash in it.",
    ),
]
Prefer = Annotated[
    PreferenceChoice,
    typer.Option("--prefer", help="What comes first: finest weights, tokens/s or context.", rich_help_panel=MORE),
]
Mode = Annotated[ModeChoice, typer.Option("--mode", help="ar is plain: one token at a time.")]
MaxNewTokens = Annotated[int | None, named("--max-new-tokens", "N", "Tokens in the reply at most.")]
Temperature = Annotated[float | None, named("--temperature", "T", "0 is greedy.")]
Seed = Annotated[int | None, named("--seed", "N", "-2^63 to 2^64-1; a fresh one if not given, shown.", MORE)]
BlockSize = Annotated[
    int | None, named("--block-size", "B", "Anchor and drafts per cycle; trained size if not given.", MORE)
]
# What a command's parameter ``sampling`` stands for on the command line: it gets those that were given.
SAMPLING: dict[str, Any] = {
    "temperature": Temperature,
    "top_k": Annotated[int | None, named("--top-k", "K", "Keep the K likeliest tokens; 0 is off.", MORE)],
    "top_p": Annotated[float | None, named("--top-p", "P", "Keep the likeliest tokens up to this mass.", MORE)],
    "min_p": Annotated[float | None, named("--min-p", "P", "Drop tokens under P times the likeliest.", MORE)],
    "repetition_penalty": Annotated[
        float | None, named("--repetition-penalty", "X", "Over prompt and reply; 1 is off.", MORE)
    ],
    "presence_penalty": Annotated[float | None, named("--presence-penalty", "X", "Over the reply; 0 is off.", MORE)],
    "frequency_penalty": Annotated[float | None, named("--frequency-penalty", "X", "Over the reply; 0 is off.", MORE)],
    "seed": Seed,
}
GpuMemory = Annotated[float | None, named("--gpu-memory", "GIB", "Plan for a typical GPU of this size.")]
Gpu = Annotated[str | None, named("--gpu", "NAME", "Plan for a GPU known by name, such as 'RTX 4090'.")]
SeveralGpu = Annotated[
    list[str] | None, named("--gpu", "NAME", "Plan for a GPU known by name, such as 'RTX 4090'; given twice, for two.")
]
Gpus = Annotated[
    int,
    typer.Option(
        "--gpus", metavar="N", min=1, max=64, help="So many GPUs of --gpu or --gpu-memory.", rich_help_panel=MORE
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes", metavar="N", min=2, max=64, help="The server commands for N machines alike, one line for each."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]
Think = Annotated[bool | None, typer.Option("--think/--no-think", help="Let the model think first, where it can.")]
System = Annotated[str, named("--system", "TEXT", "The system message.")]
Details = Annotated[
    bool, typer.Option("--details", help="Every row of memory, every format and variant, speeds by context.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=MORE)]


def drafting(load: LoadConfig, mode: ModeChoice) -> LoadConfig:
    """Return how a pair is loaded for replies of a mode."""
    return replace(load, draft=mode is ModeChoice.dflash)


def mode_name(mode: ModeChoice) -> Literal["dflash", "ar"]:
    """Return the mode as events and requests spell it."""
    return "ar" if mode is ModeChoice.ar else "dflash"


def parse_ids(text: str) -> tuple[int, ...]:
    """Return the token ids from ``1,2,3``; UsageError where an entry is not a whole number."""
    ids: list[int] = []
    for word in text.replace(",", " ").split():
        if not (word.isascii() and word.isdigit() and len(word) <= MAX_ID_DIGITS):
            raise UsageError(f"--prompt-ids: {word!r} is not a token id", "give whole numbers such as 1,2,3")
        ids.append(int(word))
    if not ids:
        raise UsageError("--prompt-ids is empty", "give whole numbers such as 1,2,3")
    return tuple(ids)


def first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
