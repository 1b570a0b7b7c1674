"""What the page asks of the command line: registry, downloads, removal, measuring, and what this machine is.

Every name that comes from a browser must be one of the registry: no path of this machine is taken.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dflash_local import __version__
from dflash_local.bench import provenance
from dflash_local.bench.prompts import Prompt, a_few, built_in, held_out
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import fit
from dflash_local.cli import offers as registered
from dflash_local.cli.demo import TOY
from dflash_local.cli.examples import examples
from dflash_local.cli.measuring import HELD_OUT
from dflash_local.cli.places import places_or_none, registry, standing
from dflash_local.cli.tables import amount, listing
from dflash_local.errors import BusyError, UnknownModelError, UsageError
from dflash_local.events import Notice, PullProgress
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import Verdict
from dflash_local.planner import hardware, software
from dflash_local.service.resident import Resident
from dflash_local.settings import Settings
from dflash_local.store.paths import chats_folder
from dflash_local.ui.offers import Offer
from dflash_local.ui.readings import precision

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.store.removal import Removal

PACKAGES = ("torch", "transformers", "gradio", "triton", "bitsandbytes")
TAUGHT = "It shows how drafting works, not what a model knows: it was taught a few topics only."
NO_GPU = "With a GPU real pairs run fast: the Models tab lists them and downloads one."


class WebBackend:
    """See ``ui.web.backend.Backend``.

    Args:
        pair: the one that the command named; others come and go through ``resident.switch``.
        url: where this server is reached.
    """

    def __init__(self, resident: Resident, pair: Pair, load: LoadConfig, user: Settings, url: str) -> None:
        self._resident, self._pair, self._load, self._user, self._url = resident, pair, load, user, url
        self._first = resident.model.name
        self._certifying = threading.Lock()

    @property
    def resident(self) -> Resident:
        return self._resident

    @property
    def notes(self) -> Sequence[str]:
        toy = self._served.toy
        said = [f"{TOY[0].upper()}{TOY[1:]}.", TAUGHT] if toy else []
        return [*said, NO_GPU] if toy and fit.machine(self._user).kind == "cpu" else said

    @property
    def examples(self) -> Sequence[str]:
        return examples(self._served)

    def offers(self) -> Sequence[Offer]:
        return registered.offers(self._user, self._loaded)

    def offer(self, name: str) -> Offer:
        return registered.offer(self._named(name), self._user, self._loaded)

    def details(self, name: str, columns: int) -> str:
        from dflash_local.cli.resolve import choose, of_row
        from dflash_local.cli.show import lines, memory_of

        row, places = self._row(name), places_or_none(self._user)
        choice = choose(row.bundled, None, self._user) if row.bundled else of_row(row)
        where = fit.machine(self._user, loaded=self._loaded)
        memory = memory_of(fit.shapes(choice, places), where, row)
        return "\n".join(lines(standing(row, places), memory, places, columns))

    def pull(self, name: str, hear: Callable[[PullProgress | Notice], None], cancelled: Callable[[], bool]) -> None:
        registered.pull(self._named(name), self._user, hear, cancelled)

    def removal(self, name: str) -> str:
        from dflash_local.cli.rm import easy, why

        plan = self._removal(name)
        going = easy(plan.repos)
        said = [f"{item.repo}: {amount(item.size)}" for item in going]
        said += [f"{item.repo} is kept: {why(item)}" for item in plan.repos if item not in going]
        return "\n".join([*said, f"{amount(sum(item.size for item in going))} would be freed."])

    def remove(self, name: str) -> str:
        from dflash_local.cli.rm import easy
        from dflash_local.store import removal as store

        plan = self._removal(name)
        going = easy(plan.repos)
        freed = store.remove(replace(plan, repos=going), shared=True)
        return f"removed {listing([item.repo for item in going])}: {amount(freed)} freed"

    def bench_prompts(self) -> Sequence[Prompt]:
        return a_few(held_out(HELD_OUT)) if self._served.toy else built_in()

    def about(self) -> Mapping[str, str]:
        where = fit.machine(self._user)
        driver = hardware.nvidia_driver() if where.kind == "cuda" else None
        gpu = f"{where.name}, driver {driver.version}" if driver else where.name
        versions = {name: software.version_of(name) for name in PACKAGES}
        user = self._user
        folders = {
            "models in": user.hub.cache,
            "settings in": user.config_dir,
            "chats in": chats_folder(user),
        }
        return {
            "dflash-local": __version__,
            "python": platform.python_version(),
            **{name: version for name, version in versions.items() if version is not None},
            "system": f"{platform.platform()}, {os.cpu_count()} cores, {provenance.processor()}",
            "runs on": f"{gpu}: {amount(where.free)} free of {amount(where.memory)} ({where.why})",
            **self._pair_facts(),
            "endpoint": f"{self._url}/v1",
            **{label: str(folder) for label, folder in folders.items() if folder is not None},
        }

    def provenance(self) -> Mapping[str, Any]:
        where = fit.machine(self._user)
        facts = self._resident.facts
        names = ("engine", "dtype", "device", "block_size", "context", "notices")
        return {
            "pair": self._resident.model.name,
            "note": TOY if self._served.toy else None,
            "versions": {**provenance.versions(), "gradio": software.version_of("gradio")},
            "machine": {
                "system": platform.platform(),
                "processor": provenance.processor(),
                "cores": os.cpu_count(),
                "device": where.as_dict(),
            },
            **{name: getattr(facts, name) if facts is not None else None for name in names},
            "load": asdict(facts.load) if facts is not None else None,
        }

    def certify(self, hear: Callable[[str, float], None], cancelled: Callable[[], bool]) -> Mapping[str, Any]:
        from dflash_local.cli import certifying

        if not self._certifying.acquire(blocking=False):
            raise BusyError("a certificate is being made already", "wait for it")
        try:
            pair, thinking = self._served, self._resident.model.thinking
            hear(f"unloading {pair.name}", 0.0)
            self._resident.unload()  # two of one pair may not fit
            hear("starting", 0.0)
            argv = certifying.command(pair, self._load, thinking, self._user)
            return certifying.run(argv, self._user.environ, hear, cancelled)
        finally:
            self._certifying.release()

    @property
    def _loaded(self) -> fit.Loaded | None:
        facts = self._resident.facts if self._resident.status.state == "ready" else None
        return fit.Loaded(self._served, facts) if facts is not None else None

    @property
    def _served(self) -> Pair:
        """The pair that is served now; only its name and what goes with it matter here."""
        name = self._resident.model.name
        if name == self._first:
            return self._pair
        from dflash_local.cli.console import Console
        from dflash_local.cli.resolve import resolve

        return resolve(name, None, self._user, Console(self._user.environ), draft=False)

    def _pair_facts(self) -> dict[str, str]:
        status, facts = self._resident.status, self._resident.facts
        state = f"{status.model} ({status.state})"
        if facts is None:
            return {"pair": state}
        return {
            "pair": state,
            "target": facts.target,
            "drafter": facts.drafter or "none",
            "block size": str(facts.block_size),
            "context": f"{facts.context:,} tokens",
            "loaded as": facts.loaded_as,
            "promise": precision(facts.dtype),
            **{f"check of the {each.subject}": _of_check(each) for each in facts.checks},
        }

    def _row(self, name: str) -> Row:
        from dflash_local.cli.resolve import nearest

        rows = registry(self._user)
        row = rows.find(name)
        if row is None:
            close = nearest(name, rows)
            hint = f"did you mean {' or '.join(close)}?" if close else "the Models tab lists all"
            raise UnknownModelError(f"unknown model {name[:80]!r}", hint)
        return row

    def _named(self, name: str) -> str:
        row = self._row(name)
        return row.bundled or row.name

    def _removal(self, name: str) -> Removal:
        """What may go of a pair.

        Raises:
            BusyError: it is loaded, here or elsewhere. UsageError: nothing of it may go.
        """
        from dflash_local.cli.rm import easy, planned, refuse_in_use, why

        row = self._row(name)
        status, model = self._resident.status, self._resident.model
        if status.state in ("ready", "loading") and any(map(model.answers_to, (row.name, row.bundled or row.name))):
            raise BusyError(f"{name} is loaded", "unload it first")
        plan = planned([row.bundled or row.name], self._user)
        refuse_in_use(plan)
        if not plan.repos:
            raise UsageError(f"nothing of {name} is on this machine")
        if not easy(plan.repos):
            told = "; ".join(f"{item.repo}: {why(item)}" for item in plan.repos)
            raise UsageError(f"nothing of {name} is removed from here ({told})", f"dflash rm --all {row.name} does it")
        return plan


def _of_check(verdict: Verdict) -> str:
    """On one line."""
    return " · ".join(filter(None, (verdict.state, verdict.text, verdict.remedy)))
