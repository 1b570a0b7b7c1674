"""Bars made of characters: shares of a whole, one to a line, with their number beside them."""

from __future__ import annotations

EIGHTHS = " ▏▎▍▌▋▊▉█"
ONE_COLUMN = 8  # positions below each other; a block of 16 has 15


def bar(share: float, width: int) -> str:
    """A bar that fills ``share`` (0..1) of ``width`` cells, to an eighth of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def position_lines(shares: tuple[float, ...], width: int) -> list[str]:
    """Number, bar and per cent of each draft position, one to a line; beside each other where they are many."""
    columns = 1 if len(shares) <= ONE_COLUMN else 2
    room = max(4, (width - columns + 1) // columns - 8)
    shown = [f"{slot:2d} {bar(share, room)} {share:4.0%}" for slot, share in enumerate(shares, start=1)]
    height = -(-len(shown) // columns)
    return [" ".join(shown[at::height]) for at in range(height)]


def split_line(split: tuple[float, float, float], width: int) -> str:
    """Draft, verify and other as one bar of three shades."""
    cells = [round(share * width) for share in split[:2]]
    return "█" * cells[0] + "▓" * cells[1] + "░" * max(0, width - sum(cells))
