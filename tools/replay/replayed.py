"""Reads a report of another machine: versions, failed kernels, plans then and now, memory; nothing in it is trusted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from dflash_local.app.fitting import Shapes
from dflash_local.errors import DFlashError
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from dflash_local.planner import software
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import plan

KINDS = ("cuda", "mps", "cpu", "named")
MAX_BYTES = 2**50
MEMORY_FIGURES = ("planned_bytes", "peak_bytes")  # of the check's finding on the card
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


class Unreadable(Exception):
    """An entry that is not what it should be."""


def replayed(parts: Mapping[str, Any], known: Callable[[str], Shapes | None]) -> dict[str, Any]:
    """What a report holds and what this version makes of it, JSON-able; ``known`` gives a model's shapes, or None."""
    main = _mapping(parts.get("report"))
    versions = {str(name): version for name, version in _mapping(main.get("versions")).items()}
    others = {
        name: {"reported": version, "measured": ".".join(map(str, measured))}
        for name, (version, measured) in software.not_measured(versions).items()
    }
    plans = [replanned(entry, known) for entry in _entries(parts.get("plans"))]
    return {
        "created": main.get("created"),
        "versions": versions,
        "machine": main.get("machine"),
        "load_options": main.get("load_options"),
        "problems": [check for check in _entries(parts.get("doctor")) if check.get("status") == "problem"],
        "not_measured": others if _mapping(main.get("machine")).get("gpus") else {},
        "plans": plans,
        "memory": list(memory(parts, plans)),
        "kernels": list(failed_kernels(parts)),
        "check": parts.get("check"),
        "errors": _entries(parts.get("errors")),
    }


def replanned(entry: Mapping[str, Any], known: Callable[[str], Shapes | None]) -> dict[str, Any]:
    """A reported plan made again for the reported memory; ``changes``: (name, then, now), ledger lines in bytes."""
    model = entry.get("model")
    answer: dict[str, Any] = {"model": model, "then": entry.get("error"), "now": None, "changes": []}
    try:
        if entry.get("error"):
            raise Unreadable(f"it was not planned there: {entry['error']}")
        then = _mapping(entry.get("plan"))
        shapes = known(model) if isinstance(model, str) and _MODEL.fullmatch(model) else None
        if shapes is None:
            raise Unreadable("its shape is not known here")
        found = plan(shapes.target, shapes.drafter, _machine(entry, then), _load(entry))
    except (Unreadable, DFlashError) as error:
        return {**answer, "then": None, "error": str(error)}
    now = {**found.as_dict(), "format": found.format}
    return {**answer, "then": _brief(then), "now": _brief(now), "changes": list(_changes(then, now))}


def memory(parts: Mapping[str, Any], plans: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Bytes that torch's allocator held at most on the card of each checked pair, by plan, by this version's plan."""
    for check in _entries(parts.get("check")):
        found = [_mapping(each.get("figures")) for each in _entries(check.get("findings"))]
        planned, peak = (next((each[name] for each in found if name in each), None) for name in MEMORY_FIGURES)
        if not _is_size(planned) or not _is_size(peak) or not planned:
            continue
        same = (each["now"] for each in plans if each["model"] == check.get("model") and _peak(each["then"]) == planned)
        off, replanned = round(peak / planned - 1, 4), next(map(_peak, same), None)
        yield {"model": check.get("model"), "planned": planned, "peak": peak, "off": off, "replanned": replanned}


def _peak(brief: Any) -> Any:
    return _mapping(brief).get("peak")


def failed_kernels(parts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Kernels with another verdict than ``right``, each with what tries it again on such a card."""
    plans = _entries(parts.get("plans"))
    models = [entry.get("model") for entry in plans if _mapping(entry.get("plan")).get("engine") == "fused"]
    model = next((name for name in models if isinstance(name, str) and _MODEL.fullmatch(name)), "MODEL")
    for card in _entries(parts.get("kernels")):
        for name, verdict in _mapping(card.get("failed")).items():
            place = {"card": card.get("card"), "capability": card.get("capability")}
            yield {
                **place,
                "kernel": name,
                "verdict": verdict,
                "command": f"dflash check {model} --only kernels --again",
            }


def _machine(entry: Mapping[str, Any], then: Mapping[str, Any]) -> Machine:
    recorded = _mapping(then.get("machine"))
    kind, memory, free = recorded.get("kind"), recorded.get("memory"), recorded.get("free")
    if kind not in KINDS or not _is_size(memory) or not _is_size(free):
        raise Unreadable("the report tells no machine for it")
    name, device = str(recorded.get("name", ""))[:100], str(recorded.get("device", "auto"))[:20]
    kernels, compiler = entry.get("kernels") is not False, entry.get("compiler") is not False
    return Machine(name, kind, memory, free, "as reported", device, kernels=kernels, compiler=compiler)


def _load(entry: Mapping[str, Any]) -> LoadConfig:
    requested = _mapping(entry.get("asked"))
    try:
        return LoadConfig(**{name: requested[name] for name in LOAD_OPTIONS if name in requested})
    except (TypeError, ValueError) as error:
        raise Unreadable("its options are not known here") from error


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES


def _brief(found: Mapping[str, Any]) -> dict[str, Any]:
    names = ("fits", "engine", "format", "context", "drafter_precision", "offload")
    ledger = _mapping(found.get("ledger"))
    return {**{name: found.get(name) for name in names}, "total": ledger.get("total"), "peak": ledger.get("peak")}


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    before, after = _brief(then), _brief(now)
    yield from ((name, before[name], after[name]) for name in before if before[name] != after[name])
    before, after = _lines(then), _lines(now)
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def _lines(found: Mapping[str, Any]) -> dict[str, Any]:
    ledger = _mapping(found.get("ledger"))
    lines = (*_entries(ledger.get("lines")), *_entries(ledger.get("host")))
    return {str(line.get("name")): line.get("bytes") for line in lines}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _entries(value: Any) -> Sequence[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
