"""A target out of a GGUF file that llama.cpp's converter wrote says what the checkpoint says that it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local.catalog.bundled import Pair
from dflash_local.engine.load import load
from dflash_local.events import Finished, Step
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Request, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"
TARGETS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
PROMPT = tuple(range(3, 40))
ENGINES = ("reference", "fused")
# The fused engine takes no biases of feed-forward projections, whatever the file.
RUNS = [(name, engine) for name in TARGETS for engine in ENGINES if (name, engine) != ("llama-biased", "fused")]


def reply(target: Path, engine: str) -> list[int]:
    session = load(Pair("target", target, None, bundled=False), LoadConfig(engine=engine, draft=False, device="cpu"))
    session.stop_ids = frozenset()  # a folder of random weights names none
    request = Request(prompt_ids=PROMPT, sampling=SamplingParams(), limits=Limits(max_new_tokens=24), mode="ar")
    events = list(session.generate(request))
    assert isinstance(events[-1], Finished)
    return [token for event in events if isinstance(event, Step) for token in event.token_ids]


@pytest.mark.parametrize("name, engine", RUNS)
def test_a_file_and_its_source_reply_alike(name: str, engine: str) -> None:
    assert reply(GOLDEN / f"{name}.gguf", engine) == reply(GOLDEN / name, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["qwen35-v2-swa-b8", "qwen3-dflash2-b16"])
def test_a_drafter_out_of_a_file_drafts_as_its_source(name: str, engine: str) -> None:
    """Q8_0 rounds the drafter's weights, so that it may draft a little otherwise; the text never differs."""
    golden = GOLDEN.parent / name
    lengths = {}
    for drafter in (golden / "drafter", GOLDEN / f"drafter-{name}.gguf"):
        pair = Pair("pair", golden / "target", drafter, bundled=False)
        session = load(pair, LoadConfig(engine=engine, device="cpu"))
        request = Request(prompt_ids=PROMPT, limits=Limits(max_new_tokens=48))
        finished = list(session.generate(request))[-1]
        assert isinstance(finished, Finished)
        lengths[drafter.suffix] = finished.stats.acceptance_lengths
    assert abs(sum(lengths[""]) / len(lengths[""]) - sum(lengths[".gguf"]) / len(lengths[".gguf"])) < 0.5, lengths
