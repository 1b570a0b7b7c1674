"""The last measurement of a pair on this machine as a line that others can be shown: ``catalog.reports``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.catalog.reports import CardReport
from dflash_local.errors import UsageError
from dflash_local.load_config import BALANCED, gpus_named
from dflash_local.planner.cards import file_stem, names_together
from dflash_local.schema import InvalidValue, convert
from dflash_local.store.kept import keep, read_kept
from dflash_local.store.paths import MEASURED

if TYPE_CHECKING:
    from dflash_local.settings import Settings

BENCH, RANDOM, CERTIFICATE = "dflash bench", "dflash bench --weights random", "dflash certify"
MEASURE = "dflash bench MODEL measures one of the registry"
# What a certificate has in common with the measurement that it stands beside; a context may be another one.
SAME = ("row", "target", "drafter", "machine", "versions", "engine", "dtype", "weights")


def keep_measured(content: dict[str, Any], text: str, user: Settings) -> None:
    """Keep the text of a report in the place of the last one of its kind; nothing where that is impossible."""
    if user.cache_dir is not None:
        keep(_file(user.cache_dir, content["report"]), text)


def card_report(user: Settings) -> CardReport:
    """Make the line of the last bench, with the certificate of the same load if the last one is that.

    Raises:
        UsageError: there is no bench, or not of a pair that others know, or without speeds.
    """
    found = [(_last(user, BENCH), _released), (_last(user, RANDOM), _random)]
    made = [(content, figures) for content, figures in found if content is not None]
    if not made:
        raise UsageError("no bench of this machine is kept", MEASURE)
    content, figures = max(made, key=lambda each: str(each[0].get("created")))
    if content.get("row") is None:
        raise UsageError("the last bench is of no pair of the registry", MEASURE)
    if content.get("adapted"):
        hint = "dflash bench MODEL --no-adaptation measures it as it was published"
        raise UsageError("the last bench is of a drafter that dflash adapt has taught", hint)
    try:
        load = content.get("load", content)  # random weights have their few options beside the rest
        return convert(
            {
                "date": content["created"][:10],
                "card": _card(content),
                "driver": content["machine"]["driver"],
                "pair": content["row"],
                "engine": content["engine"],
                "format": load.get("quantize") or content["stored"] or content["dtype"],
                "exact": load["exact"],
                "versions": {name: version for name, version in content["versions"].items() if version},
                **figures(content),
                "certificate": _certificate(content, user),
            },
            CardReport,
        )
    except (LookupError, TypeError, ValueError) as error:
        problem = error if isinstance(error, InvalidValue) else "it is damaged"
        raise UsageError(f"the last bench makes no report: {problem}", MEASURE) from error


def _released(content: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of replies."""
    *kinds, whole = content["rows"]
    return {
        "weights": "released",
        "context": content["load"]["context"],
        **_speeds(whole),
        "tasks": [{"task": row["kind"], **_speeds(row)} for row in kinds or [whole]],
        "accepted": [_rounded(share) for share in whole["acceptance_per_position"]],
    }


def _speeds(row: dict[str, Any]) -> dict[str, float]:
    return {"plain": _rounded(row["ar_tokens_per_s"]), "drafted": _rounded(row["dflash_tokens_per_s"])}


def _rounded(figure: float) -> float:
    return float(f"{figure:.6g}")


def _random(content: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the first context."""
    at = content["measured"]["at"][0]
    step, cycle = at["ar_step"]["ms"], at["cycle"].get(str(content["block_size"]))
    steps = None if cycle is None else _rounded(cycle["ms"] / step)
    return {"weights": "random", "context": at["context"], "plain": _rounded(1e3 / step), "cycle_steps": steps}


def _card(content: dict[str, Any]) -> str:
    """Name the card as its driver does, or the processor."""
    machine, device = content["machine"], content["device"]
    names = [gpu["name"] for gpu in machine["gpus"]]
    if device != BALANCED and not gpus_named(device):
        return str(machine["processor"])
    return names_together([str(names[index]) for index in gpus_named(device) or range(len(names))])


def _certificate(content: dict[str, Any], user: Settings) -> dict[str, Any] | None:
    """Return the digest of the last certificate; None where there is none of the same pair and load."""
    found = _last(user, CERTIFICATE)
    if found is None or user.cache_dir is None:
        return None

    def told(report: dict[str, Any]) -> list[Any]:
        load = {**report.get("load", {}), "context": None}
        return [load, *(report.get(name) for name in SAME)]

    if told(found) != told(content):
        return None
    digest = hashlib.sha256(_file(user.cache_dir, CERTIFICATE).read_bytes()).hexdigest()
    return {"sha256": digest, "strength": found["strength"]}


def _last(user: Settings, kind: str) -> dict[str, Any] | None:
    path = None if user.cache_dir is None else _file(user.cache_dir, kind)
    return read_kept(path, lambda content: {**content})


def _file(cache: Path, kind: str) -> Path:
    return cache / MEASURED / f"{file_stem(kind)}.json"
