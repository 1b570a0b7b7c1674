"""Writes a pair of checkpoint folders with random weights of a registry pair's true shapes.

    PYTHONPATH=. python benchmarks/random_checkpoint.py qwen3.5-9b --out FOLDER [--stored int4-g128] [--tiled]

``--stored``: the target in a quantised layout of ``stored_layouts``, or as a GGUF file; gpt-oss has one of its own.
``--tiled``: one layer of each kind is drawn and written again under the others' names, so that a file of 27B takes
seconds. ``FOLDER/target`` and ``FOLDER/drafter`` open like any pair; there is no tokenizer. Values that no source
quotes are taken from the registry's inferred ones, then from ``ASSUMED``; each one taken is printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import random_gguf
from benchmarks.random_pair import Make, Stored, plain, save, target_shapes, values_of
from benchmarks.stored_layouts import LAYOUTS, RESIDUAL, Matrix, peaked, stacked_mxfp4, stored_tensors
from dflash_local.catalog import registry
from dflash_local.catalog.shapes import shape as known_shape
from dflash_local.checkpoint_files.config_values import Fields
from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.quantization import MXFP4, Quantization, StoredFp4
from dflash_local.config.quantizers import read_quantization

# Where neither a source nor the registry's inference has a value. The three of llama3 scaling are the public ones.
ASSUMED: dict[str, Any] = {"mask_token_id": 7, "block_size": 16, "rope_theta": 1e7, "rms_norm_eps": 1e-6}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LAYER = re.compile(r"\.layers\.(\d+)\.")
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 4096,
    "sliding_window": 24,
}
TINY_SECTION = [2, 1, 1]  # of multimodal rope: a quarter of a tiny head
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "num_position_embeddings": 16}
STORED = (*LAYOUTS, *random_gguf.FORMATS)
NO_IDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


@dataclass(frozen=True, slots=True)
class Built:
    """Two folders, and what had to be assumed of their shapes: by whose name, which value."""

    target: Path
    drafter: Path
    assumed: dict[str, Any]


def build(
    model: str,
    out: Path,
    *,
    layers: int | None = None,
    tiny: bool = False,
    device: str = "cuda",
    stored: str | None = None,
    tiled: bool = False,
) -> Built:
    """Write the pair.

    Args:
        model: a name, alias or target repository of the registry. layers: of the target, at most; taps that would
            lie behind them are dropped. tiny: toy widths, for trying the script itself. stored: one of ``STORED``.
        tiled: layers that are alike hold the same numbers.

    Raises:
        SystemExit: the registry has no such pair, or no shape of it.
    """
    row = registry.load().find(model)
    if row is None or row.target is None or row.drafter is None:
        raise SystemExit(f"{model} is no pair of the registry with a drafter of its own")
    assumed: dict[str, Any] = {}
    target = _completed(row.target.id, "target", assumed)
    drafter = _completed(row.drafter.id, "drafter", assumed)
    text = target.get("text_config") or target
    if layers is not None:
        _shorten(text, drafter, layers)
    if tiny:
        _shrink(text, drafter)
    config = _transformers_config(target)
    if stored in random_gguf.FORMATS:
        out.mkdir(parents=True, exist_ok=True)
        random_gguf.write_target(out / "target", config, stored, device)
    else:
        build_target(out / "target", config, device, stored, tiled)
    build_drafter(out / "drafter", drafter, text, device)
    return Built(out / "target", out / "drafter", assumed)


def build_target(folder: Path, config: Any, device: str, stored: str | None = None, tiled: bool = False) -> None:
    """A target of transformers' configuration ``config``, in bfloat16 or ``stored`` in a quantised layout."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    text = config.get_text_config()
    # Qwen3.5's norms are zero-centred, their gain is 1 + w; the others' gain is w itself.
    centre = 0.0 if hasattr(text, "linear_num_key_heads") else 1.0
    make = values_of(torch.Generator(device).manual_seed(1), text.num_hidden_layers, centre)
    names = target_shapes(config)
    if config.tie_word_embeddings:
        names = [(name, size) for name, size in names if name != "lm_head.weight"]
    tensors = plain(names, make)
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    if stored is not None:
        values["quantization_config"] = dict(LAYOUTS[stored])
        file.write_text(json.dumps(values, indent=1), encoding="utf-8")
    if "quantization_config" in values:
        quantization = read_quantization(Fields(values["quantization_config"], stored or config.model_type))
        if quantization is None or quantization.unread:
            raise SystemExit(f"{stored or config.model_type} is not read: {quantization and quantization.unread}")
        generator, layers = torch.Generator(device).manual_seed(3), text.num_hidden_layers
        tensors = list(_quantised(names, make, quantization, generator, layers))
    save(folder, _tiled(tensors, _period(text)) if tiled else tensors)


