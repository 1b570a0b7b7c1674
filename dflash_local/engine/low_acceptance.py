"""Why a pair's acceptance may be below its band: each cause only where it can be true. Torch-free."""

from __future__ import annotations

from dflash_local.loaded import SessionFacts


def likely_causes(facts: SessionFacts, thinking: bool | None, templated: bool = True) -> tuple[str, ...]:
    """The likeliest first. ``thinking``: of replies, None: not known. ``templated``: the chat template was applied."""
    found: list[str] = []
    if facts.trained_thinking == "required" and thinking is False:
        found.append("thinking is off, and the drafter was trained on replies that think")
    elif facts.trained_thinking == "off" and thinking:
        found.append("thinking is on, and the drafter was trained without")
    if not templated:
        found.append("the prompt did not go through the chat template")
    elif facts.tuned_from is not None or not facts.generation_checked:  # else it is the published pair
        found.append("a chat template unlike the one that the drafter was trained with")
    if not facts.generation_checked:
        found.append("a drafter of another generation or target")
    if facts.dtype == "float16":
        found.append("the drafter is computed in float16, which it may overflow: --dtype bfloat16")
    target, precision = facts.load.quantize or facts.stored, facts.load.drafter_precision
    quantised = [f"the target in {target}"] if target else []
    quantised += [f"drafter precision {precision}"] if precision not in ("auto", "full") else []
    if quantised:
        found.append(f"quantisation: {', '.join(quantised)}")
    if facts.tuned_from is not None:
        found.append(f"a fine-tune that is far from {facts.tuned_from}")
    return tuple(found)
