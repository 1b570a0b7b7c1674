"""Every planted fault of a model: where it is planted, and which line of a check must name it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from dflash_local.check.findings import State, Subject
from dflash_local.kernels.decode_attention import AttentionMask
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.rope import fill_rotation
from tests.families import HIDDEN
from tests.quantized_checkpoints import quantize_checkpoint

Tensors = dict[str, torch.Tensor]
MXFP4 = "mxfp4"  # of gpt_oss, as it is published


@dataclass(frozen=True)
class Fault:
    """A fault, and the finding that names it.

    Attributes:
        plant: changes the files of a bundled pair's target or drafter, or a loaded target. of: the bundled pair, or a
            family of ``families`` and a quantiser's dialect. word: of the finding. prepare: makes the sound files that
            the fault is planted into, where the bundled ones will not do. dtype: that it shows in.
    """

    plant: Callable[[Any], None]
    where: Literal["target", "drafter", "loaded"]
    of: str
    subject: Subject
    state: State
    word: str
    prepare: Callable[[Path], None] | None = None
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Words."""
        plant = self.plant.func if isinstance(self.plant, partial) else self.plant
        return f"{plant.__name__.replace('_', ' ')} of {self.of}"


def change_json(file: Path, **changes: Any) -> None:
    """Set top-level keys."""
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> None:
    """Write the checkpoint of a folder anew with some tensors exchanged."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.contiguous() for name, tensor in {**tensors, **change(tensors)}.items()}, file)


def each_tensor(ending: str | tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor], folder: Path) -> None:
    """Exchange the tensors whose names end so."""
    change_tensors(folder, lambda found: {name: change(t) for name, t in found.items() if name.endswith(ending)})


# Of the files of a target.


def rope_base(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change_json(folder / "config.json", rope_parameters={**config["rope_parameters"], "rope_theta": 5.0})


def rotated_share(target: Path) -> None:
    """Twice as many channels of a head."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    share = 2 * config["partial_rotary_factor"]
    rope = {**config["rope_parameters"], "partial_rotary_factor": share}
    change_json(target / "config.json", rope_parameters=rope, partial_rotary_factor=share)


def rotary_layout(target: Path) -> None:
    """Pairs of channels side by side, as Meta stores queries and keys, where halves are expected."""
    each_tensor(
        ("q_proj.weight", "k_proj.weight"), lambda t: t.unflatten(0, (-1, 2, 32)).transpose(1, 2).flatten(0, 2), target
    )


def norms_without_plus_one(target: Path) -> None:
    """Weights as they would be for a norm that does not add one, in a family whose norms do."""
    each_tensor("layernorm.weight", lambda t: t - 1, target)


def layer_order(target: Path) -> None:
    """The second layer changes places with the last but one."""

    def swapped(found: Tensors) -> Tensors:
        one, other = ".layers.1.", ".layers.6."
        names = {name: name.replace(one, other) for name in found if one in name}
        names |= {name: name.replace(other, one) for name in found if other in name}
        return {new: found[old].clone() for old, new in names.items()}

    change_tensors(target, swapped)


def lost_shard(target: Path) -> None:
    """A file that was allocated and never written: the tensors of half the layers are zeros."""
    lost = tuple(f".layers.{index}." for index in range(2, 6))
    change_tensors(target, lambda found: {name: t * 0 for name, t in found.items() if any(at in name for at in lost)})


def gate_and_up_exchanged(target: Path) -> None:
    def exchanged(found: Tensors) -> Tensors:
        gates = [name for name in found if name.endswith("gate_proj.weight")]
        ups = [name.replace("gate_proj", "up_proj") for name in gates]
        return {new: found[old].clone() for old, new in (*zip(gates, ups), *zip(ups, gates))}

    change_tensors(target, exchanged)


def untied_head(target: Path) -> None:
    """A head of its own that was never trained, where the embedding is the head."""

    def head(found: Tensors) -> Tensors:
        (embedding,) = (t for name, t in found.items() if name.endswith("embed_tokens.weight"))
        noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
        return {"lm_head.weight": (noise * embedding.float().std()).to(embedding.dtype)}

    change_tensors(target, head)
    change_json(target / "config.json", tie_word_embeddings=False)


