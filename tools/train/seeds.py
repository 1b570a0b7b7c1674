"""How a question may begin, by kind: what the target is given of its own user's turn. No torch here.

None is the beginning of a prompt that is held out, and none names the kind of text that is held out whole (scenes of a
play).
"""

from __future__ import annotations

import json
from pathlib import Path

_FILE = Path(__file__).with_suffix(".json")
SEEDS: dict[str, list[str]] = json.loads(_FILE.read_text(encoding="utf-8"))
# How often each kind is given. Explaining and rewriting are drafted worst: they get more.
SHARES = {"chat": 0.15, "explain": 0.24, "code": 0.12, "arithmetic": 0.11, "list": 0.11, "rewrite": 0.27}
KINDS = (*SEEDS, "free")  # free: the target says what it likes
FREE = 0.25
