"""Logits of a whole text from plain transformers: one forward, none of our caches, masks or recurrent layers.

The weights are those already loaded, so nothing is held twice: where the engine put its own
Gated-DeltaNet, the model's own module is rebuilt around the same tensors for the time of the pass.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dflash_local.errors import EngineError
from dflash_local.models.reference_delta_net import ReferenceGatedDeltaNet

Load = Callable[[], Any]
REFERENCE = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")  # what a prompt pass calls


class Oracle:
    """Plain transformers' opinion of greedy replies; ``load`` gives the model where the target has none."""

    def __init__(self, target: Any, load: Load | None) -> None:
        self._model = getattr(target, "model", None)
        self._load = load
        self._refusal = "the fused engine holds no transformers model; --engine reference checks against it"

    def rows(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[torch.Tensor | None, str]:
        """Logits [n, V] as ``plain_rows`` gives them; None, and why, where they cannot be had."""
        try:
            if self._model is None and self._load is not None:
                self._refusal = "no memory for the model beside the engine's own"
                load, self._load = self._load, None
                self._model = load()
            if self._model is None:
                return None, self._refusal
            return plain_rows(self._model, prompt, text), ""
        except torch.OutOfMemoryError:
            if self._model is None:
                return None, self._refusal
            return None, f"no memory for one forward over {len(prompt) + len(text)} tokens"


@torch.inference_mode()
def plain_rows(model: Any, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """Logits [n, V] on the CPU, row i of which chooses token i of ``text``; ``model`` is that of a session's target."""
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[*prompt, *text[:-1]]], device=device)
    # cuDNN's convolutions use TF32 unless told otherwise, which float32 must not see.
    with _own_layers(model), _reference_functions(model), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(text)).logits
    return logits[0].cpu()  # type: ignore[no-any-return]


@contextmanager
def _own_layers(model: Any) -> Iterator[None]:
    """The model as transformers built it, ours again afterwards."""
    decoder = model.get_decoder()
    ours = {index: getattr(layer, "linear_attn", None) for index, layer in enumerate(decoder.layers)}
    ours = {index: module for index, module in ours.items() if isinstance(module, ReferenceGatedDeltaNet)}
    try:
        for index in ours:
            decoder.layers[index].linear_attn = _rebuilt(decoder.layers[index], decoder.config, index)
        yield
    finally:
        for index, module in ours.items():
            decoder.layers[index].linear_attn = module


@contextmanager
def _reference_functions(model: Any) -> Iterator[None]:
    """transformers' readable torch code also where a kernel library would replace it and multiply float32 in TF32."""
    room = vars(sys.modules[type(model).__module__])
    before = {name: room[name] for name in REFERENCE if name in room}
    room.update({name: inspect.unwrap(function) for name, function in before.items()})
    try:
        yield
    finally:
        room.update(before)


def _rebuilt(layer: Any, config: Any, index: int) -> nn.Module:
    """transformers' own token mixer of this layer around the tensors of ours."""
    room = vars(sys.modules[type(layer).__module__])
    kinds = [value for name, value in room.items() if name.endswith("GatedDeltaNet") and isinstance(value, type)]
    if len(kinds) != 1:
        raise EngineError(f"transformers' recurrent layer was not found beside {type(layer).__name__}")
    with torch.device("meta"):
        plain: nn.Module = kinds[0](config, index)
    source = layer.linear_attn
    held = dict(source.named_children())
    for name in [name for name, _ in plain.named_children() if name in held]:
        setattr(plain, name, held[name])
    plain.A_log, plain.dt_bias = source.A_log, source.dt_bias
    return plain.train(source.training)
