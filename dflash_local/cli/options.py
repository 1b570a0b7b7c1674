"""The options several commands share, declared once so that they mean the same everywhere.

How a pair is loaded is declared in ``load_config`` and made into options by ``cli.load_options``.
"""

from __future__ import annotations

from dataclasses import fields, replace
from enum import Enum
from typing import Annotated, Any, Literal

import typer

from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.request import SamplingParams

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
    """Names of models that begin so, for the shell: bundled ones and those of the registry."""
    from dflash_local.cli.completion import model_names

    return model_names(incomplete)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name that dflash models lists, or a local folder.",
        autocompletion=complete_model,
    ),
]
ModelOrDemo = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A name that dflash models lists, or a folder; demo.",
        autocompletion=complete_model,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", help="Names that dflash models lists.", autocompletion=complete_model),
]
Drafter = Annotated[
    str | None, typer.Option("--drafter", metavar="FOLDER|REPO", help="The drafter's folder or repository, owner/name.")
]
Prefer = Annotated[
    PreferenceChoice, typer.Option("--prefer", help="What comes first: finest weights, tokens/s or context.")
]
Mode = Annotated[ModeChoice, typer.Option("--mode", help="Draft and verify, or one token at a time.")]
MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", metavar="N", help="Tokens in the reply at most.")]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="T", help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Keep the K likeliest tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", help="Keep the likeliest tokens up to this mass.")]
MinP = Annotated[float | None, typer.Option("--min-p", metavar="P", help="Drop tokens under P times the likeliest.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition-penalty", metavar="X", help="Over prompt and reply; 1 is off.")
]
PresencePenalty = Annotated[
    float | None, typer.Option("--presence-penalty", metavar="X", help="Over the reply; 0 is off.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option("--frequency-penalty", metavar="X", help="Over the reply; 0 is off.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="0 to 2^64-1; a fresh one if not given, shown.")]
BlockSize = Annotated[
    int | None,
    typer.Option("--block-size", metavar="B", help="Anchor and drafts per cycle; trained size if not given."),
]
GpuMemory = Annotated[
    float | None,
    typer.Option("--gpu-memory", metavar="GIB", help="Plan for a GPU with this much memory instead of this machine."),
]
Gpu = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="Plan for a GPU known by name, such as 'RTX 4090'.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]
Think = Annotated[bool | None, typer.Option("--think/--no-think", help="Let the model think first, where it can.")]
System = Annotated[str, typer.Option("--system", metavar="TEXT", help="The system message.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def sampling(start: SamplingParams, **given: float | int | None) -> SamplingParams:
    """The start values with those given on the command line in their place."""
    known = {field.name: getattr(start, field.name) for field in fields(start)}
    known.update({name: value for name, value in given.items() if value is not None})
    return SamplingParams(**known)


def drafting(load: LoadConfig, mode: ModeChoice) -> LoadConfig:
    """How a pair is loaded for replies of a mode."""
    return replace(load, draft=mode is ModeChoice.dflash)


def mode_name(mode: ModeChoice) -> Literal["dflash", "ar"]:
    """The mode as events and requests spell it."""
    return "ar" if mode is ModeChoice.ar else "dflash"


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids from ``1,2,3``.

    Raises:
        UsageError: an entry is not a whole number.
    """
    ids: list[int] = []
    for word in text.replace(",", " ").split():
        if not (word.isascii() and word.isdigit() and len(word) <= MAX_ID_DIGITS):
            raise UsageError(f"--prompt-ids: {word!r} is not a token id", "give whole numbers such as 1,2,3")
        ids.append(int(word))
    if not ids:
        raise UsageError("--prompt-ids is empty", "give whole numbers such as 1,2,3")
    return tuple(ids)


def first(*values: Any) -> Any:
    """The first value that was given."""
    return next(value for value in values if value is not None)
