"""The reference engine's target against transformers' own forward: hidden states, taps and logits of every family."""

from __future__ import annotations

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


def test_a_soft_cap_of_another_familys_configuration_is_not_obeyed() -> None:
    model = random_model("qwen3")
    ids = torch.arange(8)
    with torch.inference_mode():
        want = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
        model.config.final_logit_softcapping = 0.1
        target = TransformersTarget(model)
        found = target.head(target.prefill(ids, False).hidden)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_a_window_without_a_list_of_layers_is_that_of_the_family() -> None:
    """Qwen3-MoE's configuration lists no types: all of its layers slide where its window is switched on."""
    model = random_model("qwen3_moe")
    model.config.sliding_window = 8
    ids = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
        target = TransformersTarget(model)
        found = target.head(target.prefill(ids, False).hidden)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
