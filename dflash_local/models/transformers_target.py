"""Any transformers causal language model as a DFlash target: taps, block verify, exact rollback.

Runs the model's own decoder layers one by one over our caches: slow, exact, and the fused engine's oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from dflash_local.config.families import Family, of_model_type
from dflash_local.errors import CheckpointError
from dflash_local.layout.cycle import PREFILL_CHUNK
from dflash_local.models import row_attention
from dflash_local.models.packed_linear import can_pack
from dflash_local.models.recurrent_cache import RecurrentCache, RecurrentSnapshot
from dflash_local.models.reference_delta_net import ReferenceGatedDeltaNet

LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")


@dataclass(frozen=True, slots=True)
class Forward:
    """Hold what a pass over M tokens left: ``hidden`` [M, H] after the final norm; ``taps`` [M, taps x H] or None."""

    hidden: torch.Tensor
    taps: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Hold what layers are given: ``positions`` [1, M], cos and sin, additive masks [1, 1, M, length + M] by layer
    types.
    """

    positions: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    masks: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TargetSnapshot:
    """A point the target can return to.

    Attributes:
        recurrent: copies of recurrent states. rings: keys and values of each cache that does not hold every position,
            as far as the next token sees them, on the host.
    """

    length: int
    recurrent: tuple[RecurrentSnapshot, ...]
    rings: tuple[tuple[torch.Tensor, ...], ...] = ()


