"""What people measured on their cards, shipped in ``reports/``: a file for each card, of one JSON object a line."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from dflash_local.catalog.row import MAX_BLOCK, NAME, Sha256
from dflash_local.errors import SettingsError
from dflash_local.json_text import parse_json
from dflash_local.schema import InvalidValue, Record, convert

FOLDER = Path(__file__).with_name("reports")
MAX_LINE = 8192  # characters
RANDOM = "random"

# Neither a slash, so that no path is in a row, nor anything that Markdown or HTML would read.
_WORDS = Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,:()@+_-]{0,79}$", description="up to 80 letters, digits and .,:()@+_-")
_PAIR = Meta(pattern=rf"^(?:{NAME}/)?{NAME}$", description="a pair of the registry, as owner/name")
_DATE = Meta(pattern=r"^20\d\d-[01]\d-[0-3]\d$", description="a date, as 2026-11-30")
Words = Annotated[str, _WORDS]
Speed = Annotated[float, Meta(ge=0.001, le=1e6)]  # tokens a second
Share = Annotated[float, Meta(ge=0, le=1)]


class TaskSpeed(Record, frozen=True):
    """Tokens a second of one kind of text."""

    task: Words
    plain: Speed
    drafted: Speed


class CertificateDigest(Record, frozen=True):
    """The certificate of the same load: the digest of its file, and the promise that held; None after a bug."""

    sha256: Sha256
    strength: Literal["strict", "identical", "fast"] | None


class CardReport(Record, frozen=True, kw_only=True):
    """One pair measured on one card.

    Attributes:
        weights: random ones have their pair's shapes and write no text, so that nothing is drafted or certified.
        format: as ``Plan.format``. context: tokens that the session could hold; of random weights those before a step.
        plain, drafted: tokens a second over all that was written. cycle_steps: what a drafted cycle of random weights
            takes, in plain steps. accepted: share of the drafts of each position that were right.
    """

    schema: Literal[1] = 1
    date: Annotated[str, _DATE]
    card: Words
    driver: Words | None
    pair: Annotated[str, _PAIR]
    weights: Literal["released", "random"]
    engine: Words
    format: Words
    exact: bool
    context: Annotated[int, Meta(ge=1, le=2**30)]
    plain: Speed
    drafted: Speed | None = None
    cycle_steps: Annotated[float, Meta(ge=0.1, le=1000)] | None = None
    tasks: Annotated[tuple[TaskSpeed, ...], Meta(max_length=32)] = ()
    accepted: Annotated[tuple[Share, ...], Meta(max_length=MAX_BLOCK)] = ()
    certificate: CertificateDigest | None = None
    versions: Annotated[dict[Words, Words], Meta(max_length=16)]


def read_report(line: str, place: str) -> CardReport:
    """Read one line of a file.

    Args:
        place: of the line, for errors.

    Raises:
        SettingsError: it is no report.
    """
    try:
        if len(line) > MAX_LINE:
            raise InvalidValue("", f"has {len(line):,} characters, at most {MAX_LINE:,} are read")
        return convert(parse_json(line), CardReport)
    except InvalidValue as error:
        raise SettingsError(f"{place}: {error}", error.hint or "dflash doctor --row writes such a line") from None
    except ValueError as error:
        raise SettingsError(f"{place} is no JSON: {error}", "dflash doctor --row writes such a line") from None


@cache
def reports(folder: Path = FOLDER) -> tuple[CardReport, ...]:
    """Read every line of every file. SettingsError: one is no report."""
    return tuple(
        read_report(line, f"{file.name} line {number}")
        for file in sorted(folder.glob("*.jsonl"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    )
