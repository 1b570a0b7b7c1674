"""A pair of the registry as the screens offer it."""

from __future__ import annotations

from collections.abc import Iterable
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

    @property
    def fine(self) -> bool:
        """True when nothing known speaks against downloading it."""
        return self.fits.startswith(("fits", "unknown"))

    @property
    def question(self) -> str:
        """What a download takes and whether it runs here afterwards, in two lines."""
        part = "; a part of it is here already" if self.state == "partial" else ""
        return f"It takes {self.size or 'unknown'} of disk{part}.\n{self._verdict}."

    @property
    def _verdict(self) -> str:
        said = {
            "unknown": "Whether it fits this machine is not known before its configuration is here",
            "server": "It runs on a server only",
            "target alone": "It fits this machine without its drafter only",
        }
        if self.fits.startswith("fits"):
            return f"It fits this machine{self.fits.removeprefix('fits')}"
        return said.get(self.fits) or f"It {self.fits}, more than this machine has"


def in_order(offers: Iterable[Offer]) -> list[Offer]:
    """What is here first, else as they come: memory that others take or give back moves no row."""
    return sorted(offers, key=lambda offer: not offer.here)
