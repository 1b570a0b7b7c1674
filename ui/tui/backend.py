"""What the command line hands to the screens, so that these need not know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dflash_local.events import LoadProgress, Notice, PullProgress
from dflash_local.planner.occupancy import Occupancy
from dflash_local.service.conversation import Conversation
from dflash_local.ui.offers import Offer


@dataclass(frozen=True, slots=True)
class Notification:
    """One thing the program says to its user."""

    text: str
    level: Literal["note", "warning"] = "note"


Hear = Callable[[Notification | LoadProgress], None]


class Backend(Protocol):
    """A conversation with the commands that act on it.

    Attributes:
        commands: how each command is used, and what it does. greeting: what is said first.
        examples: prompts that the pair can do, to begin with.
    """

    @property
    def conversation(self) -> Conversation: ...

    @property
    def commands(self) -> Mapping[str, str]: ...

    @property
    def greeting(self) -> str: ...

    @property
    def examples(self) -> Sequence[str]: ...

    def attach(self, hear: Hear) -> None:
        """From now on ``hear`` is told what is said and how far a load is, from any thread."""
        ...

    def execute(self, line: str) -> None:
        """Run one line that begins with a slash; may take as long as loading a model.

        Raises:
            DFlashError: no such command, a bad argument, or it failed.
        """
        ...

    def offers(self) -> Sequence[Offer]:
        """The pairs of the registry; may take a second.

        Raises:
            DFlashError: the registry cannot be read.
        """
        ...

    def offer(self, name: str) -> Offer:
        """The pair that a name means; may take a second.

        Raises:
            DFlashError: no such pair.
        """
        ...

    def pull(self, name: str, hear: Callable[[PullProgress | Notice], None], cancelled: Callable[[], bool]) -> None:
        """Download and verify a pair, also one that will not fit into memory; from any thread.

        Raises:
            Interrupted: it was cancelled; says what is kept. DFlashError: it could not be had.
        """
        ...

    def memory(self) -> Occupancy:
        """How full the device of the loaded pair is; from any thread, may take seconds."""
        ...
