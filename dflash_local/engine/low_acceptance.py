"""Why a pair's acceptance may be below its band: each cause only where it can be true. Torch-free."""

from __future__ import annotations

from dflash_local.loaded import SessionFacts


def likely_causes(facts: SessionFacts, thinking: bool | None, templated: bool = True) -> tuple[str, ...]:
    """The likeliest first.

    Args:
        thinking: whether replies think; None where that is not known. templated: the prompt went through the target's
            chat template.
    """
    found = [
        _of_thinking(facts.trained_thinking, thinking),
        "the prompt did not go through the chat template" if not templated else _of_template(facts),
        "" if facts.generation_checked else "a drafter of another generation or target",
        "the drafter is computed in float16, which it may overflow: --dtype bfloat16" if _in_float16(facts) else "",
        _of_numbers(facts),
        f"a fine-tune that is far from {facts.tuned_from}" if facts.tuned_from is not None else "",
    ]
    return tuple(filter(None, found))


def _of_thinking(trained: str | None, thinking: bool | None) -> str:
    if trained == "required" and thinking is False:
        return "thinking is off, and the drafter was trained on replies that think"
    if trained == "off" and thinking:
        return "thinking is on, and the drafter was trained without"
    return ""


def _of_template(facts: SessionFacts) -> str:
    """The published pair has the template that the drafter was trained with; of other targets nobody knows."""
    if facts.tuned_from is None and facts.generation_checked:
        return ""
    return "a chat template unlike the one that the drafter was trained with"


def _in_float16(facts: SessionFacts) -> bool:
    return facts.dtype == "float16"


def _of_numbers(facts: SessionFacts) -> str:
    """What of the two is quantised, which the drafter was trained without."""
    target = facts.load.quantize or facts.stored
    precision = facts.load.drafter_precision
    parts = [f"the target in {target}"] if target else []
    parts += [f"drafter precision {precision}"] if precision not in ("auto", "full") else []
    return f"quantisation: {', '.join(parts)}" if parts else ""
