"""What somebody with a card and no MODEL in mind could talk to: what is on this disk, the best pair, the small one.

Shapes come from the registry and from headers of files; nothing is loaded or downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_local.app.default_model import SMALL, is_here, small_pair
from dflash_local.app.fitting import shapes
from dflash_local.app.models import install_status, model_store, registry
from dflash_local.app.recommending import Summary, row_summary, summary
from dflash_local.app.resolve import choose, size_gib
from dflash_local.errors import DFlashError
from dflash_local.tables import GIB, amount, gib, rate

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.planner.machine import Machine
    from dflash_local.settings import Settings

MOST_FILES = 8  # whose headers are read: a large vocabulary takes a quarter of a second
FLUENT = 20.0  # tokens/s that the best pair for a card should write at least
LINE_MBIT_S = 100.0  # that minutes are told for


@dataclass(frozen=True, slots=True)
class Offer:
    """Names a pair that could be talked to: what commands take as MODEL, where it is and how it fits."""

    model: str
    text: str


def offers(user: Settings, where: Machine) -> tuple[Offer, ...]:
    """List what can be talked to: what is on this disk, then the pair worth a download, then the small one.

    Raises:
        SettingsError: the registry cannot be read.
    """
    here = [*_rows_here(user, where), *_files_here(user, where)]
    picked = None if user.hub.offline else _pick(user, where, {offer.model for offer in here})
    return (*here, *([picked] if picked is not None else []), *_small(user))


def _rows_here(user: Settings, where: Machine) -> Iterator[Offer]:
    store = model_store(user)
    for row in registry(user).rows:
        if row.bundled or row.bundled_drafter or not row.runs_here or install_status(row, store).state != "local":
            continue
        found = row_summary(row, where, user)
        if found.best is not None:
            yield Offer(row.name, f"on this disk, {_how(found)}")


def _files_here(user: Settings, where: Machine) -> Iterator[Offer]:
    """Return offer GGUF files whose architecture a drafter of the registry is made for, the largest first."""
    from dflash_local.store.gguf_here import gguf_here

    for file in sorted(gguf_here(user), key=lambda file: -file.size)[:MOST_FILES]:
        with suppress(DFlashError):  # a file that cannot be read is no offer
            choice, store = choose(str(file.path), None, user), model_store(user)
            if choice.base is None or store is None:
                continue
            found = summary(choice, shapes(choice, store), where, user, variants=False)
            if found.best is not None:
                size = gib(size_gib(choice, ("drafter",)))
                drafter = "" if is_here(choice, user) else f", its drafter {size} to download"
                text = f"{file.name} of {file.program}, {amount(file.size)}{drafter}, {_how(found)}"
                yield Offer(str(file.path), text)


def _pick(user: Settings, where: Machine, here: set[str]) -> Offer | None:
    """Return pick the largest target that fits a card with its drafter and writes fluently; None where that is here."""
    row, best = next(iter(best_first(user, lambda row: row_summary(row, where, user))), (None, None))
    if row is None or best is None or not _fluent(best) or row.name in here or row.bundled_drafter:
        return None
    text = f"the largest that fits: {gib(best.download_gib, best.computed)} to download"
    if best.download_gib is not None:
        minutes = best.download_gib * GIB * 8 / (LINE_MBIT_S * 1e6) / 60
        text += f", about {max(1, round(minutes))} min at {LINE_MBIT_S:g} Mbit/s"
    return Offer(row.name, f"{text}, {_how(best)}")


def best_first(user: Settings, sum_up: Callable[[Row], Summary]) -> list[tuple[Row, Summary]]:
    """List the pairs that fit: those that write fluently, the largest target first; then the others, the fastest first.

    Raises:
        SettingsError: the registry cannot be read.
    """

    def order(found: tuple[Row, Summary]) -> tuple[bool, float]:
        row, one = found
        fluent = _fluent(one)
        return not fluent, -(_parameters(row) if fluent or one.tokens_per_s is None else one.tokens_per_s)

    rows = [row for row in registry(user).rows if not row.bundled and row.runs_here and not row.gated]
    return sorted((found for row in rows if (found := (row, sum_up(row)))[1].best is not None), key=order)


def _fluent(found: Summary) -> bool:
    return (found.tokens_per_s or 0.0) >= FLUENT


def _parameters(row: Row) -> int:
    from dflash_local.catalog.shapes import shape

    known: dict[str, Any] = (shape(row.target.id) if row.target is not None else None) or {}
    count = known.get("_sizes", {}).get("text_params")
    return count if isinstance(count, int) else 0


def _how(found: Summary) -> str:
    context, speed = found.best.plan.context if found.best else None, found.tokens_per_s
    room = "" if context is None else f" with {context:,} tokens of context"
    return f"{found.fits}{room}" + ("" if speed is None else f", about {rate(speed)} tokens/s")


def _small(user: Settings) -> Iterator[Offer]:
    choice = small_pair(user)
    if choice is not None and is_here(choice, user):
        yield Offer(SMALL, "try now: a small real model, on this disk")
    elif choice is not None and not user.hub.offline:
        yield Offer(SMALL, f"try now: a small real model, {gib(size_gib(choice, choice.roles))} to download")