def other_vocabulary(target: Path) -> None:
    """A tokenizer of as many tokens, which has them in another order."""
    file = target / "tokenizer.json"
    spec = json.loads(file.read_text(encoding="utf-8"))
    added = {token["id"] for token in spec["added_tokens"]}
    vocabulary = spec["model"]["vocab"]
    plain = sorted(token for token in vocabulary.values() if token not in added)
    moved = dict(zip(plain, plain[1:] + plain[:1]))
    spec["model"]["vocab"] = {text: moved.get(token, token) for text, token in vocabulary.items()}
    file.write_text(json.dumps(spec), encoding="utf-8")


def float16_overflow(target: Path) -> None:
    """A layer whose channels are as large as those of some models: the same function, beyond what float16 holds."""
    at = "model.layers.3.mlp"
    scales = {f"{at}.up_proj.weight": 2.0**14, f"{at}.down_proj.weight": 2.0**-14}
    change_tensors(target, lambda found: {name: found[name] * scale for name, scale in scales.items()})


def put_in(dialect: str, target: Path) -> None:
    """Sound files in a quantiser's format."""
    made = target.with_name("quantised")
    quantize_checkpoint(target, made, dialect)
    shutil.rmtree(target)
    made.rename(target)


def lose_signs_of_scales(target: Path) -> None:
    each_tensor("scales", lambda t: t.abs(), target)


def swap_stored_nibbles(target: Path) -> None:
    def swapped(words: torch.Tensor) -> torch.Tensor:
        codes = words.contiguous().view(torch.uint8)
        return ((codes << 4) | (codes >> 4)).view(words.dtype)

    each_tensor("qweight", swapped, target)


def zero_points_off_by_one(target: Path) -> None:
    """GPTQ's first format read as its second."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    change_json(target / "config.json", quantization_config={**config, "checkpoint_format": "gptq_v2"})


def lose_global_scales(target: Path) -> None:
    each_tensor("weight_scale_2", torch.ones_like, target)


def lose_scales_of_blocks(target: Path) -> None:
    each_tensor("weight_scale_inv", torch.ones_like, target)


# Of templates and stop ids.

LLAMA_3 = (
    "{%- for m in messages %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content']"
    " + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
CHATML = "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor %}"


def template(text: str, target: Path) -> None:
    (target / "chat_template.jinja").write_text(text, encoding="utf-8")
    change_json(target / "tokenizer_config.json", chat_template=text)


def stop_id(token: int, text: str, target: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        change_json(target / name, eos_token_id=token)
    change_json(target / "tokenizer_config.json", eos_token=text)


# Of the files of a drafter.


def shift_taps(drafter: Path, by: int = -1) -> None:
    """As if the taps were counted from another layer."""
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))["dflash_config"]
    taps = [tap + by for tap in config["target_layer_ids"]]
    change_json(drafter / "config.json", dflash_config={**config, "target_layer_ids": taps})


def order_of_taps(drafter: Path) -> None:
    """The fusion reads them from the last to the first."""
    each_tensor("fc.weight", lambda t: t.unflatten(1, (4, -1)).flip(1).flatten(1), drafter)


def drafter_of_another_target(drafter: Path) -> None:
    other = {"demo": "demo-hybrid", "demo-hybrid": "demo"}[drafter.parent.name]
    shutil.rmtree(drafter)
    shutil.copytree(drafter.parents[1] / other / "drafter", drafter)


def drafters_rope_base(drafter: Path) -> None:
    change_json(drafter / "config.json", rope_theta=5.0)


# Of a loaded target.


def drop_plus_one(target: FusedTarget) -> None:
    target.layers[1].mixer_input.weight.sub_(1)


def drop_plus_one_of_the_mlp(target: FusedTarget) -> None:
    target.layers[2].mlp_input.weight.sub_(1)


def change_rope_base(target: FusedTarget) -> None:
    mixer = next(layer.mixer for layer in target.layers if hasattr(layer.mixer, "_rotation"))
    rope = target.config.rotation
    fill_rotation(mixer._rotation, replace(rope, theta=1e2 if rope.theta > 1e4 else 1e6))


def mlp(target: FusedTarget, layer: int) -> Any:
    """A layer's feed-forward part, of whichever kind."""
    return target.layers[layer].mlp


