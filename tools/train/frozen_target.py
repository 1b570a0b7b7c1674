"""A target that only reads: the transformers model's own layers, with attention over packed texts or over slots.

Any dense model whose layers all attend to everything; knows no text and no training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from dflash_local.adapt.windows import Windows
from dflash_local.config.features import AttentionConfig, LayerConfig, MLPConfig
from dflash_local.errors import UsageError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import load_target, placement
from dflash_local.models.shared_windows import Mask, attend, mask_of, same_text
from dflash_local.models.target_facts import TargetFacts
from tools.train.slot_kernels import attend_slots

ATTENTION = "own_text"
Rotary = tuple[torch.Tensor, torch.Tensor]


# The kernel stays out of the compiled layer: a copy of the cache that the compiler thinks safe would be ruin.
_attend_slots = torch._dynamo.disable(attend_slots)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: q [b, h, n, d]; with ``slot_keys`` each row is one slot's new token."""
    if "slot_keys" not in more:
        assert attention_mask is not None
        return attend(query, key, value, attention_mask, scaling).transpose(1, 2), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.flatten(1, 2).contiguous() for x in (query * scale, key, value))
    found = _attend_slots(q, k, v, more["slot_keys"], more["slot_values"], more["slot_at"])
    return found.unsqueeze(1), None


AttentionInterface.register(ATTENTION, _attention)


def _run_layer(layer: nn.Module, hidden: torch.Tensor, rotary: Rotary, mask: Mask | None, **slot: Any) -> torch.Tensor:
    """One decoder layer [b, n, w] without transformers' cache."""
    output: Any = layer(
        hidden, attention_mask=mask, position_ids=None, past_key_values=None, position_embeddings=rotary, **slot
    )
    return output[0] if isinstance(output, tuple) else output


def _is_dense(layer: LayerConfig) -> bool:
    mixer = layer.mixer
    full = isinstance(mixer, AttentionConfig) and mixer.fits_sdpa and mixer.sliding_window is None
    return full and isinstance(layer.mlp, MLPConfig)


class FrozenTarget:
    """A loaded target in the two forms that the training needs.

    Args:
        model: a transformers ``...ForCausalLM`` in eval mode.
        facts: of the checkpoint it came from.
        compiled: layers go through torch.compile, one program for all of them.

    Raises:
        UsageError: not all layers attend to everything.
    """

    def __init__(self, model: Any, facts: TargetFacts, *, compiled: bool) -> None:
        decoder, known = model.get_decoder(), facts.model
        mixer = known.layers[0].mixer
        plain = known.final_logit_softcap is None and known.embedding_scale == 1.0
        if not plain or not isinstance(mixer, AttentionConfig) or any(not _is_dense(each) for each in known.layers):
            raise UsageError(f"{known.source}: drafters are trained for dense targets of full attention alone")
        model.set_attn_implementation(ATTENTION)
        self.facts, self.layers = facts, list(decoder.layers)
        self.embed, self._norm, self._rotary = decoder.embed_tokens, decoder.norm, decoder.rotary_emb
        self.head: torch.Tensor = model.get_output_embeddings().weight
        self.device, self.dtype = self.head.device, self.head.dtype
        self.heads, self.kv_heads, self.head_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        self._run: Callable[..., torch.Tensor] = torch.compile(_run_layer, dynamic=False) if compiled else _run_layer

    @classmethod
    def load(cls, path: Path, device: str) -> FrozenTarget:
        """A checkpoint by this program's own loader: bfloat16 and compiled on CUDA, float32 on a CPU."""
        files = Checkpoint.open(path)
        facts = TargetFacts.from_checkpoint(files)
        where = placement(device, "auto")
        return cls(load_target(files, facts, where), facts, compiled=where.device.startswith("cuda"))

    def taps_of(self, windows: Windows, layers: Sequence[int]) -> torch.Tensor:
        """See ``adapt.trainer.Teacher``."""
        texts = windows.texts
        seen = mask_of(same_text(texts), len(texts), texts.shape[1], texts.shape[1], self.device)
        return self.taps(windows.ids, windows.places, seen, layers)

    @torch.no_grad()
    def taps(self, ids: torch.Tensor, places: torch.Tensor, mask: Mask, layers: Sequence[int]) -> torch.Tensor:
        """Outputs of ``layers`` side by side [b, s, layers x w] for ids [b, s] at places [b, s] of their texts."""
        hidden = self.embed(ids)
        rotary: Rotary = self._rotary(hidden, places)
        found = {}
        run = _run_layer if isinstance(mask, torch.Tensor) else self._run  # dense masks come in many shapes
        for index, layer in enumerate(self.layers[: max(layers) + 1]):
            hidden = run(layer, hidden, rotary, mask)
            if index in layers:
                found[index] = hidden
        return torch.cat([found[layer] for layer in layers], -1)

    @torch.no_grad()
    def next_logits(
        self, ids: torch.Tensor, at: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, compiled: bool = True
    ) -> torch.Tensor:
        """Logits [b, vocabulary] behind ids [b] at places ``at`` [b]; what they leave goes into keys and values.

        Args:
            keys, values: [layers, b, kv, room, d].
            compiled: False where the shape comes once.
        """
        hidden = self.embed(ids.unsqueeze(1))
        rotary: Rotary = self._rotary(hidden, at.unsqueeze(1))
        run = self._run if compiled else _run_layer
        for index, layer in enumerate(self.layers):
            slot = {"slot_keys": keys[index], "slot_values": values[index], "slot_at": at}
            hidden = run(layer, hidden, rotary, None, **slot)
        return nn.functional.linear(self._norm(hidden.squeeze(1)), self.head)
