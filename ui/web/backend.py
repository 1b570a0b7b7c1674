"""What the command line hands to the page, so that the page need not know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dflash_local.bench.prompts import Prompt
from dflash_local.events import Notice, PullProgress
from dflash_local.service.resident import Resident
from dflash_local.ui.offers import Offer


class Backend(Protocol):
    """The resident pair, and the commands that act on the pairs of this machine.

    Every method may be called from any thread and may take seconds or longer.
    """

    @property
    def resident(self) -> Resident:
        """The pair that page and endpoint share; ``resident.switch(name)`` changes it for both."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a newcomer should know of the pair that is served now (a toy, no GPU); often nothing."""
        ...

    @property
    def examples(self) -> Sequence[str]:
        """Prompts that the pair that is served now can do, to begin with."""
        ...

    def offers(self) -> Sequence[Offer]:
        """The pairs of the registry.

        Raises:
            DFlashError: the registry cannot be read.
        """
        ...

    def offer(self, name: str) -> Offer:
        """The pair of the registry that a name means: no other one, and no path, may come from a browser.

        Raises:
            UnknownModelError: none.
        """
        ...

    def details(self, name: str, columns: int) -> str:
        """What ``dflash show`` says of a pair, as plain text in lines of so many columns where that can be.

        Raises:
            DFlashError: no such pair.
        """
        ...

    def pull(self, name: str, hear: Callable[[PullProgress | Notice], None], cancelled: Callable[[], bool]) -> None:
        """Download and verify a pair.

        Raises:
            Interrupted: it was cancelled; finished files stay. DFlashError: it could not be had.
        """
        ...

    def removal(self, name: str) -> str:
        """What ``remove`` would delete and free, in words, for the question before it.

        Raises:
            DFlashError: nothing of it is here, or it is in use.
        """
        ...

    def remove(self, name: str) -> str:
        """Delete a pair's files that nobody else needs; says what was freed.

        Raises:
            DFlashError: nothing of it is here, or it is in use.
        """
        ...

    def bench_prompts(self) -> Sequence[Prompt]:
        """The built-in prompts for the pair that is served now: a toy has its own."""
        ...

    def about(self) -> Mapping[str, str]:
        """Versions, machine, pair and promise, in the order to be shown."""
        ...

    def provenance(self) -> Mapping[str, Any]:
        """Where figures come from, for files that are saved: versions, machine, pair; no names of hosts or users."""
        ...

    def certify(self, hear: Callable[[str, float], None], cancelled: Callable[[], bool]) -> Mapping[str, Any]:
        """The certificate of the pair that is served now, as ``dflash certify --json`` reports it.

        The pair is unloaded meanwhile, and loaded again by the next request.

        Raises:
            Interrupted: it was cancelled. DFlashError: it could not be made.
        """
        ...
