"""A race as a terminal recording, asciicast v2 (docs.asciinema.org/manual/asciicast/v2): two lanes at true speed."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from dflash_local.service.race import NAMES, Lane, Race
from dflash_local.service.race_lanes import Track, level, rate_so_far, speed_text
from dflash_local.tables import counted
from dflash_local.terminal import safe_line

if TYPE_CHECKING:
    from dflash_local.report.race_file import About

WIDTH, HEIGHT = 100, 28
INNER = 45  # cells of text in a lane: two frames of two cells each side, and two cells between the lanes
ROWS = 18  # lines of text in a lane
FRAME_S = 0.04  # steps that are closer are drawn as one
HOLD_S = 3.0  # the end is shown so long before a player begins anew
RESET, BOLD, DIM, GREEN, BLUE = "\x1b[0m", "1", "2", "32", "34"
OWN, FLASH, BADGE = "4;33", "48;5;22", "1;7;32"
Line = tuple[int, int]  # first character of the lane's text, and the one behind the last


def to_cast(race: Race, about: About) -> bytes:
    """Every line of the recording draws the rows of the screen that changed."""
    lanes = [_Shown(lane) for lane in (race.ar, race.dflash)]
    end = max(lane.lane.seconds for lane in lanes)
    header = {
        "version": 2,
        "width": WIDTH,
        "height": HEIGHT,
        "duration": end + HOLD_S,
        "title": f"dflash race: {race.headline[0]} · {about.title}",
        "command": about.command,
        "env": {"TERM": "xterm-256color"},
    }
    lines: list[object] = [header]
    before: list[str] = [""] * HEIGHT
    for time in _times(lanes, end):
        rows = _screen(race, about, lanes, time, time >= end)
        changed = [f"\x1b[{at};1H\x1b[2K{row}" for at, row in enumerate(rows, 1) if row != before[at - 1]]
        start = "" if len(lines) > 1 else "\x1b[?25l\x1b[2J"
        lines.append([round(time, 6), "o", start + "".join(changed)])
        before = rows
    lines.append([round(end + HOLD_S, 6), "o", "\x1b[?25h"])
    return "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines).encode("ascii")


def _times(lanes: list[_Shown], end: float) -> list[float]:
    """When the screen changes: the beginning, the end, and between them no two closer than ``FRAME_S``."""
    frames = {-int(-time // FRAME_S) * FRAME_S for lane in lanes for time in lane.times}
    return [0.0, *sorted(time for time in frames if 0 < time < end), end]


def _screen(race: Race, about: About, lanes: list[_Shown], time: float, over: bool) -> list[str]:
    ends = [lane.lines_by(time) for lane in lanes]
    top = level(ends, ROWS)
    ratio, under = race.headline
    columns = [lane.column(time, top, over and lane.lane.mode == race.winner) for lane in lanes]
    won = GREEN if race.winner == "dflash" else BLUE
    first, second, *_ = [under[start:stop] for start, stop in _wrapped(under, WIDTH - len(ratio) - 3)] + ["", ""]
    result = [f"{_styled(f' {ratio} ', f'1;7;{won}')} {_styled(first, BOLD)}", _styled(second, BOLD)]
    return [
        _styled(_cut(f"dflash race · {safe_line(about.title)}", WIDTH), BOLD),
        _styled(_cut(safe_line(about.prompt), WIDTH), DIM),
        *(f"{plain}  {drafted}" for plain, drafted in zip(*columns)),
        *(result if over else ["", ""]),
        _styled(_cut(safe_line(_place(about.source)), WIDTH), DIM),
    ]


def _place(source: Mapping[str, Any]) -> str:
    """What it was run with and on, after what must be known of a toy."""
    machine, server = source.get("machine"), source.get("server")
    here = [machine["device"]["name"], machine["processor"], f"{machine['cores']} cores"] if machine else []
    there = [f"{server['program']} {server['version'] or ''}"] if server else []
    program = f"dflash-local {source['versions']['dflash-local']}"
    return " · ".join(filter(None, (source.get("note"), program, *there, *here)))


class _Shown:
    """One of the two replies, laid out once: what is shown at a time is the beginning of it.

    Attributes:
        times: when steps came. lines: those of the whole text.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._blocks = Track.of(lane).blocks
        self.times = [block.t_s for block in self._blocks]
        self._text, self._styles = "", list[str]()
        self._came: list[tuple[int, int]] = [(0, 0)]  # characters and tokens after so many blocks
        for block in self._blocks:
            for piece in block.pieces:
                text = piece.text.replace("\t", "    ")
                own = piece.origin == "bonus" and lane.mode == "dflash"
                self._text += text
                self._styles += [DIM if piece.channel == "thinking" else OWN if own else ""] * len(text)
            self._came.append((len(self._text), self._came[-1][1] + block.tokens))
        self.lines = list(_wrapped(self._text, INNER))

    def _steps_by(self, time: float) -> int:
        return bisect_right(self.times, time + 1e-9)  # frames stand on multiples of FRAME_S

    def lines_by(self, time: float) -> int:
        shown = self._came[self._steps_by(time)][0]
        return sum(start < shown for start, _ in self.lines)

    def column(self, time: float, top: int, won: bool) -> list[str]:
        """Its frame with what is in it, from line ``top``; it lights up where it ``won``."""
        steps = self._steps_by(time)
        done = time >= self.lane.seconds
        border = f"1;{GREEN}" if won else DIM
        side = _styled("│", border)
        counted = 1 if self.lane.token_ids else 0  # characters where a server names no tokens
        share = 1.0 if done else self._came[steps][counted] / max(1, self._came[-1][counted])
        full = round(INNER * share)
        colour = GREEN if self.lane.mode == "dflash" else BLUE
        inside = [
            _styled("━" * full, colour) + _styled("─" * (INNER - full), DIM),
            _styled(set_cell_size(self._live(time, steps, done), INNER), BOLD if done else ""),
            "",
            *(self._row(line, steps, done) for line in self.lines[top : top + ROWS]),
        ]
        name = f"─ {NAMES[self.lane.mode]} "
        rows = [f"{side} {row or ' ' * INNER} {side}" for row in inside + [""] * (ROWS + 3 - len(inside))]
        over = _styled("╭" + name + "─" * (INNER + 2 - len(name)) + "╮", border)
        return [over, *rows, _styled("╰" + "─" * (INNER + 2) + "╯", border)]

    def _live(self, time: float, steps: int, done: bool) -> str:
        tokens = self.lane.tokens if done else self._came[steps][1]
        rate = self.lane.finished.stats.tokens_per_s if done else None
        if not done and steps:
            rate = rate_so_far(self._blocks[0], self._blocks[steps - 1], tokens)
        clock = f"{min(time, self.lane.seconds):.2f} s{' · done' if done else ''}"
        return f"{speed_text(rate)} tok/s · {counted(tokens, 'token')} · {clock}"

    def _row(self, line: Line, steps: int, done: bool) -> str:
        """A line as far as it has come; the last block of the drafted reply is lit, its count behind it."""
        shown = self._came[steps][0]
        lit = self._came[steps - 1][0] if steps and self.lane.mode == "dflash" and not done else shown
        start, stop = line[0], min(line[1], shown)
        parts, at = list[str](), start
        while at < stop:
            end = at + 1
            while end < stop and self._styles[end] == self._styles[at] and (end >= lit) == (at >= lit):
                end += 1
            parts.append(_styled(self._text[at:end], ";".join(filter(None, (self._styles[at], FLASH * (at >= lit))))))
            at = end
        cells = cell_len(self._text[start:stop]) if stop > start else 0
        came = self._came[steps][1] - self._came[steps - 1][1] if steps else 0
        last = line[0] < shown <= line[1] or shown == line[1] + 1 and self._text[line[1]] == "\n"
        badge = f"+{came}" if last and lit < shown and came else ""
        if badge and cells + len(badge) <= INNER:
            parts.append(_styled(badge, BADGE))
            cells += len(badge)
        return "".join(parts) + " " * (INNER - cells)


def _wrapped(text: str, width: int) -> Iterator[Line]:
    """Lines of at most so many cells, broken behind spaces where there are some; a line end belongs to no line."""
    start = 0
    for line in text.split("\n"):
        end = start + len(line)
        at, cells, space = start, 0, start
        for here in range(start, end):
            size = cell_len(text[here])
            if cells + size > width:
                cut = space if space > at else here
                yield at, cut
                at, cells = cut, cell_len(text[cut:here])
            cells += size
            space = here + 1 if text[here] == " " else space
        yield at, end
        start = end + 1


def _styled(text: str, codes: str) -> str:
    return f"\x1b[{codes}m{text}{RESET}" if codes and text else text


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
