"""How long a reply thought, for the title of what it thought."""

from __future__ import annotations

from dflash_local.events import Channel, Step


class ThinkingTime:
    """Counts the tokens of a reply's thinking, and the seconds until the last of them."""

    def __init__(self) -> None:
        self._channel: Channel = "final"
        self._began: float | None = None
        self._tokens, self._seconds = 0, 0.0

    def take(self, step: Step) -> None:
        """Count one step in."""
        self._began = step.t_s if self._began is None else self._began
        self._channel = step.pieces[-1].channel if step.pieces else self._channel
        if self._channel == "thinking":
            self._tokens, self._seconds = self._tokens + len(step.token_ids), step.t_s - self._began

    @property
    def title(self) -> str:
        """Says both; neither of a conversation that was taken up."""
        return f"Thinking ({self._tokens} tokens, {self._seconds:.1f} s)" if self._tokens else "Thinking"
