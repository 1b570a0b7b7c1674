"""The reference engine's target against transformers' own forward: hidden states, taps and logits of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_local.models.transformers_target import TransformersTarget
from tests.families import FAMILIES, VOCAB, random_model

TAPS = (0, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_taps_are_those_of_transformers(family: str) -> None:
    model = random_model(family)
    ids = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain = model(input_ids=ids.unsqueeze(0), use_cache=False, output_hidden_states=True)
        target = TransformersTarget(model, TAPS)
        found = target.prefill(ids[:-5], True), target.verify(ids[-5:], True)
        hidden, taps = (torch.cat([getattr(part, name) for part in found]) for name in ("hidden", "taps"))
        logits = target.head(hidden)
    torch.testing.assert_close(logits, plain.logits[0], rtol=1e-4, atol=1e-4)
    outputs = torch.cat([plain.hidden_states[layer + 1][0] for layer in TAPS], -1)  # the first is the embedding
    torch.testing.assert_close(taps, outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3", {"final_logit_softcapping": 0.1}), ("qwen3_moe", {"sliding_window": 8})]
)
def test_what_a_configuration_says_is_obeyed_as_its_family_does(family: str, changes: dict[str, Any]) -> None:
    """Qwen3 has no soft cap. Qwen3-MoE's lists no types of layers: all slide where its window is switched on."""
    model = random_model(family)
    vars(model.config).update(changes)
    ids = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
        target = TransformersTarget(model)
        found = target.head(target.prefill(ids, False).hidden)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
