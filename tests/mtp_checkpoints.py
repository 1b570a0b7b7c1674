"""Tiny targets with a random layer for multi-token prediction, and its published recipe without a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from dflash_local.catalog.bundled import Pair
from dflash_local.drafters.kinds import read_drafter
from dflash_local.drafters.mtp.layout import MTPConfig
from tests.families import HIDDEN, save_model
from tests.quantized_checkpoints import SIZES, quantize_checkpoint

FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 4}  # a target that can be cut back anywhere
Tensors = dict[str, torch.Tensor]


def config_of(folder: Path) -> MTPConfig:
    found = read_drafter(json.loads((folder / "config.json").read_text()), folder / "config.json")
    assert isinstance(found, MTPConfig)
    return found


def random_layer(config: MTPConfig, hidden: int = HIDDEN, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = config.tensors(hidden).items()
    return {name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.4) for name, shape in shapes}


def save_target(family: str, folder: Path, keys: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A target with the layer beside it. ``keys``: added to its config.json. ``changes``: of its sizes."""
    save_model(family, folder, **changes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | (keys or {})))
    hidden = changes.get("hidden_size", HIDDEN)
    final = next(name for name in load_file(folder / "model.safetensors") if name.endswith("model.norm.weight"))
    add(folder, {**random_layer(config_of(folder), hidden), final: torch.linspace(-0.8, 2.0, hidden)})
    return folder


def add(folder: Path, tensors: Tensors) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def split_experts(folder: Path) -> None:
    """Give every expert of a checkpoint its own tensors, as quantised files have them."""
    tensors = load_file(folder / "model.safetensors")
    apart: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            for index, both in enumerate(tensor):
                gate, up = both.chunk(2)
                module = f"{name.removesuffix('.gate_up_proj')}.{index}"
                apart |= {f"{module}.gate_proj.weight": gate.clone(), f"{module}.up_proj.weight": up.clone()}
        elif name.endswith(".experts.down_proj"):
            module = name.removesuffix(".down_proj")
            apart |= {f"{module}.{index}.down_proj.weight": each.clone() for index, each in enumerate(tensor)}
        else:
            apart[name] = tensor
    save_file(apart, folder / "model.safetensors", metadata={"format": "pt"})


def save_quantized(family: str, dialect: str, folder: Path) -> tuple[Path, Path]:
    """A target in a quantiser's dialect, with its layer, and its twin of the numbers that its codes stand for."""
    mixture = family == "qwen3_5_moe"
    inner: dict[str, Any] = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32} if mixture else {}
    twin = save_target(family, folder / "twin", **SIZES, **inner)
    if mixture:
        split_experts(twin)
    quantize_checkpoint(twin, folder / "coded", dialect)
    return folder / "coded", twin


def own_pair(folder: Path) -> Pair:
    """What ``--drafter mtp`` makes of a folder."""
    return Pair(str(folder), folder, folder, bundled=False)


class Recipe:
    """The layer as its publishers describe it: float64, all rows again for each draft.

    Args:
        folder: of the target. normed: hidden states are taken behind the target's final norm.
    """

    def __init__(self, folder: Path, normed: bool = True) -> None:
        import transformers

        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        self.model: Any = loaded.eval()
        stored = load_file(folder / "model.safetensors")
        self.tensors = {name.removeprefix("mtp."): each.double() for name, each in stored.items() if name[:4] == "mtp."}
        self.config, self.normed = self.model.config.get_text_config(), normed

    @torch.no_grad()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """The target's hidden states [n, H]."""
        kept: list[torch.Tensor] = []
        norm = self.model.get_decoder().norm
        hook = norm.register_forward_hook(lambda _module, args, out: kept.append(out if self.normed else args[0]))
        self.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        hook.remove()
        return kept[0][0]

    @torch.no_grad()
    def drafts(self, ids: Sequence[int], count: int, noise: torch.Tensor | None, heat: float) -> list[int]:
        """Draft ``count`` ids behind ``ids``; ``noise`` [count, V] is added to logits by ``heat``, None is greedy."""
        hidden, behind, drafts = self.hidden(ids[:-1]), list(ids[1:]), list[int]()
        embed, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        for i in range(count):
            output = self._layer(embed(torch.tensor(behind)), hidden)
            scores = head(output[-1])
            drafts.append(int((scores if noise is None else scores / heat + noise[i]).argmax()))
            hidden, behind = torch.cat((hidden, output[-1:])), [*behind, drafts[-1]]
        return drafts

    def _layer(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = self._norm("pre_fc_norm_embedding", embeddings), self._norm("pre_fc_norm_hidden", hidden)
        x = torch.cat(parts, -1) @ self.tensors["fc.weight"].T
        x = x + self._attention(self._norm("layers.0.input_layernorm", x))
        x = x + self._feed_forward(self._norm("layers.0.post_attention_layernorm", x))
        return self._norm("norm", x)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], 1 + self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        rows, size, module = len(x), self.config.head_dim, "layers.0.self_attn"
        both = self._linear(f"{module}.q_proj", x).view(rows, -1, 2 * size)
        query, gate = both.split(size, -1)
        key, value = (self._linear(f"{module}.{name}_proj", x).view(rows, -1, size) for name in ("k", "v"))
        query, key = self._turn(self._norm(f"{module}.q_norm", query)), self._turn(self._norm(f"{module}.k_norm", key))
        shared = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query, key) / size**0.5
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), value) * gate.sigmoid()
        return self._linear(f"{module}.o_proj", attended.flatten(1))

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the first part of each head [n, heads, d] by its row's position."""
        rope = self.config.rope_parameters
        half = int(self.config.head_dim * rope["partial_rotary_factor"]) // 2
        rates = rope["rope_theta"] ** (-torch.arange(half, dtype=x.dtype) / half)
        angles = (torch.arange(len(x), dtype=x.dtype)[:, None] * rates).unsqueeze(1)
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        module = "layers.0.mlp"
        if f"{module}.gate.weight" not in self.tensors:
            return self._mlp(module, x)
        shared = self._linear(f"{module}.shared_expert_gate", x).sigmoid() * self._mlp(f"{module}.shared_expert", x)
        chances, chosen = self._linear(f"{module}.gate", x).softmax(-1).topk(self.config.num_experts_per_tok)
        chances = chances / chances.sum(-1, keepdim=True)
        for row, slot in ((row, slot) for row in range(len(x)) for slot in range(chosen.shape[1])):
            shared[row] += chances[row, slot] * self._expert(int(chosen[row, slot]), x[row])
        return shared

    def _expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        module = "layers.0.mlp.experts"
        if f"{module}.gate_up_proj" not in self.tensors:
            return self._mlp(f"{module}.{index}", x)
        gate, up = (self.tensors[f"{module}.gate_up_proj"][index] @ x).chunk(2)
        return self.tensors[f"{module}.down_proj"][index] @ (functional.silu(gate) * up)

    def _mlp(self, module: str, x: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self._linear(f"{module}.gate_proj", x)) * self._linear(f"{module}.up_proj", x)
        return self._linear(f"{module}.down_proj", gated)
