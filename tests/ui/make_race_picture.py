"""The README's race as a moving SVG, of a recording: ``dflash race --save race.cast``. ``make screenshots`` runs it.

Usage: python tests/ui/make_race_picture.py CAST SVG
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ui.make_screenshots import stamped  # noqa: E402
from tests.ui.pictures import CELL, FONTS, LINE  # noqa: E402

FRAMES = 60  # more of them make the file larger than a README should load
MARGIN = 16
BACK, TEXT = "#0d1117", "#e6edf3"
# The codes of ``report.race_cast``: colours of ink, and of the paper of a block that was just committed.
INK = {"2": "#9da7b3", "32": "#56d364", "33": "#ffb86b", "34": "#79b8ff"}
FLASH = "#173d22"
STYLE = f"""svg {{ font: 20px {FONTS}; fill: {TEXT}; }} text {{ white-space: pre; }}
.b {{ font-weight: bold; }} .u {{ text-decoration: underline; }}
g {{ opacity: 0; animation-timing-function: step-end; animation-iteration-count: infinite; }} .end {{ opacity: 1; }}
@media (prefers-reduced-motion: reduce) {{ g {{ animation: none !important; }} }}"""


class Run(NamedTuple):
    """Text of one style at its place on the screen, in cells."""

    row: int
    column: int
    codes: str
    text: str


def runs_of(row: int, shown: str) -> Iterator[Run]:
    column, codes = 0, ""
    for code, text in re.findall(r"\x1b\[([\d;]*)m|([^\x1b]+)", shown):
        if not text:
            codes = "" if code == "0" else code
            continue
        if text.strip() or codes:
            yield Run(row, column, codes, text)
        column += cell_len(text)


def frames_of(events: Sequence[Any], rows: int) -> list[list[Run]]:
    """The screen at equal distances of time; the last one is its end."""
    length = events[-1][0]
    screen, frames, left = [""] * rows, list[list[Run]](), list(events)
    for frame in range(FRAMES + 1):
        while left and left[0][0] <= length * frame / FRAMES + 1e-9:
            for row, shown in re.findall(r"\x1b\[(\d+);1H\x1b\[2K((?:[^\x1b]|\x1b\[[\d;]*m)*)", left.pop(0)[2]):
                screen[int(row) - 1] = shown
        frames.append([run for row, shown in enumerate(screen) for run in runs_of(row, shown)])
    return frames


def drawn(run: Run) -> str:
    """One run in its own place, so that no font can shift the frames."""
    codes = run.codes.split(";")
    x, y, width = MARGIN + CELL * run.column, MARGIN + LINE * run.row, CELL * cell_len(run.text)
    ink = next((colour for code, colour in INK.items() if code in codes), TEXT)
    paper = FLASH if "48" in codes else ""
    if "7" in codes:
        ink, paper = BACK, ink
    names = " ".join(name for code, name in (("1", "b"), ("4", "u")) if code in codes)
    kind = f' class="{names}"' if names else ""
    fill = f' style="fill:{ink}"' if ink != TEXT else ""
    behind = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{LINE}" fill="{paper}"/>' if paper else ""
    fit = f' textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"' if len(run.text) > 3 else ""
    return f'{behind}<text x="{x:.1f}" y="{y + 19:.1f}"{fit}{kind}{fill}>{escape(run.text)}</text>'


def moving(cast: str) -> str:
    """The recording as an SVG that plays for ever; where motion is unwanted or unknown it shows the end."""
    header, *events = map(json.loads, cast.splitlines())
    frames = frames_of(events, header["height"])
    since: dict[Run, int] = {}
    spans: dict[tuple[int, int], list[Run]] = {}  # what is shown from one frame until before another
    for at, frame in enumerate([*frames, []]):
        for run in set(since) - set(frame):
            spans.setdefault((since.pop(run), at), []).append(run)
        since |= dict.fromkeys((run for run in frame if run not in since), at)
    styles, groups = [STYLE], list[str]()
    for (start, end), runs in sorted(spans.items()):
        picture = "".join(map(drawn, sorted(runs)))
        if end > FRAMES and start == 0:
            groups.append(picture)
            continue
        before = f"0%{{opacity:0}}{100 * start / FRAMES:.4g}%{{opacity:1}}" if start else "0%{opacity:1}"
        after = "" if end > FRAMES else f"{100 * end / FRAMES:.4g}%{{opacity:0}}"
        name, last = f"f{start}-{end}", "1" if end > FRAMES else "0"
        styles.append(f"@keyframes {name}{{{before}{after}to{{opacity:{last}}}}}")
        kind = ' class="end"' if end > FRAMES else ""
        groups.append(f'<g{kind} style="animation-name:{name};animation-duration:{events[-1][0]:.2f}s">{picture}</g>')
    width, height = 2 * MARGIN + CELL * header["width"], 2 * MARGIN + LINE * header["height"]
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.1f} {height:.1f}"'
    style = "\n".join(styles)
    parts = [f"<style>{style}</style>", f'<rect width="100%" height="100%" rx="8" fill="{BACK}"/>', *groups]
    label = f'role="img" aria-label="{escape(header["title"])}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>\n' + "\n".join(parts) + "\n</svg>\n"


def main(cast: Path, svg: Path) -> None:
    """Draw it, with TOY across it where its pair is one."""
    text = cast.read_text(encoding="ascii")
    picture = moving(text)
    svg.write_text(stamped(picture) if "(toy pair)" in text.partition("\n")[0] else picture, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
