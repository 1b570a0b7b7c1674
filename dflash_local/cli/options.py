"""The options several commands share, declared once so that they mean the same everywhere."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import Annotated, Any, Literal

import typer

from dflash_local.errors import UsageError
from dflash_local.request import SamplingParams

MAX_ID_DIGITS = 10  # more than any vocabulary; Python refuses to read thousands


class ModeChoice(str, Enum):
    """How a reply is produced; the text is the same."""

    dflash = "dflash"
    ar = "ar"


class DtypeChoice(str, Enum):
    """Number format of the weights and activations."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class QuantizeChoice(str, Enum):
    """Weight formats of bitsandbytes."""

    nf4 = "nf4"
    int8 = "int8"


class EngineChoice(str, Enum):
    """Which runner does the work."""

    auto = "auto"
    fused = "fused"
    reference = "reference"


class CacheChoice(str, Enum):
    """How keys and values of the context are kept."""

    auto = "auto"
    fp8 = "fp8"


class DraftSideChoice(str, Enum):
    """What drafts are computed with; no reply changes by it."""

    auto = "auto"
    full = "full"
    eight_bit_head = "8bit-head"
    eight_bit_drafter = "8bit-drafter"
    eight_bit = "8bit"
    frequent = "frequent"
    eight_bit_frequent = "8bit-frequent"


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
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", help="Names that dflash models lists.", autocompletion=complete_model),
]
Drafter = Annotated[
    str | None, typer.Option("--drafter", metavar="FOLDER|REPO", help="The drafter's folder or repository, owner/name.")
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
Dtype = Annotated[DtypeChoice | None, typer.Option("--dtype", help="auto: float32 on a CPU, bfloat16 on a GPU.")]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N, mps, balanced (several GPUs)."),
]
Context = Annotated[
    int | None, typer.Option("--context", metavar="N", help="Tokens the session may hold; what fits if not given.")
]
NoFitCheck = Annotated[
    bool, typer.Option("--no-fit-check", help="Load even where the memory plan says that it does not fit.")
]
GpuMemory = Annotated[
    float | None,
    typer.Option("--gpu-memory", metavar="GIB", help="Plan for a GPU with this much memory instead of this machine."),
]
Gpu = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="Plan for a GPU known by name, such as 'RTX 4090'.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]
Engine = Annotated[EngineChoice | None, typer.Option("--engine", help="auto: fused on a GPU where it knows the pair.")]
Exact = Annotated[
    bool | None,
    typer.Option("--exact/--no-exact", help="The same bits with and without drafting, in any dtype; costs some speed."),
]
KvCache = Annotated[
    CacheChoice | None,
    typer.Option(
        "--kv-cache", help="fp8: half the memory a context takes; replies change, drafted and plain ones alike."
    ),
]
DraftSide = Annotated[
    DraftSideChoice | None,
    typer.Option(
        "--draft-side", help="Weights and head of the drafter; auto takes 8 bits where that is measured to pay."
    ),
]
DraftWindow = Annotated[
    int | None, typer.Option("--draft-window", metavar="N", help="Tokens the drafter looks back on; all if not given.")
]
Quantize = Annotated[
    QuantizeChoice | None, typer.Option("--quantize", help="Load the target's weights in 4 or 8 bits.")
]
AllowMismatch = Annotated[bool, typer.Option("--allow-mismatch", help="Run a pair that does not fit together.")]
Think = Annotated[bool | None, typer.Option("--think/--no-think", help="Let the model think first, where it can.")]
System = Annotated[str, typer.Option("--system", metavar="TEXT", help="The system message.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def sampling(start: SamplingParams, **given: float | int | None) -> SamplingParams:
    """The start values with those given on the command line in their place."""
    known = {field.name: getattr(start, field.name) for field in fields(start)}
    known.update({name: value for name, value in given.items() if value is not None})
    return SamplingParams(**known)


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


def value_of(choice: Enum | None) -> Any:
    """The text behind a choice, None staying None."""
    return None if choice is None else choice.value
