"""A target's layer for multi-token prediction: transformers' own decoder layer over a cache, drafting in a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from dflash_local.drafters.engines import Drafts
from dflash_local.drafters.kinds import read_drafter
from dflash_local.drafters.mtp.layout import PREFIX, MTPConfig
from dflash_local.load_config import LoadConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.decoded_tensors import decoded
from dflash_local.models.packed_linear import pack_linears
from dflash_local.models.transformers_target import KVCache, LayerInputs, TransformersTarget

if TYPE_CHECKING:
    from dflash_local.engine.sampling import Sampler

RANDOM_STD = 0.02


class MTPLayer(nn.Module):
    """The layer, without weights and without state; its parameters have the names of the checkpoint."""

    def __init__(self, target: TransformersTarget) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * target.hidden_size, target.hidden_size, bias=False, device="meta")
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = target.new_norm(), target.new_norm()
        self.layers = nn.ModuleList([target.new_layer()])
        self.norm = target.new_norm()

    def join(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the decoder layer takes [.., H] of the next tokens' embeddings and hidden states [.., H]."""
        both = (self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden))
        joined: torch.Tensor = self.fc(torch.cat(both, -1))
        return joined

    def forward(self, x: torch.Tensor, inputs: LayerInputs, cache: KVCache) -> torch.Tensor:
        """Return rows [B, M, H] after ``norm``; their keys and values go behind the cached ones."""
        cos, sin = inputs.rotary
        output = self.layers[0](
            x,
            attention_mask=inputs.masks.get("full_attention"),
            position_ids=inputs.positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=(cos.to(x.device), sin.to(x.device)),  # of another GPU, where a target lies on several
        )
        normed: torch.Tensor = self.norm(output)
        return normed


class MTPProposer:
    """The layer with its cache, bound to its target.

    A position's row joins its hidden state and the id behind it. So hidden states are kept as they come, rows are run
    when drafts are asked for, and the last one is run again: the id behind it, the anchor, may become another.
    """

    def __init__(self, config: MTPConfig, layer: MTPLayer, target: TransformersTarget) -> None:
        self.config, self.layer, self.target = config, layer.eval().requires_grad_(False), target
        self._hidden: list[torch.Tensor] = []  # [H] of each committed position
        self._cache = KVCache()  # of the rows behind which a committed id stands

    @classmethod
    def load(
        cls, files: Checkpoint, target: TransformersTarget, options: LoadConfig, packed: bool
    ) -> tuple[MTPProposer, tuple[str, ...]]:
        """See ``drafters.engines.LoadableProposer``."""
        config = cast(MTPConfig, read_drafter(files.config, files.source.config_file))
        tensors = decoded(files, files.tensors, config.model, target.device, target.dtype)
        layer = MTPLayer(target)
        layer.load_state_dict({name.removeprefix(PREFIX): each for name, each in tensors.items()}, assign=True)
        if packed:
            pack_linears(layer)
        return cls(config, layer, target), config.notices(options)

    @classmethod
    def random(cls, config: MTPConfig, target: TransformersTarget) -> MTPProposer:
        layer = MTPLayer(target).to_empty(device=target.device).to(target.dtype)
        for weight in layer.parameters():
            nn.init.normal_(weight, std=RANDOM_STD)
        return cls(config, layer, target)

    @property
    def length(self) -> int:
        return len(self._hidden)

    def extend(self, taps: torch.Tensor, start: int) -> None:
        """Keep the hidden states of newly committed tokens."""
        assert start == self.length
        hidden = self.target.norm(taps.unsqueeze(0)) if self.config.normed else taps.clone()
        self._hidden += hidden.unbind()

    def truncate(self, length: int) -> None:
        del self._hidden[length:]
        self._cache.length = min(self._cache.length, max(length - 1, 0))

    def hold(self) -> tuple[torch.Tensor | None, KVCache]:
        return torch.stack(self._hidden) if self._hidden else None, self._cache.copy()

    def put(self, held: tuple[torch.Tensor | None, KVCache]) -> None:
        hidden, cache = held
        self._cache = cache.copy()
        self._hidden = [] if hidden is None else list(hidden.unbind())

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        drafts, margins = list[torch.Tensor](), list[torch.Tensor]()
        hidden = self._catch_up(ids)
        for i in range(count):
            if drafts:
                hidden = self._run(drafts[-1], hidden)
            logits = self.target.head(hidden)
            draft, margin = sampler.draft(logits, None if noise is None else noise[i : i + 1])
            drafts.append(draft)
            margins.append(margin)
        self._cache.length = self.length - 1  # what was run for drafts alone, and with the anchor, is forgotten
        return Drafts(torch.cat(drafts), torch.cat(margins))

    def _catch_up(self, ids: Sequence[int]) -> torch.Tensor:
        """Run all rows whose ids are known now; return the last one's output [1, H]."""
        for start in range(self._cache.length, self.length, self.target.prefill_chunk):
            end = min(start + self.target.prefill_chunk, self.length)
            behind = torch.tensor(ids[start + 1 : end + 1], device=self.target.device)
            output = self._run(behind, torch.stack(self._hidden[start:end]))
        return output[-1:]

    def _run(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output [M, H] of the rows that come next, of ids [M] and hidden states [M, H] before them."""
        x = self.layer.join(self.target.embed(ids), hidden).unsqueeze(0)
        output: torch.Tensor = self.layer(x, self.target.inputs(self._cache.length, x), self._cache)
        self._cache.length += len(ids)
        return output[0]


PROPOSER = MTPProposer
