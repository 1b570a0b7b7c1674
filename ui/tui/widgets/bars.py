"""Bars made of characters: shares of a whole, one to a line, with their number beside them."""

from __future__ import annotations

EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, width: int) -> str:
    """A bar that fills ``share`` (0..1) of ``width`` cells, to an eighth of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def position_lines(shares: tuple[float, ...], width: int) -> list[str]:
    """One line for each draft position: its number, a bar, per cent."""
    room = max(4, width - 8)
    return [f"{slot:2d} {bar(share, room)} {share:4.0%}" for slot, share in enumerate(shares, start=1)]


def split_line(split: tuple[float, float, float], width: int) -> str:
    """Draft, verify and other as one bar of three shades."""
    cells = [round(share * width) for share in split[:2]]
    return "█" * cells[0] + "▓" * cells[1] + "░" * max(0, width - sum(cells))
