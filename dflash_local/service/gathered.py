"""What came of a reply so far: its texts by channel, and how it ended. Knows events, nothing of who listens."""

from __future__ import annotations

from dflash_local.events import Channel, Event, Finished, Step


class Gathered:
    """The texts of one reply, added to by one thread and read by any.

    Attributes:
        finished: how it ended; None before, or when it failed.
    """

    def __init__(self) -> None:
        self._texts: dict[Channel, list[str]] = {"final": [], "thinking": [], "tool": []}
        self.finished: Finished | None = None

    def gather(self, event: Event) -> None:
        """Add what an event brought."""
        if isinstance(event, Step):
            for piece in event.pieces:
                self._texts[piece.channel].append(piece.text)
        elif isinstance(event, Finished):
            self.finished = event

    @property
    def text(self) -> str:
        """The answer as the model wrote it, calls of tools after its words."""
        return "".join((*self._texts["final"], *self._texts["tool"]))

    @property
    def thinking(self) -> str:
        """What was thought, as the model wrote it."""
        return "".join(self._texts["thinking"])

    @property
    def stopped(self) -> bool:
        """True when it was ended early."""
        return self.finished is not None and self.finished.reason == "cancelled"

    @property
    def worth_keeping(self) -> bool:
        """True when it ended and something came of it."""
        return self.finished is not None and (not self.stopped or bool(self.text or self.thinking))
