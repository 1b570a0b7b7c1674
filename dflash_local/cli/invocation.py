"""What every command begins with: the user's settings, the console, and the way to a pair that is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dflash_local import settings
from dflash_local.app import recommending, resolve, thinking
from dflash_local.app.default_model import default_model
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.console import Console
from dflash_local.cli.fetch import obtain
from dflash_local.load_config import LoadConfig
from dflash_local.settings import Settings

if TYPE_CHECKING:
    from dflash_local.app.notices import Notify

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Invocation:
    """One command of this user."""

    user: Settings
    console: Console

    @classmethod
    def begin(cls) -> Invocation:
        """Read the settings; SettingsError where they are wrong."""
        user = settings.load()
        return cls(user, Console(user.environ))

    def default_model(self) -> str:
        """What is taken where no MODEL was given; says how to get a better one."""
        found = default_model(self.user)
        if found.hint:
            self.console.note(f"{found.name} is {found.hint}", "dim")
        return found.name

    def pair(self, model: str, drafter: str | None, load: LoadConfig) -> Pair:
        """The pair that a name means, after a download if the user agrees to one; see ``app.resolve.resolve``."""
        get = obtain(self.user, self.console, load.allow_mismatch)
        notify = self.console.notify
        suit = recommending.suited(load, self.user, notify)
        return resolve.resolve(model, drafter, self.user, notify, draft=load.draft, obtain=get, suit=suit)

    def thinks(self, pair: Pair, asked: bool | None) -> bool:
        """Whether replies think; see ``app.thinking.thinks``."""
        return thinking.thinks(pair, asked, self.user, self.console.notify)

    def measure(self, name: str, job: Callable[[Settings, Notify], Result]) -> Result:
        """Measure a model in a process of its own; see ``app.local_process.measure``."""
        from dflash_local.app.local_process import measure

        with self.console.progress():
            return measure(name, job, self.user, self.console.notify)
