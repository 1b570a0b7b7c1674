"""Which engine a load on a card begins with, after a load that ended the whole program: one step slower each time.

A marker lies in the folder while a load is under way. One whose process is dead shows a load that never ended: by
a fault of the driver, the system's out-of-memory killer, or a hang that was killed. Knows files and options of a load,
no engines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dflash_local.json_text import parse_json
from dflash_local.load_config import FUSED, LOAD_OPTIONS, REFERENCE, LoadConfig
from dflash_local.store.kept import keep
from dflash_local.store.owner import Owner

PLAIN = "plain"  # the reference engine without a drafter
STEPS = (FUSED, REFERENCE, PLAIN)  # the fastest first
RECORD = "steps.json"
MARKERS = "loading-*.json"
STALE_S = 24 * 3600.0  # a marker of another machine or container, whose process cannot be seen
WORDS = {
    FUSED: "the fused engine",
    REFERENCE: "the reference engine",
    PLAIN: "the reference engine without a drafter",
}


def step_of(load: LoadConfig) -> str:
    """The step that a load on a card begins with."""
    if load.engine != REFERENCE:
        return FUSED
    return REFERENCE if load.draft else PLAIN


def lowered(load: LoadConfig, step: str) -> LoadConfig:
    """The load at a slower step; options that only the fused engine knows fall to their defaults."""
    if step == FUSED:
        return load
    usual = {name: option.default for name, option in LOAD_OPTIONS.items() if option.needs_fused}
    return replace(load, engine=REFERENCE, draft=load.draft and step != PLAIN, **usual)


class LoadSteps:
    """What is remembered of loads on this machine's cards.

    Args:
        folder: where; None remembers nothing, nor does one that cannot be written.
        versions: of the programs and the driver; what was remembered under others no longer holds.
    """

    def __init__(self, folder: Path | None, versions: Mapping[str, str | None]) -> None:
        self._folder, self._versions = folder, dict(versions)

    def begin_with(self, name: str, load: LoadConfig) -> tuple[LoadConfig, str]:
        """The load as it is to be tried, and a line for the user where that is slower than requested.

        An engine, or an option of one, that was requested by name is tried again all the same.

        Args:
            name: of the pair.
        """
        self._take_markers()
        step = self._read().get(name)
        if step not in STEPS[1:] or STEPS.index(step) <= STEPS.index(step_of(load)):
            return load, ""
        earlier = f"an earlier load of {name} ended the program"
        if load.engine != "auto" or load.needs_fused:
            return load, f"{earlier}; it is tried again, as you asked for it"
        faster = STEPS[STEPS.index(step) - 1]
        again = f"--engine {faster} tries {WORDS[faster]} again"
        return lowered(load, step), f"{earlier}, so {WORDS[step]} is taken; {again}"

    @contextmanager
    def loading(self, name: str, load: LoadConfig) -> Iterator[None]:
        """Around a load: should it end the program, the next one begins a step slower. One that succeeds at a step is
        remembered for no slower one."""
        marker = self._mark(name, step_of(load))
        try:
            yield
            self._remember(name, step_of(load), slower=False)
        finally:
            if marker is not None:
                with suppress(OSError):
                    marker.unlink()

    def forget(self) -> None:
        """Begin anew with every pair."""
        if self._folder is not None:
            self._take_markers()
            with suppress(OSError):
                (self._folder / RECORD).unlink()

    def _mark(self, name: str, step: str) -> Path | None:
        owner = Owner.me("load")
        if self._folder is None:
            return None
        path = self._folder / MARKERS.replace("*", owner.token)
        content = {"owner": asdict(owner), "name": name, "step": step, "versions": self._versions}
        return path if keep(path, json.dumps(content) + "\n") else None

    def _take_markers(self) -> None:
        """Remember the loads whose process died, and remove their markers."""
        for path in sorted(self._folder.glob(MARKERS)) if self._folder is not None else ():
            content = _object(path)
            state = _state(content.get("owner"))
            with suppress(OSError):
                if state == "alive" or (state == "unknown" and time.time() - path.stat().st_mtime < STALE_S):
                    continue
                path.unlink()
                name, step = content.get("name"), content.get("step")
                right = isinstance(name, str) and step in STEPS and content.get("versions") == self._versions
                if state == "dead" and right:
                    self._remember(str(name), STEPS[min(STEPS.index(str(step)) + 1, len(STEPS) - 1)], slower=True)

    def _remember(self, name: str, step: str, slower: bool) -> None:
        """Keep a step, where it is slower than the one that is known, or not slower, as ``slower`` says."""
        known = self._read()
        before = known.get(name, FUSED)
        if step == before or (STEPS.index(step) > STEPS.index(before)) != slower:
            return
        known[name] = step
        if self._folder is not None:
            content = {"versions": self._versions, "steps": {key: one for key, one in known.items() if one != FUSED}}
            keep(self._folder / RECORD, json.dumps(content, indent=1) + "\n")

    def _read(self) -> dict[str, str]:
        """The steps by the names of pairs; none that other versions came to."""
        content = _object(self._folder / RECORD) if self._folder is not None else {}
        steps = content.get("steps")
        if content.get("versions") != self._versions or not isinstance(steps, dict):
            return {}
        return {key: step for key, step in steps.items() if step in STEPS}


def _object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _state(owner: Any) -> str:
    """Whether the process of a marker lives; a marker without one that makes sense is nobody's."""
    try:
        return Owner(**owner).state
    except TypeError:
        return "nobody's"
