"""What a check found: a JSON file each in the cache folder, for a pair as loaded, a card, a driver and versions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash_local.bench import provenance
from dflash_local.bench.report import finite
from dflash_local.catalog.bundled import Pair
from dflash_local.check.findings import Finding, Subject, worst
from dflash_local.json_text import parse_json
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from dflash_local.loaded import Verdict
from dflash_local.store.kept import keep, read_kept
from dflash_local.store.paths import CHECKS

SCHEMA = 1
KEYS = "drafter_keys.json"  # beside the reports: what loads are to know of drafters, by the state of their files


@dataclass(frozen=True, slots=True)
class Report:
    """A check. ``loaded_as`` in words; ``checked`` is ISO 8601 in UTC."""

    model: str
    loaded_as: str
    checked: str
    seconds: float
    findings: tuple[Finding, ...]
    remembered: bool = False

    @property
    def good(self) -> bool:
        """True when nothing is to be said against the pair: only such a report stands for a new check."""
        return worst(self.findings) in ("ok", "skipped")

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(each.verdict for each in self.findings)

    def of(self, subject: Subject) -> Report:
        """With the findings on one subject alone."""
        return replace(self, findings=tuple(each for each in self.findings if each.subject == subject))

    @property
    def notices(self) -> tuple[str, ...]:
        """A line on each finding that is not good."""
        doubts = (each for each in self.findings if each.state in ("warning", "failed"))
        return tuple(f"check of the {each.subject}: {each.text} ({each.state}; {each.remedy})" for each in doubts)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; figures that are not finite are None."""
        own = asdict(self)
        findings = [each.as_dict() for each in self.findings]
        found: dict[str, Any] = finite({**own, "state": worst(self.findings), "findings": findings})
        return found


def facts_of(pair: Pair, load: LoadConfig) -> dict[str, Any]:
    """All that a report holds for, JSON-able: files, load, machine, versions. CheckpointError: an unreadable file."""
    machine = provenance.machine()
    return {
        "schema": SCHEMA,
        "pair": pair.name,
        "thinking": pair.thinking,
        "acceptance_band": pair.acceptance_band,
        **pair_files(pair),
        "load": {name: getattr(load, name) for name, option in LOAD_OPTIONS.items() if option.compared},
        "machine": {name: machine[name] for name in ("processor", "gpus", "cuda", "driver")},
        "versions": provenance.versions(),
    }


def pair_files(pair: Pair) -> dict[str, Any]:
    """Return what tells one state of a pair's files from another. CheckpointError: an unreadable file."""
    return {"files": [_files(path) for path in (pair.target, pair.drafter) if path is not None]}


def _files(path: Path) -> dict[str, Any]:
    """What tells one state of a checkpoint from another without reading its weights."""
    files = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if file.is_file()]
    times = {file.name: file.stat().st_mtime_ns for file in files}
    return {**asdict(provenance.checkpoint_identity(path)), "changed": times}


def path_of(cache: Path | None, facts: dict[str, Any]) -> Path | None:
    """Where the report of these facts lies; None without a cache folder."""
    return cache / CHECKS / f"{digest(facts)}.json" if cache is not None else None


def digest(facts: dict[str, Any]) -> str:
    """Return a name for all that facts say."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def remembered(path: Path | None) -> Report | None:
    """What was found before; None where there is nothing that can be read."""
    if path is None:
        return None
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        findings = tuple(Finding(**each) for each in content.pop("findings"))
        content.pop("state")
        return Report(**{**content, "findings": findings, "remembered": True})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(path: Path | None, report: Report) -> None:
    """Keep a report; nothing is kept where that is impossible."""
    if path is not None:
        keep(path, json.dumps(report.as_dict(), indent=1) + "\n")


def remember_keys(path: Path | None, pair: Pair, report: Report) -> None:
    """Keep what was measured of the drafter and its config.json does not say, in the place of what was before.

    Args:
        path: of the report.
    """
    for keys in (each.figures["drafter_keys"] for each in report.findings if "drafter_keys" in each.figures):
        if path is not None and pair.drafter is not None:
            file, state = path.with_name(KEYS), digest(_files(pair.drafter))
            entries = read_kept(file, dict) or {}
            if entries.pop(state, {}) != keys:
                keep(file, json.dumps({**entries, **({state: keys} if keys else {})}, indent=1) + "\n")


def measured_keys(cache: Path, drafter: Path) -> dict[str, Any]:
    """What was measured of a drafter; empty where nothing was. CheckpointError: an unreadable file."""
    entries = read_kept(cache / CHECKS / KEYS, dict)
    return dict(entries.get(digest(_files(drafter)), {})) if entries else {}
