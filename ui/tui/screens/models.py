"""The pairs of the registry, to choose one from."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static

from dflash_local.terminal import safe_line
from dflash_local.ui.offers import Offer


class ModelsScreen(ModalScreen[Offer | None]):
    """A list over the chat; dismissed with what was chosen."""

    BINDINGS = [Binding("escape,f7,q", "dismiss", "Close")]
    CSS_PATH = "models.tcss"

    def __init__(self, offers: Sequence[Offer]) -> None:
        super().__init__()
        # What is here comes first, then what fits.
        self._offers = sorted(offers, key=lambda offer: (not offer.here, not offer.fits.startswith("fits")))

    def compose(self) -> ComposeResult:
        width = max((len(offer.name) for offer in self._offers), default=0)
        with Vertical(id="picker"):
            yield Static(
                f"{'Pair'.ljust(width)}  State    Download   Fits this machine", classes="heading", markup=False
            )
            yield OptionList(*(Content(_line(offer, width)) for offer in self._offers), markup=False)
            yield Static("Enter talks to it, or downloads it first. Esc closes this.", classes="heading")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Chosen."""
        self.dismiss(self._offers[event.option_index])


def _line(offer: Offer, width: int) -> str:
    state = "-" if offer.state == "absent" else offer.state
    return safe_line(f"{offer.name.ljust(width)}  {state:8s} {offer.size:>10s}  {offer.fits}")
