"""Shapes and fingerprints: what is kept before any download agrees with how a real drafter is read."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dflash_local.catalog import registry, shapes
from dflash_local.catalog.row import fingerprint_of
from dflash_local.catalog.shapes import shape
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.kinds import ARCHITECTURES
from tests.drafter_configs import read_decoder

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*/drafter/config.json"))
DEMO = sorted((Path(shapes.__file__).parents[1] / "demo").glob("*/drafter/config.json"))
SHAPES = sorted(shapes.FOLDER.glob("*.json"))
DRAFTERS = [path for path in SHAPES if json.loads(path.read_text())["architectures"][0] in ARCHITECTURES]


def filled(config: dict[str, Any]) -> dict[str, Any]:
    """The shape with its inferred values in place of the nulls, and stand-ins for what nobody knows."""
    config = copy.deepcopy(config)
    for key, value in config["_inferred"].items():
        *outer, last = key.split(".")
        at = config[outer[0]] if outer else config
        assert at[last] is None, f"{key} is known and inferred at once"
        at[last] = value
    if config.get("rope_parameters") is None and config.get("rope_theta") is None:
        config["rope_theta"] = 10000
    return config


def coded_names(drafter: DFlashConfig) -> list[str]:
    """The matrices that a drafter's quantization_config names; each is in groups of 128 of four bits."""
    assert drafter.quantization is not None
    shapes = drafter.tensors(drafter.hidden_size)
    found = {
        name: drafter.quantization.stored(name.removesuffix(".weight")) for name in shapes if len(shapes[name]) == 2
    }
    names = [name for name, stored in found.items() if stored is not None and name.endswith(".weight")]
    assert {stored.name for name in names if (stored := found[name]) is not None} == {"int4 g128"}
    return names


@pytest.mark.parametrize("path", [*GOLDEN, *DEMO], ids=lambda path: path.parts[-3])
def test_a_real_drafters_fingerprint_is_read_alike_with_and_without_torch(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    assert fingerprint_of(config) == read_decoder(config, path).fingerprint()


@pytest.mark.parametrize("path", DRAFTERS, ids=lambda path: path.stem)
def test_a_kept_drafter_shape_is_a_config_that_the_drafter_accepts(path: Path) -> None:
    config = filled(json.loads(path.read_text(encoding="utf-8")))
    drafter = read_decoder(config, path)
    assert fingerprint_of(config) == drafter.fingerprint()
    sizes, tensors = config["_sizes"], drafter.tensors(drafter.hidden_size) | drafter.optional_tensors()
    for name in sizes.get("without", []):  # which a file may have, and this one has not
        del tensors[name]
    count = sum(map(math.prod, tensors.values()))
    coded = [] if drafter.quantization is None else [math.prod(tensors[name]) for name in coded_names(drafter)]
    # A matrix in int4 is of three tensors: half a byte each, a 16-bit scale for 128, and its two sizes.
    stored = 2 * (count - sum(coded)) + sum(size // 2 + size // 64 + 16 for size in coded)
    assert (len(tensors) + 2 * len(coded), count, stored) == (sizes["tensors"], sizes["params"], sizes["bytes"])
    assert abs(stored / 2**30 - sizes["gib_quoted"]) < 0.01


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (None, None, None, None, None)),
        ({"dflash_config": "x", "num_hidden_layers": True, "target_layer_ids": [1, "2"]}, (None,) * 5),
        ({"num_hidden_layers": 2, "block_size": 8, "dflash_config": {"block_size": 4}}, (2, None, None, 4, None)),
        ({"block_size": 8, "dflash_config": {"block_size": None}}, (None, None, None, 8, None)),
        ({"layer_types": ["full_attention"], "sliding_window": 64}, (None, None, None, None, None)),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, (None, None, None, None, 64)),
        ({"use_swa": True, "sliding_window": 64}, (None, None, None, None, 64)),
        ({"num_hidden_layers": 29, "use_sliding_window": True, "sliding_window": 64}, (29, None, None, None, 64)),
        ({"num_hidden_layers": 28, "use_sliding_window": True, "sliding_window": 64}, (28, None, None, None, None)),
    ],
)
def test_a_fingerprint_is_read_from_any_config_without_an_error(
    config: dict[str, Any], expected: tuple[object, ...]
) -> None:
    assert tuple(fingerprint_of(config).values()) == expected


def test_every_shape_belongs_to_the_registry_and_names_its_source() -> None:
    rows = registry.load().rows
    known = {repo.id.replace("/", "--") for row in rows for repo in (row.target, row.drafter) if repo}
    known |= {other.repo.replace("/", "--") for row in rows for other in row.other_drafters}
    assert SHAPES and {path.stem for path in SHAPES} <= known
    for path in SHAPES:
        config = json.loads(path.read_text(encoding="utf-8"))
        assert config["_source"] and isinstance(config["_inferred"], dict) and config["architectures"]
        text = config.get("text_config", config)
        types = text.get("layer_types")
        assert types is None or len(types) == text["num_hidden_layers"]


def test_each_tap_is_a_layer_of_the_target_before_the_last() -> None:
    for row in registry.load().rows:
        target = shape(row.target.id) if row.target else None
        if target is not None:
            layers = target.get("text_config", target)["num_hidden_layers"]
            assert all(max(known.taps) < layers - 1 for known in row.fingerprints if known.taps)


def test_an_unknown_repository_has_no_shape_and_a_path_is_not_one(tmp_path: Path) -> None:
    assert shape("a/b") is None
    for name in ("../row", "Qwen--Qwen3-8B", f"{tmp_path}/x", "", "Qwen/Qwen3-8B.json/x", "a\0/b"):
        assert shape(name) is None
    first, second = shape("Qwen/Qwen3-8B"), shape("Qwen/Qwen3-8B")
    assert first == second and first is not second
