"""The alarm of a low acceptance: causes in order, each only where it can be true for the load and the request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_local.catalog import bundled
from dflash_local.engine import load
from dflash_local.engine.reply_figures import likely_causes
from dflash_local.engine.session import Session
from dflash_local.events import Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from tests.engine.fused_sessions import fused_session
from tests.engine_sessions import BLOCK, ask, random_prompt, text_of
from tests.families import VOCAB
from tests.proposers import Oracle

LOADED = LoadConfig(engine="fused", dtype="bfloat16", device="cuda", context=64, drafter_precision="full")
KNOWN = SessionFacts("a/b", "c/d", 8, True, LOADED, trained_thinking="required", generation_checked=True)
EVERYTHING = replace(
    KNOWN,
    load=replace(LOADED, dtype="float16", quantize="int4", drafter_precision="8bit"),
    generation_checked=False,
    tuned_from="Qwen/Qwen3.5-9B",
)


def test_a_published_pair_used_as_trained_has_no_cause_of_its_own() -> None:
    assert likely_causes(KNOWN, True) == ()
    assert likely_causes(replace(KNOWN, trained_thinking="either"), False) == ()
    assert likely_causes(replace(KNOWN, trained_thinking=None), True) == ()


def test_all_stand_in_order() -> None:
    words = ("thinking is off", "chat template", "generation", "float16", "quantisation", "far from Qwen/Qwen3.5-9B")
    found = likely_causes(EVERYTHING, False)
    assert len(found) == len(words) and all(word in text for word, text in zip(words, found, strict=True)), found
    assert found[4] == "quantisation: the target in int4, drafter precision 8bit"


def planted(band: float, costs: dict[int, float], wrong_every: int = 4) -> Session:
    """A session over a known pair whose drafter is wrong once in so many positions."""
    text = text_of("qwen3", tuple(random_prompt(9)), 320)
    facts: dict[str, Any] = {"acceptance_band": band, "generation_checked": True, "trained_thinking": "required"}
    session = fused_session("qwen3", Oracle(VOCAB, text, wrong_every), 2000, **facts)
    session.runner.costs = costs  # type: ignore[misc]
    return session


CAUSES = "likely causes: the prompt did not go through the chat template; text unlike its training"


def test_a_band_is_that_of_whole_blocks() -> None:
    """A cycle of four rows writes four tokens at most, whatever the drafter is worth."""
    for block, alarms in ((4, 0), (BLOCK, 1)):
        notices = ask(planted(6.5, {}), random_prompt(9), 300, block_size=block).find(Notice)
        assert len(notices) == alarms
    stops = planted(1.9, {1: 1.0, 2: 1.7, BLOCK: 30.0}, 2)  # two rows pay nearly: 1.7 tokens of them are no low figure
    notice = ask(stops, random_prompt(9), 200).find(Notice)[0]
    assert "does not pay here: about 1.7" in notice.message and notice.level == "info"


def test_drafting_that_does_not_pay_names_them_below_the_band_alone() -> None:
    """Where drafts stop, too few whole blocks are left for the alarm."""
    for band, named in ((4.5, True), (1.5, False)):
        notices = ask(planted(band, {1: 1.0, BLOCK: 3.0}, 2), random_prompt(9), 200).find(Notice)
        (notice,) = [each for each in notices if "drafting does not pay here" in each.message]
        assert (CAUSES in notice.message) is named and (notice.level == "warning") is named


def test_a_load_remembers_what_decides_them() -> None:
    pair = replace(bundled.find("demo"), tuned_from="demo")
    for allowed in (False, True):
        session = load(pair, LoadConfig(device="cpu", allow_mismatch=allowed))
        facts = session.facts
        session.close()
        assert (facts.trained_thinking, facts.tuned_from, facts.generation_checked) == ("off", "demo", not allowed)
        assert SessionFacts.from_dict(facts.as_dict()) == facts