def mixer(target: FusedTarget, layer: int) -> Any:
    """What mixes a layer's rows: attention or a recurrence."""
    return target.layers[layer].mixer


def swap_gate_and_up(target: FusedTarget) -> None:
    weight = mlp(target, 2).weights.gate_up.products[0].weight
    weight.copy_(weight.roll(len(weight) // 2, 0))


def swap_nibbles(target: FusedTarget) -> None:
    codes = mlp(target, 1).weights.down.products[0].weight.codes.view(torch.uint8)
    codes.copy_((codes << 4) | (codes >> 4))


def lose_negative_scales(target: FusedTarget) -> None:
    scales = mixer(target, 3).weights.output.products[0].weight.scales
    assert (scales < 0).any()
    scales.abs_()


def ignore_window(target: FusedTarget) -> None:
    attention = mixer(target, 2)
    attention.weights = replace(attention.weights, config=replace(attention.weights.config, sliding_window=None))
    attention.mask = AttentionMask()


def permute_experts(target: FusedTarget) -> None:
    experts = mlp(target, 1).weights.experts
    for each in (experts.gate_up, experts.down):
        matrices = each.weight.view(each.experts, each.out_features, -1)
        matrices.copy_(matrices.roll(1, 0))


def permute_rows_of_an_expert(target: FusedTarget) -> None:
    """Of its down matrix."""
    down = mlp(target, 2).weights.experts.down
    rows = down.weight.view(down.experts, down.out_features, -1)[5]
    rows.copy_(rows.roll(1, 0))


def swap_nibbles_of_an_expert(target: FusedTarget) -> None:
    """Of its down matrix."""
    down = mlp(target, 1).weights.experts.down
    codes = down.weight.codes.view(torch.uint8).view(down.experts, -1)[7]
    codes.copy_((codes << 4) | (codes >> 4))


def double_scales_of_two_experts(target: FusedTarget) -> None:
    """Powers of two, whose exponents are stored."""
    gate_up = mlp(target, 0).weights.experts.gate_up
    for expert in (0, 6):
        gate_up.weight.scales.view(gate_up.experts, -1)[expert] += 1


def forget_to_norm_chosen(target: FusedTarget) -> None:
    """The router's weights of a row's experts do not come to one."""
    weights = mlp(target, 1).weights
    mlp(target, 1).weights = replace(weights, config=replace(weights.config, norm_topk_prob=False))


def flip_convolution(target: FusedTarget) -> None:
    conv = mixer(target, 3).weights.small.conv
    conv.copy_(conv.flip(1))


def untie_head(target: FusedTarget) -> None:
    target.weights.head.weight = target.weights.embedding.clone()


def scale_embedding(target: FusedTarget) -> None:
    target.weights.embedding.mul_(HIDDEN**0.5)


def lose_final_norm(target: FusedTarget) -> None:
    target.weights.norm.weight.mul_(1.1)


def lose_cap_of_logits(target: FusedTarget) -> None:
    target.config = replace(target.config, final_logit_softcap=None)


def _of_files(of: Iterable[str], plant: Callable[[Path], None], word: str, **options: Any) -> tuple[Fault, ...]:
    """A target that its likelihood tells from a sound one."""
    return tuple(Fault(plant, "target", each, "target", "failed", word, **options) for each in of)


def _of_drafter(of: Iterable[str], plant: Callable[[Path], None], state: State, word: str) -> tuple[Fault, ...]:
    return tuple(Fault(plant, "drafter", each, "drafter", state, word) for each in of)


def _loaded(plant: Callable[[FusedTarget], None], of: str, word: str) -> Fault:
    return Fault(plant, "loaded", of, "layers", "failed", word)


DEMO, HYBRID = "demo", "demo-hybrid"
BOTH = (DEMO, HYBRID)
DAMAGED, OFF_BY_ONE = "damaged", "likely off by one: with [1, 3, 5, 6] instead of [0, 2, 4, 5]"
FAULTS: tuple[Fault, ...] = (
    *_of_files(BOTH, rope_base, DAMAGED),
    Fault(rotated_share, "target", HYBRID, "target", "warning", "causes of a broken one"),
    *_of_files((DEMO,), rotary_layout, DAMAGED),
    *_of_files((HYBRID,), norms_without_plus_one, DAMAGED),
    *_of_files(BOTH, layer_order, DAMAGED),
    *_of_files((DEMO,), lost_shard, DAMAGED),
    *_of_files((DEMO,), gate_and_up_exchanged, DAMAGED),
    *_of_files(BOTH, untied_head, DAMAGED),
    *_of_files((DEMO,), other_vocabulary, DAMAGED),
    *_of_files((DEMO,), float16_overflow, "in float16", dtype="float16"),
    *_of_files((HYBRID,), lose_signs_of_scales, DAMAGED, prepare=partial(put_in, "auto_round")),
    *_of_files((HYBRID,), swap_stored_nibbles, DAMAGED, prepare=partial(put_in, "gptq")),
    *_of_files((HYBRID,), zero_points_off_by_one, DAMAGED, prepare=partial(put_in, "gptq_zeros")),
    *_of_files((HYBRID,), lose_global_scales, DAMAGED, prepare=partial(put_in, "modelopt_nvfp4")),
    *_of_files((HYBRID,), lose_scales_of_blocks, DAMAGED, prepare=partial(put_in, "fp8")),
    Fault(partial(template, LLAMA_3), "target", DEMO, "template", "warning", "<|start_header_id|>"),
    Fault(partial(template, CHATML), "target", DEMO, "template", "warning", "no generation prompt"),
    Fault(partial(template, "{{- messages[0]['content'] }}"), "target", DEMO, "template", "failed", "drops the reply"),
    Fault(partial(template, "{{- messages[0]['content']"), "target", DEMO, "template", "failed", "template fails"),
    Fault(partial(stop_id, 0, "<|endoftext|>"), "target", DEMO, "template", "warning", "<|im_end|>"),
    Fault(partial(stop_id, 5000, "<|none|>"), "target", DEMO, "template", "failed", "5000"),
    *_of_drafter(BOTH, shift_taps, "warning", OFF_BY_ONE),
    *_of_drafter((DEMO,), drafter_of_another_target, "failed", "another target"),
    *_of_drafter((DEMO,), order_of_taps, "warning", "likely causes"),
    *_of_drafter((DEMO,), drafters_rope_base, "failed", "likely causes"),
    _loaded(drop_plus_one, "qwen3_5", "layer 1 (Gated-DeltaNet)"),
    _loaded(drop_plus_one_of_the_mlp, "gemma2_full", "layer 2 (MLP)"),
    _loaded(change_rope_base, "qwen3", "layer 0 (attention)"),
    _loaded(change_rope_base, "qwen3_next", "layer 2 (attention)"),
    _loaded(swap_gate_and_up, "llama", "layer 2 (MLP)"),
    _loaded(swap_nibbles, "qwen3 gptq", "layer 1 (MLP)"),
    _loaded(lose_negative_scales, "llama auto_round", "layer 3 (attention)"),
    _loaded(ignore_window, "gpt_oss", "layer 2 (sliding-window attention)"),
    _loaded(permute_experts, "qwen3_moe", "layer 1 (8 of 8 experts)"),
    _loaded(permute_experts, "qwen3_5_moe", "layer 1 (8 of 8 experts)"),
    _loaded(permute_rows_of_an_expert, "qwen3_moe", "layer 2 (expert 5)"),
    _loaded(permute_rows_of_an_expert, "qwen3_next", "layer 2 (expert 5)"),
    _loaded(swap_nibbles_of_an_expert, "qwen3_moe gptq", "layer 1 (expert 7)"),
    _loaded(swap_nibbles_of_an_expert, f"gpt_oss {MXFP4}", "layer 1 (expert 7)"),
    _loaded(double_scales_of_two_experts, f"gpt_oss {MXFP4}", "layer 0 (experts 0, 6)"),
    _loaded(forget_to_norm_chosen, "qwen3_moe", "layer 1 (mixture of experts)"),
    _loaded(flip_convolution, "qwen3_5", "layer 3 (Gated-DeltaNet)"),
    _loaded(untie_head, "qwen3", "the head"),
    _loaded(scale_embedding, "qwen3", "the embedding"),
    _loaded(lose_final_norm, "llama", "the final norm"),
    _loaded(lose_cap_of_logits, "gemma2_full", "the head"),
)
IN_FILES, LOADED = ([each for each in FAULTS if (each.where == "loaded") == loaded] for loaded in (False, True))
