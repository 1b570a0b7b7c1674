"""The pairs of this machine as chat, screen and page handle them: list, plan, download, load, remove."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_local.app import download, examples, model_entries
from dflash_local.app.fitting import Loaded
from dflash_local.app.load_choices import LoadChoice, LoadChoices, load_choices
from dflash_local.app.model_entries import ModelEntry
from dflash_local.app.model_sources import ModelSource, decided
from dflash_local.app.models import ModelStore, registry
from dflash_local.app.removal import plan_removal, refuse_in_use
from dflash_local.app.resolve import choose, nearest
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import BusyError, UnknownModelError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.service.service import Service
from dflash_local.settings import Settings
from dflash_local.tables import amount, listing

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.store.removal import Removal


class ModelCatalog:
    """Every method may be called from any thread and may take seconds or longer.

    Args:
        service: of the pair that is loaded; it is told to load others.
        models: what names mean. load: how the program was told to load pairs.

    Attributes:
        takes_folders: a name may be a folder of this machine; never one that comes from a browser.
    """

    takes_folders = True

    def __init__(self, service: Service, models: ModelSource, load: LoadConfig, user: Settings) -> None:
        self.service, self.models, self.user, self._load = service, models, user, load

    @property
    def pair(self) -> Pair:
        """The pair that requests go to, loaded or not."""
        pair = self.service.model.pair
        assert pair is not None  # every source tells it
        return pair

    @property
    def examples(self) -> Sequence[str]:
        """Prompts that the pair can do, to begin with."""
        return examples.examples(self.pair)

    @property
    def decided(self) -> str:
        """That a server of another program decides what is loaded; empty where pairs are loaded here."""
        return decided(self.models)

    def entries(self) -> Sequence[ModelEntry]:
        """Return the pairs of the registry. SettingsError: it cannot be read."""
        return model_entries.model_entries(self.user, self._loaded)

    def entry(self, name: str) -> ModelEntry:
        """Return the pair of the registry that a name means. UnknownModelError: none."""
        return model_entries.model_entry(self._known(name), self.user, self._loaded)

    def load_choices(self, name: str, context: int | None = None, draft: bool = True) -> LoadChoices | None:
        """Return the ways to load a pair in this one's place; see ``app.load_choices``.

        Raises:
            UnknownModelError: no such pair. UsageError: a server decides that. DFlashError: see there.
        """
        if self.decided:
            raise UsageError(self.decided)
        return load_choices(self._known(name), self.user, self._asked(context, draft), self._loaded)

    def load(self, choice: LoadChoice) -> str:
        """Load a pair that is here in one of its ways, in this one's place; return what is said of it.

        Raises:
            DFlashError: it cannot be loaded; the pair before stays chosen.
        """
        self.service.switch(choice.model, choice.config)
        facts = self.service.facts
        return f"now talking to {self.pair.label}: {facts.loaded_as if facts is not None else 'unloaded'}"

    def before_download(self, name: str) -> download.BeforeDownload:
        """Return the licence of what a name means, and the room for its download."""
        return download.before_download(choose(self._known(name), None, self.user), self.user)

    def pull(self, name: str, on_event: download.OnPull, cancelled: Callable[[], bool], draft: bool = True) -> None:
        """Download and verify a pair, or one of its pre-quantised targets with the drafter.

        Args:
            draft: False leaves the drafter out.

        Raises:
            Interrupted: it was cancelled; finished files stay. DFlashError: it could not be had.
        """
        download.pull(self._known(name), self.user, on_event, cancelled, draft)

    def removal(self, name: str) -> str:
        """Return what ``remove`` would delete and free, in words.

        Raises:
            DFlashError: nothing of it is here, or it is in use.
        """
        plan = self._removal(name)
        going = [item for item in plan.repos if not item.delicate]
        lines = [f"{item.repo}: {amount(item.size)}" for item in going]
        lines += [f"{item.repo} is kept: {item.why}" for item in plan.repos if item.delicate]
        return "\n".join([*lines, f"{amount(sum(item.size for item in going))} would be freed."])

    def remove(self, name: str) -> str:
        """Delete a pair's files that nobody else needs; return what was freed.

        Raises:
            DFlashError: nothing of it is here, or it is in use.
        """
        from dflash_local.store import removal as store

        plan = self._removal(name)
        going = tuple(item for item in plan.repos if not item.delicate)
        freed = store.remove(replace(plan, repos=going))
        return f"removed {listing([item.repo for item in going])}: {amount(freed)} freed"

    def _asked(self, context: int | None, draft: bool) -> LoadConfig:
        """Return what holds for all ways to load a pair."""
        return replace(self._load, quantize=None, context=context, draft=draft)

    @property
    def _loaded(self) -> Loaded | None:
        """What this program's memory plans count as free."""
        ready = not self.decided and self.service.status.state == "ready"
        facts = self.service.facts if ready else None
        return Loaded(self.pair, facts) if facts is not None else None

    def _known(self, name: str) -> str:
        """Return what the registry calls a pair, or one of its pre-quantised targets."""
        listed = registry(self.user).find_variant(name)
        if listed is not None:
            return listed[1].model
        if self.takes_folders:
            return name
        row = self._row(name)
        return row.bundled or row.name

    def _row(self, name: str) -> Row:
        rows = registry(self.user)
        row = rows.find(name)
        if row is None:
            close = nearest(name, rows)
            hint = f"did you mean {' or '.join(close)}?" if close else "the Models tab lists all"
            raise UnknownModelError(f"unknown model {name[:80]!r}", hint)
        return row

    def _removal(self, name: str) -> Removal:
        """Return what may go of a pair.

        Raises:
            BusyError: it is loaded, here or elsewhere. UsageError: nothing of it may go.
        """
        row = self._row(name)
        listed, status, model = row.bundled or row.name, self.service.status, self.service.model
        variant = registry(self.user).find_variant(model.name)
        served = variant is not None and variant[0].name == row.name
        served = served or any(map(model.answers_to, (row.name, listed)))
        if status.state in ("ready", "loading") and served:
            raise BusyError(f"{name} is loaded", f"end {model.kept_by} first" if model.kept_by else "unload it first")
        here = ModelStore.of(self.user).cache.repos()
        plan = plan_removal([listed, *(each.repo for each in row.variants if each.repo in here)], self.user)
        refuse_in_use(plan)
        if not plan.repos:
            raise UsageError(f"nothing of {name} is on this machine")
        if all(item.delicate for item in plan.repos):
            reasons = "; ".join(f"{item.repo}: {item.why}" for item in plan.repos)
            raise UsageError(
                f"nothing of {name} is removed from here ({reasons})", f"dflash rm --all {row.name} does it"
            )
        return plan
