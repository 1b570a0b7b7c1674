"""The pictures that are kept and compared: their scenes, SVG without what changes by itself, and what differs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import unified_diff
from importlib.metadata import version
from pathlib import Path

from dflash_local.app.model_entries import ModelEntry
from dflash_local.events import Piece, Step
from dflash_local.planner.occupancy import Occupancy
from dflash_local.service.chat_options import ChatOptions
from tests.service.scripted import ScriptedSession
from tests.ui.stage import Play, Stage, play

FOLDER = Path(__file__).parent / "snapshots"
RENEW = "python tests/ui/make_screenshots.py --snapshots"
DRAWN_BY = ("textual", "rich", "pygments")  # other versions draw other pictures
FONTS = "DejaVu Sans Mono, Menlo, Consolas, monospace"
CELL = 12.2  # width of a character in the picture
LINE = 24.4
REPLY = """## Robots

A robot has **four** fields, `name` first:

1. a name
2. a speed, its weight and its owner, of whom there may be several

```python
@dataclass
class Robot:
    name: str = "r2"  # unique
```

> Speeds are in km/h.

| name | speed |
|------|------:|
| r2 | 4.5 |
"""
THOUGHTS = Step((Piece("which fields", "thinking"),), (1, 2, 3), 0, 0, 0, 0.5)
OFFERS = [
    ModelEntry("demo", "bundled", "fits", ""),
    ModelEntry("qwen3-8b", "local", "fits to 32,768 tokens", "17.4 GB"),
    ModelEntry("qwen3-4b", "absent", "fits to 8,192 tokens", "9.1 GB"),
    ModelEntry("gpt-oss-120b", "absent", "needs 64 GB", "65.2 GB"),
]


@dataclass(frozen=True)
class Scene:
    """One picture; ``act`` leads to it."""

    act: Play
    size: tuple[int, int]


async def _chat(stage: Stage) -> None:
    await stage.send("Write a class Robot")


async def _whole_chat(stage: Stage) -> None:
    await _chat(stage)
    await stage.until(lambda: "Thinking (3 tokens" in stage.screen_text)


async def _models(stage: Stage) -> None:
    stage.chat_session.registry = OFFERS
    await stage.press("f7")
    await stage.until(lambda: stage.app.screen is not stage.chat)


async def _race(stage: Stage) -> None:
    stage.chat.composer.put("Write a class Robot")
    await stage.press("f5")
    await stage.until(lambda: getattr(stage.app.screen, "race", None) is not None)
    await stage.press("space")
    await stage.until(lambda: "identical" in stage.screen_text)


SCENES = {
    "chat-80x24": Scene(_chat, (80, 24)),
    "chat-120x36": Scene(_whole_chat, (120, 36)),
    "models-80x24": Scene(_models, (80, 24)),
    "race-120x36": Scene(_race, (120, 36)),
}


def steps() -> list[Step]:
    """The reply in blocks: some tokens drafted, the last of each the target's own."""
    bits = [REPLY[at : at + 9] for at in range(0, len(REPLY), 9)]
    return [THOUGHTS] + [
        Step((Piece(bit[:-2], origin="accepted"), Piece(bit[-2:])), (4, 5, 6), 3, 2, 4, 0.6 + index * 0.01)
        for index, bit in enumerate(bits)
    ]


def draw(scene: Scene) -> str:
    """The picture of a scene, with colours whatever the environment wants."""
    drawn: list[str] = []

    async def act(stage: Stage) -> None:
        stage.chat_session.held = Occupancy()
        stage.chat.composer.cursor_blink = False
        await scene.act(stage)
        while len(drawn) < 2 or drawn[-1] != drawn[-2]:  # until nothing moves any more
            await stage.pilot.pause(0.05)
            drawn.append(normal(stage.app.export_screenshot(title="dflash", simplify=True)))

    colourless = os.environ.pop("NO_COLOR", None)
    try:
        play(act, ScriptedSession(steps=steps()), scene.size, ChatOptions({"temperature": 0.0, "seed": 7}))
    finally:
        if colourless is not None:
            os.environ["NO_COLOR"] = colourless
    return drawn[-1]


def without_web_fonts(svg: str) -> str:
    """The picture with a font that is there: a page that shows it asks no other host for one."""
    return re.sub(
        r"font-family: ?[^;]*Fira Code[^;]*;",
        f"font-family: {FONTS};",
        re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S),
    )


def normal(svg: str) -> str:
    """The picture without generated names, without fonts from elsewhere, a line for each part of it."""
    svg = re.sub(r"terminal-\d+-", "t-", without_web_fonts(svg))
    svg = re.sub(
        r' clip-path="url\(#t-line-\d+\)"', "", re.sub(r'<clipPath id="t-line-.*?</clipPath>', "", svg, flags=re.S)
    )
    svg = re.sub(r"(<(?:rect|text) )", r"\n\1", svg)
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def other_versions() -> str:
    """What is installed in another version than the pictures were drawn with; empty when nothing is."""
    pins = dict(
        line.split("==") for line in (FOLDER.parents[2] / "constraints.txt").read_text().split() if "==" in line
    )
    found = [f"{name} {version(name)}, not {pins[name]}" for name in DRAWN_BY if version(name) != pins[name]]
    return "; ".join(found)


def differences(kept: str, now: str) -> str:
    """Tell which parts of the picture are others, as a diff."""
    return "\n".join(unified_diff(kept.splitlines(), now.splitlines(), "kept", "now", n=0, lineterm=""))
