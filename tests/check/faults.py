"""Copies of the bundled pairs with a fault planted into their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def change_json(file: Path, **changes: Any) -> None:
    """Set top-level keys."""
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> None:
    """Write the checkpoint of a folder anew with some tensors exchanged."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.contiguous() for name, tensor in {**tensors, **change(tensors)}.items()}, file)


def rope_base(target: Path) -> None:
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    change_json(target / "config.json", rope_parameters={**config["rope_parameters"], "rope_theta": 5.0})


def norms_without_plus_one(target: Path) -> None:
    """Weights as they would be for a norm that does not add one, in a family whose norms do."""
    change_tensors(
        target, lambda found: {name: t - 1 for name, t in found.items() if name.endswith("layernorm.weight")}
    )


def layer_order(target: Path) -> None:
    """The second layer changes places with the last but one."""

    def swapped(found: Tensors) -> Tensors:
        one, other = ".layers.1.", ".layers.6."
        names = {name: name.replace(one, other) for name in found if one in name}
        names |= {name: name.replace(other, one) for name in found if other in name}
        return {new: found[old].clone() for old, new in names.items()}

    change_tensors(target, swapped)


def untied_head(target: Path) -> None:
    """A head of its own that was never trained, where the embedding is the head."""

    def head(found: Tensors) -> Tensors:
        (embedding,) = (t for name, t in found.items() if name.endswith("embed_tokens.weight"))
        noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
        return {"lm_head.weight": (noise * embedding.float().std()).to(embedding.dtype)}

    change_tensors(target, head)
    change_json(target / "config.json", tie_word_embeddings=False)


def shift_taps(drafter: Path, by: int) -> None:
    """As if the taps were counted from another layer."""
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))["dflash_config"]
    taps = [tap + by for tap in config["target_layer_ids"]]
    change_json(drafter / "config.json", dflash_config={**config, "target_layer_ids": taps})
