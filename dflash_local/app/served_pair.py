"""The pair that page and endpoint share, and what the page does with the pairs of this machine.

Every name that comes from a browser must be one of the registry: no path of this machine is taken.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_local import __version__
from dflash_local.app import download, examples, fitting, measurements, model_entries
from dflash_local.app.examples import TOY
from dflash_local.app.load_choices import LoadChoice, LoadChoices, load_choices
from dflash_local.app.local_process import measure
from dflash_local.app.model_entries import ModelEntry
from dflash_local.app.models import InstallStatus, ModelStore, install_status, model_store, registry
from dflash_local.app.notices import Notify
from dflash_local.app.recommending import PairPlans, pair_plans
from dflash_local.app.removal import plan_removal, refuse_in_use
from dflash_local.app.resolve import choose, nearest, resolve
from dflash_local.bench import provenance
from dflash_local.bench.certify_servers import identity
from dflash_local.bench.prompts import Prompt
from dflash_local.bench.report import Progress
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import BusyError, UnknownModelError, UsageError
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import Verdict
from dflash_local.planner import hardware, software
from dflash_local.remote.server_checks import ServerFacts
from dflash_local.service.resident import Resident
from dflash_local.settings import Settings
from dflash_local.store.paths import chats_folder
from dflash_local.tables import amount, listing

if TYPE_CHECKING:
    from dflash_local.app.resident_server import ResidentServer
    from dflash_local.catalog.row import Row
    from dflash_local.store.removal import Removal

PACKAGES = ("torch", "transformers", "gradio", "triton", "bitsandbytes")
TAUGHT = "It shows how drafting works, not what a model knows: it was taught a few topics only."
NO_GPU = "With a GPU real pairs run fast: the Models tab lists them and downloads one."


class Details(NamedTuple):
    """What ``dflash show`` tells of a pair."""

    status: InstallStatus
    plans: PairPlans
    store: ModelStore | None


class ServedPair:
    """Every method may be called from any thread and may take seconds or longer.

    Args:
        resident: of the pair that page and endpoint share; ``resident.switch(name)`` changes it for both.
        pair: the one that the command named; others come and go.
        url: where this server is reached.
        server: of another program, in place of pairs that are loaded here.
    """

    def __init__(
        self,
        resident: Resident,
        pair: Pair,
        load: LoadConfig,
        user: Settings,
        url: str,
        server: ResidentServer | None = None,
    ) -> None:
        self.resident, self._server = resident, server
        self._pair, self._load, self._user, self._url = pair, load, user, url
        self._first = resident.model.name
        self._certifying = threading.Lock()

    @property
    def name(self) -> str:
        """What the list of pairs calls the one that is served now."""
        return self.listed_name(self.resident.model.name)

    def listed_name(self, name: str) -> str:
        """What the list of pairs calls one that is named by itself or by one of its pre-quantised targets."""
        listed = registry(self._user).find_variant(name)
        return name if listed is None else listed[0].name

    @property
    def notes(self) -> Sequence[str]:
        """What a newcomer should know of the pair that is served now (a toy, no GPU); often nothing."""
        if not self._served.toy:
            return []
        no_gpu = self._server is None and fitting.machine(self._user).kind == "cpu"
        return [f"{TOY[0].upper()}{TOY[1:]}.", TAUGHT, *([NO_GPU] if no_gpu else [])]

    @property
    def examples(self) -> Sequence[str]:
        """Prompts that the pair that is served now can do, to begin with."""
        return examples.examples(self._served)

    def entries(self) -> Sequence[ModelEntry]:
        """The pairs of the registry.

        Raises:
            SettingsError: it cannot be read.
        """
        return model_entries.model_entries(self._user, self._loaded)

    def entry(self, name: str) -> ModelEntry:
        """The pair of the registry that a name means.

        Raises:
            UnknownModelError: none.
        """
        return model_entries.model_entry(self._named(name), self._user, self._loaded)

    def details(self, name: str) -> Details:
        """All that is known of a pair.

        Raises:
            UnknownModelError: no such pair.
        """
        row, store = self._row(name), model_store(self._user)
        where = fitting.machine(self._user, loaded=self._loaded)
        choice = fitting.row_choice(row, self._user)
        plans = pair_plans(choice, fitting.shapes(choice, store), where, self._user, store=store)
        return Details(install_status(row, store), plans, store)

    def load_choices(self, name: str, context: int | None = None, draft: bool = True) -> LoadChoices | None:
        """The ways to load a pair in the served one's place; see ``app.load_choices``.

        Raises:
            UnknownModelError: no such pair. UsageError: a server decides that. DFlashError: see there.
        """
        if self._server is not None:
            raise UsageError(self._server.decides)
        asked = replace(self._load, quantize=None, context=context, draft=draft)
        return load_choices(self._named(name), self._user, asked, self._loaded)

    def load(self, choice: LoadChoice) -> None:
        """Load a pair that is here in one of its ways, in the served one's place.

        Raises:
            DFlashError: it cannot be loaded.
        """
        self.resident.switch(choice.model, choice.config)

    @property
    def decided(self) -> str:
        """That a server of another program decides what is loaded; empty where pairs are loaded here."""
        return self._server.decides if self._server is not None else ""

    def is_loaded(self, choice: LoadChoice) -> bool:
        """True when this is how the served pair is in memory."""
        facts, model, config = self.resident.facts, self.resident.model, choice.config
        if self.resident.status.state != "ready" or facts is None or not model.answers_to(choice.model):
            return False
        load = facts.load
        same = (load.quantize, load.kv_cache) == (config.quantize, config.kv_cache)
        return same and config.draft == (facts.drafter is not None) and config.context in (None, facts.context)

    def before_download(self, choice: LoadChoice) -> download.BeforeDownload:
        """Licence of a way to load a pair, and the room for its download."""
        return download.before_download(choose(choice.model, None, self._user), self._user)

    def pull(self, name: str, on_event: download.OnPull, cancelled: Callable[[], bool], draft: bool = True) -> None:
        """Download and verify a pair, or one of its pre-quantised targets with the drafter.

        Args:
            draft: False leaves the drafter out.

        Raises:
            Interrupted: it was cancelled; finished files stay. DFlashError: it could not be had.
        """
        download.pull(self._named(name), self._user, on_event, cancelled, draft)

    def removal(self, name: str) -> str:
        """What ``remove`` would delete and free, in words.

        Raises:
            DFlashError: nothing of it is here, or it is in use.
        """
        plan = self._removal(name)
        going = [item for item in plan.repos if not item.delicate]
        lines = [f"{item.repo}: {amount(item.size)}" for item in going]
        lines += [f"{item.repo} is kept: {item.why}" for item in plan.repos if item.delicate]
        return "\n".join([*lines, f"{amount(sum(item.size for item in going))} would be freed."])

    def remove(self, name: str) -> str:
        """Delete a pair's files that nobody else needs; says what was freed.

        Raises:
            DFlashError: nothing of it is here, or it is in use.
        """
        from dflash_local.store import removal as store

        plan = self._removal(name)
        going = tuple(item for item in plan.repos if not item.delicate)
        freed = store.remove(replace(plan, repos=going))
        return f"removed {listing([item.repo for item in going])}: {amount(freed)} freed"

    def bench_prompts(self) -> Sequence[Prompt]:
        """The built-in prompts for the pair that is served now: a toy has its own."""
        return examples.bench_prompts(self._served)

    def about(self) -> Mapping[str, str]:
        """Versions, machine, pair and promise, in the order to be shown."""
        where = fitting.machine(self._user)
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
            "system": f"{platform.platform()}, {os.cpu_count()} cores, {hardware.processor()}",
            "this machine"
            if self._server is not None
            else "runs on": f"{gpu}: {amount(where.free)} {where.room} of {amount(where.memory)} ({where.why})",
            **self._pair_facts(),
            "endpoint": f"{self._url}/v1",
            **{label: str(folder) for label, folder in folders.items() if folder is not None},
        }

    def provenance(self) -> Mapping[str, Any]:
        """Where figures come from, for files that are saved: versions, machine, pair; no names of hosts or users."""
        where = fitting.machine(self._user)
        facts = self.resident.facts
        names = ("engine", "dtype", "device", "block_size", "context", "notices")
        own = {
            "pair": self.resident.model.name,
            "note": TOY if self._served.toy else None,
            "versions": {**provenance.versions(), "gradio": software.version_of("gradio")},
        }
        if self._server is not None:
            known = facts if isinstance(facts, ServerFacts) else None
            return {**own, "server": identity(known) if known is not None else None}
        return {
            **own,
            "machine": {
                "system": platform.platform(),
                "processor": hardware.processor(),
                "cores": os.cpu_count(),
                "device": where.as_dict(),
            },
            **{name: getattr(facts, name) if facts is not None else None for name in names},
            "load": asdict(facts.load) if facts is not None else None,
        }

    def certify(self, progress: Progress, cancelled: Callable[[], bool]) -> Mapping[str, Any]:
        """The certificate of the pair that is served now, as ``dflash certify --json`` reports it.

        The pair is unloaded meanwhile, and loaded again by the next request.

        Raises:
            Interrupted: it was cancelled. DFlashError: it could not be made.
        """
        if self._server is not None:
            raise UsageError(
                f"{self._server.label} proves nothing of its text by itself",
                "dflash certify MODEL --url DRAFTING --plain-url PLAIN compares two servers",
            )
        if not self._certifying.acquire(blocking=False):
            raise BusyError("a certificate is being made already", "wait for it")
        try:
            pair, thinking = self._served, self.resident.model.thinking
            progress(f"unloading {pair.name}", 0.0)
            self.resident.unload()  # two of one pair may not fit
            progress("starting", 0.0)
            pair = pair if pair is self._pair else resolve(pair.name, None, self._user, _to(progress))
            prompts = tuple(examples.bench_prompts(pair))
            load = replace(self._load, draft=True)
            job = partial(measurements.certify_pair, pair, load, prompts, thinking)
            report, _ = measure(pair.name, job, self._user, _to(progress), cancelled)
            return report
        finally:
            self._certifying.release()

    @property
    def _loaded(self) -> fitting.Loaded | None:
        facts = self.resident.facts if self._server is None and self.resident.status.state == "ready" else None
        return fitting.Loaded(self._served, facts) if facts is not None else None

    @property
    def _served(self) -> Pair:
        """The pair that is served now; only its name and what goes with it matter here."""
        name = self.resident.model.name
        if name == self._first:
            return self._pair
        if self._server is not None:
            return self._server.pair(name)
        return resolve(name, None, self._user, lambda _event: None, draft=False)

    def _pair_facts(self) -> dict[str, str]:
        status, facts = self.resident.status, self.resident.facts
        state = f"{status.model} ({status.state})"
        if facts is None:
            return {"pair": state}
        drafter = facts.drafter or ("not reported" if facts.in_server and facts.drafting else "none")
        return {
            "pair": state,
            "target": facts.target,
            "drafter": drafter,
            "block size": str(facts.block_size or "not reported"),
            "context": f"{facts.context:,} tokens" if facts.context else "not reported",
            "replies come from" if facts.in_server else "loaded as": facts.loaded_as,
            "promise": facts.promise,
            **{f"check of the {each.subject}": _of_check(each) for each in facts.checks},
        }

    def _row(self, name: str) -> Row:
        rows = registry(self._user)
        row = rows.find(name)
        if row is None:
            close = nearest(name, rows)
            hint = f"did you mean {' or '.join(close)}?" if close else "the Models tab lists all"
            raise UnknownModelError(f"unknown model {name[:80]!r}", hint)
        return row

    def _named(self, name: str) -> str:
        """What the registry calls a pair, or one of its pre-quantised targets."""
        listed = registry(self._user).find_variant(name)
        if listed is not None:
            return listed[1].model
        row = self._row(name)
        return row.bundled or row.name

    def _removal(self, name: str) -> Removal:
        """What may go of a pair.

        Raises:
            BusyError: it is loaded, here or elsewhere. UsageError: nothing of it may go.
        """
        row = self._row(name)
        listed, status, model = row.bundled or row.name, self.resident.status, self.resident.model
        served = self.name == row.name or any(map(model.answers_to, (row.name, listed)))
        if status.state in ("ready", "loading") and served:
            raise BusyError(f"{name} is loaded", f"end {model.kept_by} first" if model.kept_by else "unload it first")
        here = ModelStore.of(self._user).cache.repos()
        plan = plan_removal([listed, *(each.repo for each in row.variants if each.repo in here)], self._user)
        refuse_in_use(plan)
        if not plan.repos:
            raise UsageError(f"nothing of {name} is on this machine")
        if all(item.delicate for item in plan.repos):
            reasons = "; ".join(f"{item.repo}: {item.why}" for item in plan.repos)
            raise UsageError(
                f"nothing of {name} is removed from here ({reasons})", f"dflash rm --all {row.name} does it"
            )
        return plan


def _to(progress: Progress) -> Notify:
    """Forward how far a measurement is; its notices stand in its report."""

    def forward(event: Notice | LoadProgress) -> None:
        if isinstance(event, LoadProgress):
            progress(event.stage, event.fraction or 0.0)

    return forward


def _of_check(verdict: Verdict) -> str:
    """On one line."""
    return " · ".join(filter(None, (verdict.state, verdict.text, verdict.remedy)))
