"""The pair that page and endpoint share, and what the page does with the pairs of this machine.

Every name that comes from a browser must be one of the registry: no path of this machine is taken.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dflash_local import __version__
from dflash_local.app import examples, fitting, measurements
from dflash_local.app.default_model import remember_default
from dflash_local.app.examples import TOY
from dflash_local.app.figures_origin import figures_origin
from dflash_local.app.load_choices import LoadChoice
from dflash_local.app.local_process import measure
from dflash_local.app.model_catalog import ModelCatalog
from dflash_local.app.model_sources import ModelSource
from dflash_local.app.models import InstallStatus, ModelStore, install_status, model_store, registry
from dflash_local.app.notices import Notify
from dflash_local.app.recommending import PairPlans, pair_plans
from dflash_local.bench.prompts import Prompt
from dflash_local.bench.report import Progress
from dflash_local.errors import BusyError, UsageError
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import Verdict
from dflash_local.planner import hardware, software
from dflash_local.service.service import Service
from dflash_local.settings import FullContext, Settings
from dflash_local.store.paths import chats_folder
from dflash_local.tables import amount

PACKAGES = ("torch", "transformers", "gradio", "triton", "bitsandbytes")
TAUGHT = "It shows how drafting works, not what a model knows: it was taught a few topics only."
NO_GPU = "With a GPU real pairs run fast: the Models tab lists them and downloads one."


class Details(NamedTuple):
    """What ``dflash show`` tells of a pair."""

    status: InstallStatus
    plans: PairPlans
    store: ModelStore | None


class ServedPair(ModelCatalog):
    """The page's catalog, and what it tells of the pair, this machine and its certificate.

    Args:
        url: where this server is reached.
    """

    takes_folders = False

    def __init__(self, service: Service, models: ModelSource, load: LoadConfig, user: Settings, url: str) -> None:
        super().__init__(service, models, load, user)
        self._url = url
        self._certifying = threading.Lock()

    @property
    def name(self) -> str:
        """What the list of pairs calls the one that is served now."""
        return self.listed_name(self.service.model.name)

    @property
    def chats(self) -> Path | None:
        """Return where conversations are kept; None where they are not, or there is no home folder."""
        return chats_folder(self.user) if self.user.history else None

    @property
    def full_context(self) -> FullContext:
        """Return what a chat does with its oldest messages as long as it is not told otherwise."""
        return self.user.full_context

    def listed_name(self, name: str) -> str:
        """Return what the list of pairs calls one that is named by itself or by one of its pre-quantised targets."""
        listed = registry(self.user).find_variant(name)
        return name if listed is None else listed[0].name

    @property
    def notes(self) -> Sequence[str]:
        """What a newcomer should know of the pair that is served now (a toy, no GPU); often nothing."""
        if not self.pair.toy:
            return []
        no_gpu = not self.models.label and fitting.machine(self.user).kind == "cpu"
        return [f"{TOY[0].upper()}{TOY[1:]}.", TAUGHT, *([NO_GPU] if no_gpu else [])]

    def begin_with(self, name: str) -> str:
        """Let commands that are given no MODEL take a pair of the list, and say so.

        Raises:
            UnknownModelError: no such pair. SettingsError: the settings file cannot be written.
        """
        known = self._row(name).name
        remember_default(known, self.user)
        return f"dflash begins with {known} from now on"

    def details(self, name: str, context: int | None = None, draft: bool = True) -> Details:
        """All that is known of a pair, planned as it would be loaded.

        Raises:
            UnknownModelError: no such pair.
        """
        row, store = self._row(name), model_store(self.user)
        where = fitting.machine(self.user, loaded=self._loaded)
        choice = fitting.row_choice(row, self.user)
        asked = self._asked(context, draft)
        plans = pair_plans(choice, fitting.shapes(choice, store), where, self.user, asked, store=store)
        return Details(install_status(row, store), plans, store)

    def is_loaded(self, choice: LoadChoice) -> bool:
        """True when this is how the served pair is in memory."""
        facts, model, config = self.service.facts, self.service.model, choice.config
        if self.service.status.state != "ready" or facts is None or not model.answers_to(choice.model):
            return False
        load = facts.load
        same = (load.quantize, load.kv_cache) == (config.quantize, config.kv_cache)
        return same and config.draft == (facts.drafter is not None) and config.context in (None, facts.context)

    def bench_prompts(self) -> Sequence[Prompt]:
        """The built-in prompts for the pair that is served now: a toy has its own."""
        return examples.bench_prompts(self.pair)

    def about(self) -> Mapping[str, str]:
        """Versions, machine, pair and promise, in the order to be shown."""
        where = fitting.machine(self.user)
        driver = hardware.nvidia_driver() if where.kind == "cuda" else None
        gpu = f"{where.name}, driver {driver.version}" if driver else where.name
        versions = {name: software.version_of(name) for name in PACKAGES}
        user = self.user
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
            if self.models.label
            else "runs on": f"{gpu}: {amount(where.free)} {where.room} of {amount(where.memory)} ({where.why})",
            **self._pair_facts(),
            "endpoint": f"{self._url}/v1",
            **{label: str(folder) for label, folder in folders.items() if folder is not None},
        }

    def provenance(self) -> Mapping[str, Any]:
        """Where figures come from, for files that are saved: versions, machine, pair; no names of hosts or users."""
        origin = figures_origin(self.service, self.pair, self.user, bool(self.models.label))
        return {**origin, "versions": {**origin["versions"], "gradio": software.version_of("gradio")}}

    def certify(self, progress: Progress, cancelled: Callable[[], bool]) -> Mapping[str, Any]:
        """The certificate of the pair that is served now, as ``dflash certify --json`` reports it.

        The pair is unloaded meanwhile, and loaded again by the next request.

        Raises:
            Interrupted: it was cancelled. DFlashError: it could not be made.
        """
        if self.models.label:
            raise UsageError(
                f"{self.models.label} proves nothing of its text by itself",
                "dflash certify MODEL --url DRAFTING --plain-url PLAIN compares two servers",
            )
        if not self._certifying.acquire(blocking=False):
            raise BusyError("a certificate is being made already", "wait for it")
        try:
            pair, thinking = self.pair, self.service.model.thinking
            progress(f"unloading {pair.name}", 0.0)
            self.service.unload()  # two of one pair may not fit
            progress("starting", 0.0)
            prompts = tuple(examples.bench_prompts(pair))
            load = replace(self._load, draft=True)
            job = partial(measurements.certify_pair, pair, load, prompts, thinking)
            report, _ = measure(pair.name, job, self.user, _to(progress), cancelled)
            return report
        finally:
            self._certifying.release()

    def _pair_facts(self) -> dict[str, str]:
        status, facts = self.service.status, self.service.facts
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


def _to(progress: Progress) -> Notify:
    """Forward how far a measurement is; its notices stand in its report."""

    def forward(event: Notice | LoadProgress) -> None:
        if isinstance(event, LoadProgress):
            progress(event.stage, event.fraction or 0.0)

    return forward


def _of_check(verdict: Verdict) -> str:
    """On one line."""
    return " · ".join(filter(None, (verdict.state, verdict.text, verdict.remedy)))