def _quantised(
    names: Sequence[tuple[str, tuple[int, ...]]],
    make: Make,
    quantization: Quantization,
    generator: torch.Generator,
    layers: int,
) -> Iterator[Stored]:
    """The tensors of a quantised checkpoint; outside of the text model's layers everything stays.

    transformers keeps the experts of a layer together. Files have them one by one, but for gpt-oss's.
    """
    signed = quantization.method == "auto-round"
    for name, size in names:
        matrices = list(_matrices(name, size))
        forms = [quantization.stored(module) for module, _, _ in matrices]
        if not matrices or forms[0] is None:
            yield Stored(name, "BF16", size, lambda name=name, size=size: peaked(name, make(name, size)))  # type: ignore[misc]
            continue
        gain = (2 * layers) ** -0.5 if matrices[0][0].endswith(RESIDUAL) else 1.0
        if isinstance(forms[0], StoredFp4) and forms[0].dialect == MXFP4:
            experts, columns, rows = size  # in memory [E, in, out], stored by output row
            yield from stacked_mxfp4(Matrix(name, experts * rows, columns, gain, generator), experts)
            continue
        for (module, rows, columns), form in zip(matrices, forms, strict=True):
            if form is None:
                raise SystemExit(
                    f"{module} stays plain beside matrices of {name} that do not, which is not written here"
                )
            yield from stored_tensors(Matrix(module, rows, columns, gain, generator, signed), form)