class TransformersTarget:
    """A loaded target and its caches. Batch 1; ids are one-dimensional int64 tensors on ``device``.

    Args:
        model: a transformers ``...ForCausalLM`` of a supported family, in eval mode.
        taps: 0-based decoder layers whose outputs the drafter reads; the last one's are those before the final norm.
        device: of a model without weights, on the meta device; else that of its embedding.
        prefill_chunk: tokens of a prompt processed at once.
    """

    def __init__(
        self,
        model: Any,
        taps: Sequence[int] = (),
        device: torch.device | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        self.model = model
        decoder = model.get_decoder()
        self.config: Any = decoder.config
        self._embed, self._norm = decoder.embed_tokens, decoder.norm
        self._layers = list(decoder.layers)
        self._rotary, self._head = decoder.rotary_emb, model.get_output_embeddings()
        self.use_taps(taps)
        self.device: torch.device = self._embed.weight.device if device is None else device
        self.dtype: torch.dtype = self._norm.weight.dtype
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self._head.weight.shape[0]
        family = of_model_type(self.config.model_type)
        self._types = layer_types(self.config, family, len(self._layers))
        self._window = getattr(self.config, "sliding_window", None)
        capped = family is not None and family.soft_caps is not None  # other configurations may carry the key too
        self._softcap: float | None = self.config.final_logit_softcapping if capped else None
        self._eager = self.config._attn_implementation == "eager"
        # float32 parts too little to change a text, and costs less in one call.
        self._row_by_row = not self._eager and self.dtype == torch.bfloat16 and can_pack(self.device, self.dtype)
        if self._row_by_row:
            row_attention.use(self.config)
        # Text-only positions: the three axes of a multimodal rope carry the same numbers.
        self._axes = 3 if "mrope_section" in (getattr(self.config, "rope_parameters", None) or {}) else 0
        self.prefill_chunk = prefill_chunk
        self.kv = KVCache()
        self.recurrent = self._replace_recurrent_layers()

    def _replace_recurrent_layers(self) -> tuple[RecurrentCache, ...]:
        """Put our Gated-DeltaNet in place of the model's, with one stacked cache per device."""
        groups: dict[torch.device, list[ReferenceGatedDeltaNet]] = {}
        for layer, kind in zip(self._layers, self._types, strict=True):
            if kind == "linear_attention":
                if not isinstance(layer.linear_attn, ReferenceGatedDeltaNet):
                    layer.linear_attn = ReferenceGatedDeltaNet(layer.linear_attn)
                weight = layer.linear_attn.A_log
                groups.setdefault(self.device if weight.is_meta else weight.device, []).append(layer.linear_attn)
        caches = []
        for device, modules in groups.items():
            cache = RecurrentCache(len(modules), modules[0].shape, device=device, dtype=self.dtype)
            for slot, module in enumerate(modules):
                module.attach(cache, slot)
            caches.append(cache)
        return tuple(caches)

    @property
    def length(self) -> int:
        return self.kv.length

    @property
    def is_recurrent(self) -> bool:
        return bool(self.recurrent)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embedding rows [M, H] as the first layer sees them; the drafter borrows them for its block."""
        return self._embed(ids)  # type: ignore[no-any-return]

    def stored_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embedding rows [M, H] as they are stored, without the scale that some families give them."""
        return torch.nn.functional.embedding(ids, self._embed.weight)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of hidden rows [M, H], on ``device`` wherever the head itself lies."""
        logits = self.uncapped(hidden)
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def uncapped(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits as ``head`` does, without the soft cap that some families give them."""
        logits: torch.Tensor = self._head(hidden)
        return logits.to(self.device)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embedding and head as they are stored."""
        head: torch.Tensor = self._head.weight
        return self._embed.weight, head.to_dense() if head.is_mkldnn else head

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def use_taps(self, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)
        self._tap_order = {layer: i for i, layer in enumerate(self.taps)}

    def prefill(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run committed tokens [M]: every one of them is part of the text from now on."""
        out = self._run(ids, recording=False, with_taps=with_taps)
        self.kv.length += len(ids)
        return out

    def verify(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run a block [M] without committing it; ``commit`` keeps a prefix of it."""
        return self._run(ids, recording=True, with_taps=with_taps)

    def commit(self, rows: int) -> None:
        for cache in self.recurrent:
            cache.commit(rows)
        self.kv.length += rows  # rows behind it stay and are written over

    def truncate(self, length: int) -> None:
        """Forget committed tokens after ``length``. KV-only targets; a recurrent one restores a snapshot."""
        if self.is_recurrent and length != self.length:
            raise RuntimeError("a recurrent state cannot be truncated")
        self.kv.length = min(length, self.kv.length)

    def snapshot(self) -> TargetSnapshot:
        """Return a point ``restore`` can return to, as long as no shorter length was restored in between."""
        copies = tuple(RecurrentSnapshot((c.state.clone(),), (c.conv.clone(),)) for c in self.recurrent)
        return TargetSnapshot(self.length, copies)

    def restore(self, point: TargetSnapshot) -> None:
        for cache, kept in zip(self.recurrent, point.recurrent, strict=True):
            cache.state.copy_(kept.state[0])
            cache.conv.copy_(kept.conv[0])
        self.kv.length = point.length

    def clear(self) -> None:
        self.kv.clear()
        for cache in self.recurrent:
            cache.clear()

    def _run(self, ids: torch.Tensor, *, recording: bool, with_taps: bool) -> Forward:
        hidden = self._embed(ids.unsqueeze(0))
        block = self.begin(hidden, recording=recording)
        taps: list[torch.Tensor | None] = [None] * len(self.taps)
        for i in range(len(self._layers)):
            hidden = self.run_layer(i, hidden, block)
            if with_taps and i in self._tap_order:
                taps[self._tap_order[i]] = hidden[0].to(self.device)
        joined = None
        if with_taps:  # a drafter without taps is given rows of no numbers
            joined = torch.cat([t for t in taps if t is not None], dim=-1) if taps else hidden[0][:, :0]
        return Forward(self.norm(hidden), joined)

    def begin(self, hidden: torch.Tensor, *, recording: bool) -> LayerInputs:
        """Make room for rows [1, M, H] and find what layers are given. ``recording``: for ``commit``."""
        rows, start = hidden.shape[1], self.kv.length
        self.kv.reserve(start + rows)
        for cache in self.recurrent:
            cache.begin(rows, recording)
        return self.inputs(start, hidden, masked=not (recording and self._row_by_row))

    def inputs(self, start: int, hidden: torch.Tensor, masked: bool = True) -> LayerInputs:
        """Find what layers are given with rows [1, M, H] behind ``start`` cached ones."""
        rows = hidden.shape[1]
        positions = torch.arange(start, start + rows, device=hidden.device).unsqueeze(0)
        rotary = self._rotary(hidden, positions.expand(self._axes, 1, -1) if self._axes else positions)
        return LayerInputs(positions, rotary, self._masks(start, rows, hidden) if masked else {})

    def run_layer(self, index: int, hidden: torch.Tensor, block: LayerInputs) -> torch.Tensor:
        """Return the output [1, M, H] of one decoder layer over its caches."""
        output: torch.Tensor = self._layers[index](
            hidden,
            attention_mask=block.masks.get(self._types[index]),
            position_ids=block.positions,
            past_key_values=self.kv,
            use_cache=True,
            position_embeddings=block.rotary,
        )
        return output

    def new_layer(self) -> Any:
        """Return one more decoder layer, of full attention, without weights; its place in a cache is the first."""
        config = copy(self.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        with torch.device("meta"):
            return type(self._layers[-1])(config, 0)

    def new_norm(self) -> Any:
        """Return a norm as the final one, without weights."""
        with torch.device("meta"):
            return type(self._norm)(self.hidden_size, eps=self.config.rms_norm_eps)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return rows [M, H] after the final norm, of the last layer's output [1, M, H]."""
        normed: torch.Tensor = self._norm(hidden)
        return normed[0].to(self.device)

    def _masks(self, start: int, rows: int, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return attention masks [1, 1, rows, start+rows] for each layer type that needs one."""
        masks: dict[str, torch.Tensor] = {}
        kinds = set(self._types) & {"full_attention", "sliding_attention"}
        for kind in kinds:
            window = self._window if kind == "sliding_attention" else None
            if window is not None and start + rows <= window:
                window = None
            # SDPA is causal by itself on a fresh cache, and one row sees everything.
            if not self._eager and window is None and (rows == 1 or start == 0):
                continue
            masks[kind] = self._mask(start, rows, window, hidden)
        return masks

    def _mask(self, start: int, rows: int, window: int | None, hidden: torch.Tensor) -> torch.Tensor:
        query = torch.arange(start, start + rows, device=hidden.device).unsqueeze(1)
        key = torch.arange(start + rows, device=hidden.device).unsqueeze(0)
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        # An additive mask: SDPA converts a boolean one at every layer, which costs more than the sum itself.
        never = torch.finfo(hidden.dtype).min if self._eager else float("-inf")
        return torch.zeros_like(seen, dtype=hidden.dtype).masked_fill(~seen, never)[None, None]


def layer_types(config: Any, family: Family | None, layers: int) -> tuple[str, ...]:
    """Return the kind of each decoder layer; where not listed, the family's, or full attention throughout."""
    types = tuple(getattr(config, "layer_types", None) or ())
    if not types:
        types = ("full_attention",) * layers if family is None else family.pattern(config.to_dict(), layers)
    unknown = sorted(set(types) - set(LAYER_TYPES))
    if unknown:
        raise CheckpointError(
            f"layer type {unknown[0]!r} of {config.model_type} is not supported", f"supported: {', '.join(LAYER_TYPES)}"
        )
    return types


class KVCache:
    """Keys and values of every attention layer at absolute positions. A forward over M tokens writes rows ``length ..
    length+M-1``; they stay uncommitted until ``length`` moves, and the next forward writes over them.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.length = 0
        self.capacity = capacity
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows in all; grows by doubling so that copies stay rare."""
        if rows <= self.capacity:
            return
        while self.capacity < rows:
            self.capacity *= 2
        for layer, (keys, values) in self._rows.items():
            self._rows[layer] = (self._grown(keys), self._grown(values))

    def _grown(self, rows: torch.Tensor) -> torch.Tensor:
        larger = rows.new_empty(*rows.shape[:2], self.capacity, rows.shape[3])
        larger[:, :, : rows.shape[2]] = rows
        return larger

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new rows [1, kv_heads, M, head_dim], perhaps of two head_dims; views of all it may see."""
        end = self.length + keys.shape[2]
        if layer not in self._rows:
            self.reserve(end)
            self._rows[layer] = tuple(  # type: ignore[assignment]
                x.new_empty(1, x.shape[1], self.capacity, x.shape[3]) for x in (keys, values)
            )
        elif end > self.capacity:
            self.reserve(end)
        stored_keys, stored_values = self._rows[layer]
        stored_keys[:, :, self.length : end] = keys
        stored_values[:, :, self.length : end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return committed keys and values of a layer, for tests and checksums."""
        keys, values = self._rows[layer]
        return keys[:, :, : self.length], values[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Return bytes of the committed rows."""
        return sum(part[:, :, : self.length].nbytes for rows in self._rows.values() for part in rows)

    def copy(self) -> KVCache:
        """Return another cache with the committed rows."""
        other = KVCache(max(self.length, 1))
        other.length = self.length
        for layer, (keys, values) in self._rows.items():
            other._rows[layer] = keys[:, :, : other.capacity].clone(), values[:, :, : other.capacity].clone()
        return other

    def clear(self) -> None:
        """Forget every row; the memory is kept."""
        self.length = 0
