"""The quantised matrices of a drafter: checked by their headers, and decoded where they are not multiplied as codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dflash_local.drafters.drafter import Drafter
from dflash_local.layout.linear import WeightFormat
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.decoded_tensors import coded_weight
from dflash_local.models.drafter_tensors import WEIGHT, coded_matrices, codes_of, stored_shapes
from dflash_local.models.fill_places import check_places, fill_places
from dflash_local.models.fused.quantized_formats import decode
from dflash_local.models.place import Places

NOWHERE = torch.device("meta")
Coded = Mapping[str, WeightFormat]  # by module


def check_codes(checkpoint: Checkpoint, config: Drafter, target_hidden: int) -> None:
    """Refuse missing, unknown or misshapen tensors of quantised matrices."""
    shapes = stored_shapes(checkpoint, config, target_hidden)
    for module, form in coded_matrices(checkpoint, config).items():
        rows, columns = shapes[f"{module}{WEIGHT}"]
        _, places = coded_weight(module, form, (rows, columns), NOWHERE, torch.float32)
        check_places(checkpoint, codes_of([module], checkpoint), places)


def decode_codes(
    checkpoint: Checkpoint, coded: Coded, places: Mapping[str, Sequence[torch.Tensor]], dtype: torch.dtype
) -> None:
    """Put what the codes stand for in place. Beside the places there are the codes of one layer.

    Args:
        places: of plain weights, by their names.
    """
    layers: dict[str, list[str]] = {}
    for module in coded:
        layers.setdefault(".".join(module.split(".")[:2]), []).append(module)
    for modules in layers.values():
        weights, own = {}, Places()
        for module in modules:
            first = places[f"{module}{WEIGHT}"][0]
            rows, columns = first.shape
            weights[module], found = coded_weight(module, coded[module], (rows, columns), first.device, dtype)
            own |= found
        fill_places(checkpoint, codes_of(modules, checkpoint), own)
        for module, weight in weights.items():
            first, *others = places[f"{module}{WEIGHT}"]
            decode(weight, first)
            for other in others:
                other.copy_(first)
