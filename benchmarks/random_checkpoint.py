"""Writes a pair of checkpoint folders with random weights of a registry pair's true shapes.

    PYTHONPATH=. python benchmarks/random_checkpoint.py qwen3.5-9b --out FOLDER [--stored int4-g128] [--tiled]

``--stored``: the target in a quantised layout, or as a GGUF file; gpt-oss has one of its own. Codes are random; what
hides faults in plain noise is not plain: a few channels of the residual stream are large (rows of the matrices that
write to it have outlier scales), scales differ by group, and half of AutoRound's are negative.
``--tiled``: one layer of each kind is drawn and written again under the others' names, so that a file of 27B takes
seconds. ``FOLDER/target`` and ``FOLDER/drafter`` open like any pair; there is no tokenizer. Shapes are those of
``dflash bench --weights random``; each value that no source quotes is printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import random_gguf
from dflash_local.bench.random_pair import RandomPair, of_row, read_pair
from dflash_local.catalog import registry
from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.config.quantization import MXFP4, Quantization, StoredFormat, StoredFp4, StoredFp8, StoredInt
from dflash_local.config.quantizers import USUAL, read_quantization
from dflash_local.drafters.kinds import read_drafter

LOGIT_STD = 4.0  # spread of the logits of trained models; without it near-ties would decide everything
PEAKED, PEAK = 4, 3.0  # weights of a norm of queries or keys, and what is added: attention looks at few keys then
SHARD_BYTES = 4 * 2**30
MEMORY = Path("/dev/shm")
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
# Layouts by name: those that random pairs were measured in, and AutoRound's dialect. GGUF has files of its own.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    **{name: USUAL[name] for name in ("int4-g128", "int4-g32", "int4-g32-zeros", "int8-g128", "fp8")},
    "autoround-g128": {"quant_method": "auto-round", "bits": 4, "sym": True, "group_size": 128},
}
OUTLIER_CHANNELS, OUTLIER = 6, 20.0  # of the residual stream, and how many times as large
RESIDUAL = (".o_proj", ".out_proj", ".down_proj")
# By bits of a code: a word of symmetric zero points (the middle code less one), of ones, and the deviation of random
# codes.
GPTQ_WORDS = {4: (0x77777777, 0x11111111, 4.64), 8: (0x7F7F7F7F, 0x01010101, 73.9)}
FP8_SPREAD, FP4_SPREAD = 64.0, 2.9  # deviation of random codes
STORED = (*LAYOUTS, *random_gguf.FORMATS)
Tensors = Iterator[tuple[str, torch.Tensor]]
NO_IDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


@dataclass(frozen=True, slots=True)
class Values:
    """Draws bfloat16 tensors whose activations stay of order one through all layers.

    Attributes:
        layers: of the model, for the scale of what is added to the residual. centre: of the norms' weights.
        signed: half of the scales of codes are negative.
    """

    generator: torch.Generator
    layers: int
    centre: float
    signed: bool = False

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def gain(self, module: str) -> float:
        """Scale what a matrix adds to the residual stream."""
        return (2 * self.layers) ** -0.5 if module.endswith(RESIDUAL) else 1.0

    def draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        out, generator = torch.empty(shape, dtype=torch.bfloat16, device=self.generator.device), self.generator
        if name.endswith("A_log"):
            return out.uniform_(0.0, 2.7, generator=generator)  # log of 1..15
        if name.endswith("dt_bias"):
            return out.normal_(-2.0, 1.0, generator=generator)
        if name.endswith("linear_attn.norm.weight"):
            return out.fill_(1.0)
        if name.endswith("norm.weight") and "visual" not in name:
            return out.normal_(self.centre, 0.02, generator=generator)
        if name == "lm_head.weight":  # the final norm gives unit rows
            return out.normal_(0.0, LOGIT_STD / shape[-1] ** 0.5, generator=generator)
        if name.endswith("embed_tokens.weight"):
            return out.normal_(generator=generator)
        if name.endswith("conv1d.weight"):
            return out.normal_(0.0, 0.5, generator=generator)
        if len(shape) < 2:
            return out.zero_() if name.endswith("bias") else out.fill_(1.0)
        return out.normal_(0.0, self.gain(name.removesuffix(".weight")) * shape[-1] ** -0.5, generator=generator)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [rows, columns] to be stored."""

    values: Values
    module: str
    rows: int
    columns: int

    def words(self, *shape: int) -> torch.Tensor:
        """Draw random bits, as int32."""
        generator = self.values.generator
        out = torch.empty(shape, dtype=torch.int32, device=generator.device)
        return out.random_(-(2**31), 2**31, generator=generator)

    def scales(self, groups: int, spread: float, dtype: torch.dtype, rows: int = 0) -> torch.Tensor:
        """Draw [rows, groups] scales of codes that spread so far."""
        rows, outlier = (rows, OUTLIER / 4) if rows else (self.rows, OUTLIER)  # a block of rows is more than a few
        size = self.values.gain(self.module) * self.columns**-0.5 / spread
        found = self.values.normal(rows, groups).mul_(0.2).exp_().mul_(size)
        if self.module.endswith(RESIDUAL):
            found[: max(1, rows * OUTLIER_CHANNELS // self.rows)] *= outlier
        if self.values.signed:
            found[1::2] *= -1
        return found.to(dtype)


def stored_tensors(matrix: Matrix, form: StoredFormat) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names, without the module, and tensors of a matrix as a checkpoint of ``LAYOUTS`` has it."""
    n, k = matrix.rows, matrix.columns
    if isinstance(form, StoredInt):
        groups, each = k // form.group_size, 32 // form.bits
        zero, ones, spread = GPTQ_WORDS[form.bits]
        yield "qweight", matrix.words(k // each, n)
        yield "scales", matrix.scales(groups, spread, torch.float16).t()
        # Near the middle: each code of a word is the middle one or one less.
        yield "qzeros", (matrix.words(groups, n // each) & (ones if form.zeros else 0)) + zero
        yield "g_idx", torch.arange(k, dtype=torch.int32) // form.group_size
    else:
        assert isinstance(form, StoredFp8)
        rows, columns = form.block
        yield "weight", matrix.values.normal(n, k).mul_(FP8_SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn)
        yield "weight_scale_inv", matrix.scales(-(-k // columns), FP8_SPREAD, torch.bfloat16, -(-n // rows))


def named_pair(name: str, stored: str | None = None) -> RandomPair:
    """A pair of the registry by its shapes, its target perhaps in one of the ``USUAL`` formats. SystemExit: there is
    none of that name.
    """
    row = registry.load().find(name)
    if row is None:
        raise SystemExit(f"{name} is no pair of the registry")
    pair = of_row(row)
    if stored is None:
        return pair
    config = {**pair.target_config, "quantization_config": USUAL[stored]}
    return read_pair((pair.target, config), (pair.drafter, pair.drafter_config))


def build(
    model: str,
    out: Path,
    *,
    layers: int | None = None,
    tiny: bool = False,
    device: str = "cuda",
    stored: str | None = None,
    tiled: bool = False,
) -> RandomPair:
    """Write the pair into ``target`` and ``drafter`` of a folder.

    Args:
        model: a name, alias or target repository of the registry. layers: of the target, at most; taps that would
            lie behind them are dropped. tiny: toy widths, for trying the script itself. stored: one of ``STORED``.
        tiled: layers that are alike hold the same numbers.

    Raises:
        SystemExit: the registry has no such pair. UsageError: the fused engine does not know its target or drafter.
    """
    pair = named_pair(model)
    text = pair.target_config.get("text_config") or pair.target_config
    if layers is not None:
        _shorten(text, pair.drafter_config, layers)
    if tiny:
        _shrink(text, pair.drafter_config)
    config = _transformers_config(pair.target_config)
    out.mkdir(parents=True, exist_ok=True)
    if stored in random_gguf.FORMATS:
        # Norms as GGUF files have them, around one in all families.
        values = Values(torch.Generator(device).manual_seed(1), text["num_hidden_layers"], 1.0)
        random_gguf.write_target(out / "target", target_shapes(config), config.get_text_config(), stored, values)
    else:
        build_target(out / "target", config, device, stored, tiled)
    build_drafter(out / "drafter", pair.drafter_config, text["hidden_size"], device)
    return pair


def target_shapes(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Ask transformers for names and shapes of every tensor in a file, without allocating one."""
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    left_out = "lm_head.weight" if config.tie_word_embeddings else ""
    return [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if name != left_out]


def build_target(folder: Path, config: Any, device: str, stored: str | None = None, tiled: bool = False) -> None:
    """Write a target of transformers' configuration ``config``, in bfloat16 or ``stored`` in a quantised layout."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    text = config.get_text_config()
    file = folder / "config.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    if stored is not None:
        told["quantization_config"] = dict(LAYOUTS[stored])
        file.write_text(json.dumps(told, indent=1), encoding="utf-8")
    quantization = None
    if "quantization_config" in told:
        quantization = read_quantization(ConfigFields(told["quantization_config"], stored or config.model_type))
        if quantization is None or quantization.unread:
            raise SystemExit(f"{stored or config.model_type} is not read: {quantization and quantization.unread}")
    # Qwen3.5's norms are zero-centred, their gain is 1 + w; the others' gain is w itself.
    centre = 0.0 if hasattr(text, "linear_num_key_heads") else 1.0
    signed = quantization is not None and quantization.method == "auto-round"
    values = Values(torch.Generator(device).manual_seed(1), text.num_hidden_layers, centre, signed)
    period = _period(text) if tiled else text.num_hidden_layers
    save(folder, _tensors(target_shapes(config), values, quantization, period))


def _tensors(
    names: Iterable[tuple[str, tuple[int, ...]]], values: Values, quantization: Quantization | None, period: int
) -> Tensors:
    """Yield all tensors; layers from ``period`` on hold the numbers of the first layer of their kind."""
    drawn: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, size in names:
        found = LAYER.search(name)
        number = int(found[1]) if found and "visual" not in name else 0
        first = LAYER.sub(f".layers.{number % period}.", name, count=1)
        if first in drawn:
            for stored, tensor in drawn[first]:
                yield LAYER.sub(f".layers.{number}.", stored, count=1), tensor.clone()
        elif number + period < values.layers:  # later layers are alike
            drawn[name] = [(stored, tensor.cpu()) for stored, tensor in _stored(name, size, values, quantization)]
            yield from drawn[name]
        else:
            yield from _stored(name, size, values, quantization)


def _stored(name: str, size: tuple[int, ...], values: Values, quantization: Quantization | None) -> Tensors:
    """Yield the tensors that stand for one of transformers'; outside of the text model's layers everything stays.

    transformers keeps the experts of a layer together. Quantised files have them one by one, but for gpt-oss's.
    """
    matrices = [] if quantization is None else [(quantization.stored(each[0]), *each) for each in _matrices(name, size)]
    form = matrices[0][0] if matrices else None
    if form is None:
        tensor = values.draw(name, size)
        if quantization is not None and name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor[:PEAKED] += PEAK
        yield name, tensor
    elif isinstance(form, StoredFp4) and form.dialect == MXFP4:
        experts, columns, rows = size  # in memory [E, in, out], stored by output row
        matrix = Matrix(values, name, experts * rows, columns)
        words = matrix.words(experts * rows, columns // 8)
        yield f"{name}_blocks", words.view(torch.uint8).view(experts, rows, columns // 32, 16)
        exponents = matrix.scales(columns // 32, FP4_SPREAD, torch.float32).log2().round() + 127
        yield f"{name}_scales", exponents.to(torch.uint8).view(experts, rows, -1)
    else:
        for form, module, rows, columns in matrices:
            assert form is not None, f"{module} stays plain beside matrices of {name} that do not"
            for part, tensor in stored_tensors(Matrix(values, module, rows, columns), form):
                yield f"{module}.{part}", tensor


def _matrices(name: str, size: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """Yield modules, rows and columns of the matrices that a tensor of the text model's layers holds."""
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
    """Count the layers after which their kinds repeat."""
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    fits = (count for count in range(1, len(kinds)) if all(kinds[at] == kinds[at % count] for at in range(len(kinds))))
    return next(fits, len(kinds))


def build_drafter(folder: Path, config: dict[str, Any], target_hidden: int, device: str) -> None:
    """Write a drafter for a target so wide, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shapes = read_drafter(config, folder / "config.json").tensors(target_hidden)
    values = Values(torch.Generator(device).manual_seed(2), config["num_hidden_layers"], 1.0)
    save(folder, ((name, values.draw(name, size)) for name, size in shapes.items()))


def save(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write shards with an index; one shard is held at a time."""
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = begun = 0
    for name, tensor in itertools.chain(tensors, [("", torch.empty(0))]):
        if shard and (total - begun >= SHARD_BYTES or not name):
            file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
            shard, begun = {}, total
        shard[name] = tensor.contiguous().cpu()
        total += tensor.nbytes
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


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
    """Make transformers' own, of the published layout: a multimodal wrapper gets a vision tower of no size."""
    import transformers

    values = {**config, "dtype": "bfloat16"}
    text = values.get("text_config")
    if text is None:
        values |= NO_IDS
    else:
        values["text_config"] = {**text, **NO_IDS}
        values["vision_config"] = {**VISION, "out_hidden_size": text["hidden_size"]}
    return getattr(transformers, config["architectures"][0]).config_class.from_dict(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name, alias or target repository of the registry")
    parser.add_argument("--out", type=Path, required=True)
    add_options(parser)
    parser.add_argument("--tiled", action="store_true", help="layers that are alike hold the same numbers")
    pair = build(**vars(parser.parse_args()))
    for role, values in pair.assumed.items():
        print(f"assumed of the {role}: {values}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``build`` that scripts share."""
    add_shape(parser)
    parser.add_argument("--stored", choices=STORED, help="the layout that a target is written in; else as published")


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Those of scripts that choose the layout by themselves."""
    parser.add_argument("--layers", type=int, help="of the target, the last ones")
    parser.add_argument("--tiny", action="store_true", help="toy widths")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def add_place(parser: argparse.ArgumentParser) -> None:
    """Where a script writes what ``build`` makes: in memory, where the system has such a folder."""
    place = MEMORY if MEMORY.is_dir() else None
    parser.add_argument("--at", type=Path, default=place, help="where weights are written, for the time of the run")


if __name__ == "__main__":
    main()