def _matrices(name: str, size: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """Modules, rows and columns of the matrices that a tensor of the text model's layers holds; none of others."""
    if ".layers." not in name or "visual" in name:
        return
    if name.endswith(".weight") and len(size) == 2:
        yield name.removesuffix(".weight"), *size
    if len(size) == 3 and name.endswith(".experts.gate_up_proj"):
        for expert, half in itertools.product(range(size[0]), ("gate_proj", "up_proj")):
            yield f"{name.removesuffix('gate_up_proj')}{expert}.{half}", size[1] // 2, size[2]
    if len(size) == 3 and name.endswith(".experts.down_proj"):
        for expert in range(size[0]):
            yield f"{name.removesuffix('down_proj')}{expert}.down_proj", size[1], size[2]


def _period(text: Any) -> int:
    """Layers after which their kinds repeat."""
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    fits = (count for count in range(1, len(kinds)) if all(kinds[at] == kinds[at % count] for at in range(len(kinds))))
    return next(fits, len(kinds))


def _tiled(tensors: Sequence[Stored], period: int) -> list[Stored]:
    """Tensors of which each layer's are those of the first layer of its kind, drawn once and kept on the host."""
    drawn: dict[str, torch.Tensor] = {}

    def tile(tensor: Stored) -> torch.Tensor:
        if not (found := LAYER.search(tensor.name)):
            return tensor.make()
        name = f"{tensor.name[: found.start(1)]}{int(found[1]) % period}{tensor.name[found.end(1) :]}"
        if name not in drawn:
            drawn[name] = tensor.make().cpu()
        return drawn[name]

    return [replace(tensor, make=partial(tile, tensor)) for tensor in tensors]


def build_drafter(folder: Path, config: dict[str, Any], text: dict[str, Any], device: str) -> None:
    """A drafter for a target of that text configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shapes = DrafterConfig.from_json(config, folder / "config.json").tensor_shapes(text["hidden_size"])
    make = values_of(torch.Generator(device).manual_seed(2), config["num_hidden_layers"], 1.0)
    save(folder, plain(list(shapes.items()), make))


def weight_files(path: Path) -> list[Path]:
    """Of a checkpoint: those of a folder, or a GGUF file."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def _completed(repo: str, part: str, assumed: dict[str, Any]) -> dict[str, Any]:
    """A config.json from the registry's shape; what it did not know is written down in ``assumed``."""
    found = known_shape(repo)
    if found is None:
        raise SystemExit(f"no shape of {repo} is known")
    config = {key: value for key, value in found.items() if not key.startswith("_") and value is not None}
    gaps = dict(found.get("_inferred") or {})
    if part == "drafter":
        names = config.get("rope_parameters") or gaps.get("rope_parameters")
        missing = {"dflash_config.mask_token_id", "rms_norm_eps", *(() if names else ("rope_theta",))}
        if (config.get("dflash_config") or {}).get("block_size") is None:
            missing.add("block_size")
        gaps = {key: ASSUMED[key.rpartition(".")[2]] for key in missing} | gaps
    for key, value in gaps.items():
        outer, _, inner = key.rpartition(".")
        place = config.setdefault(outer, {}) if outer else config
        if place.get(inner) is None:
            place[inner] = value
            assumed[f"{part} {key}"] = value
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling")
    if scaling and scaling.get("rope_type") == "llama3":
        text["rope_scaling"] = {**LLAMA3, **scaling}
        assumed[f"{part} rope_scaling"] = {key: value for key, value in LLAMA3.items() if key not in scaling}
    return config


def _shorten(text: dict[str, Any], drafter: dict[str, Any], layers: int) -> None:
    """Keep the last layers' kinds, so that a hybrid keeps an attention layer, and the taps that still exist."""
    layers = min(layers, text["num_hidden_layers"])
    if layers < 2:
        raise SystemExit("--layers must be at least 2: a tap lies before the last layer")
    text["num_hidden_layers"] = drafter["num_target_layers"] = layers
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][-layers:]
    nested = drafter["dflash_config"]
    nested["target_layer_ids"] = [tap for tap in nested["target_layer_ids"] if tap < layers - 1] or [0]


def _shrink(text: dict[str, Any], drafter: dict[str, Any]) -> None:
    for config in (text, drafter):
        config.update({key: value for key, value in TINY.items() if config.get(key) is not None})
    rope = text.get("rope_parameters") or {}
    if "mrope_section" in rope:
        rope["mrope_section"] = TINY_SECTION
    drafter["dflash_config"]["mask_token_id"] = TINY["vocab_size"] - 1
    drafter["vocab_size"] = TINY["vocab_size"]


def _transformers_config(config: dict[str, Any]) -> Any:
    """transformers' own, of the published layout: a multimodal wrapper gets a vision tower of no size."""
    import transformers

    model = getattr(transformers, config["architectures"][0])
    values = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    if "text_config" in values:
        text = {key: value for key, value in values["text_config"].items() if key != "model_type"} | NO_IDS
        values["text_config"] = text
        values["vision_config"] = {**VISION, "out_hidden_size": text["hidden_size"]}
    else:
        values |= NO_IDS
    made = model.config_class(**values)
    made.architectures = config["architectures"]
    made.dtype = "bfloat16"
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one pair and say what it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a name, alias or target repository of the registry")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--stored", choices=STORED)
    parser.add_argument("--tiled", action="store_true", help="layers that are alike hold the same numbers")
    parser.add_argument("--tiny", action="store_true", help="toy widths")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    built = build(
        args.target,
        args.out,
        layers=args.layers,
        tiny=args.tiny,
        device=args.device,
        stored=args.stored,
        tiled=args.tiled,
    )
    for part in (built.target, built.drafter):
        size = sum(file.stat().st_size for file in weight_files(part))
        print(f"{part}: {size / 2**30:.2f} GiB, random weights")
    for name, value in built.assumed.items():
        print(f"assumed: {name} = {value}")
    print(f"{time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
