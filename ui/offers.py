"""A pair of the registry as the screens offer it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """A pair that can be chosen.

    Attributes:
        state: bundled, local, partial or absent. fits: the memory plan's word on this machine.
        size: of its download, as text.
    """

    name: str
    state: str
    fits: str
    size: str

    @property
    def here(self) -> bool:
        """True when nothing has to be downloaded."""
        return self.state in ("bundled", "local")
