"""Where each token of a reply came from, shown by more than a colour; the same words and marks on every screen."""

from __future__ import annotations

from dflash_local.events import Piece

LEGEND = "underlined: drafted and accepted; ‹in marks›: chosen by the target itself"


def marked(piece: Piece) -> str:
    """Return the text; a token of the target's own stands in marks, a line end stays one."""
    if piece.origin == "accepted":
        return piece.text
    core = piece.text.strip()
    if not core:
        return f"‹↵›{piece.text}" if "\n" in piece.text else f"‹␣›{piece.text[1:]}"
    before, _, after = piece.text.partition(core)
    return f"{before}‹{core}›{after}"
