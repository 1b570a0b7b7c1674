"""Pictures of the terminal screens as SVG, of ``smollm2`` where it is here: ``make screenshots``; one is in the docs.

Usage: python tests/ui/make_screenshots.py FOLDER DOCS_FOLDER
       python tests/ui/make_screenshots.py --snapshots   (the pictures that the tests compare: ``make snapshots``)
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dflash_local import settings  # noqa: E402
from dflash_local.app.default_model import default_model  # noqa: E402
from dflash_local.app.resolve import resolve  # noqa: E402
from dflash_local.catalog.bundled import Pair  # noqa: E402
from dflash_local.engine.load_pair import load  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.planner.occupancy import occupancy  # noqa: E402
from dflash_local.service.backend import Backend  # noqa: E402
from dflash_local.service.chat_options import ChatOptions  # noqa: E402
from dflash_local.ui.tui.app import ChatApp  # noqa: E402
from tests.ui.pictures import FOLDER, FONTS, SCENES, draw, other_versions, without_web_fonts  # noqa: E402
from tests.ui.stage import ScriptedChat, ScriptedSession, Stage  # noqa: E402

SIZES = {"narrow": (80, 24), "middle": (120, 36), "wide": (200, 50)}
THEMES = {"dark": "textual-dark", "light": "textual-light"}
DOCS = {"chat": "chat-middle-dark"}
PROMPT = "Write a Python function that returns the n-th Fibonacci number."


async def shoot(session: Backend, pair: Pair, folder: Path, size: str, theme: str) -> None:
    """The chat, the same by origin, and a race."""
    chat = ScriptedChat(ChatOptions({"temperature": 0.0}), lambda *_: session, pair=pair)
    chat.read = lambda: occupancy("cpu", {})
    greeting = f"Talking to {pair.label}. F1 shows the keys, / the commands."
    stage = Stage(ChatApp(chat, greeting), chat, ScriptedSession())

    def save(name: str) -> None:
        path = folder / f"{name}-{size}-{theme}.svg"
        path.write_text(without_web_fonts(stage.app.export_screenshot(title="dflash")), encoding="utf-8")

    async with stage.app.run_test(size=SIZES[size]) as pilot:
        stage.pilot = pilot
        stage.app.theme = THEMES[theme]
        await stage.idle()
        await stage.send(PROMPT)
        await pilot.pause(0.3)
        save("chat")
        await pilot.press("f3")
        await pilot.pause(0.3)
        save("origins")
        await pilot.press("f5")
        await stage.until(lambda: getattr(getattr(stage.app.screen, "run_of", None), "replaying", False), seconds=600)
        await pilot.press("space")
        await pilot.pause(0.3)
        save("race")
    stage.app.finish()


def stamped(svg: str) -> str:
    """A picture with TOY across it: its figures are of a toy pair."""
    if ">TOY</text>" in svg:
        return svg
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    x, y = f"{width / 2:g}", f"{height / 2:g}"
    font = f'font-family="{FONTS}" font-size="{width / 5:g}" font-weight="bold" text-anchor="middle"'
    colour = 'fill="#ff7043" fill-opacity="0.28"'
    text = f'<text x="{x}" y="{y}" {font} {colour} transform="rotate(-18 {x} {y})">TOY</text>'
    return svg.replace("</svg>", f"{text}\n</svg>")


def main(folder: Path, docs: Path) -> None:
    """Every picture into ``folder``, and that of the docs into ``docs``."""
    folder.mkdir(parents=True, exist_ok=True)
    user = settings.load()
    pair = resolve(default_model(user).name, None, user, lambda _: None)
    with closing(load(pair, LoadConfig(device="cpu"), None)) as session:
        for size in SIZES:
            for theme in THEMES:
                asyncio.run(shoot(session, pair, folder, size, theme))
    docs.mkdir(parents=True, exist_ok=True)
    for name, source in DOCS.items():
        picture = (folder / f"{source}.svg").read_text(encoding="utf-8")
        (docs / f"{name}.svg").write_text(stamped(picture) if pair.toy else picture, encoding="utf-8")


def snapshots() -> None:
    """Renew the pictures that the tests compare."""
    if others := other_versions():
        sys.exit(f"the pictures are drawn with the versions of constraints.txt; installed: {others}")
    FOLDER.mkdir(exist_ok=True)
    for name, scene in SCENES.items():
        (FOLDER / f"{name}.svg").write_text(draw(scene), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--snapshots"]:
        snapshots()
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
