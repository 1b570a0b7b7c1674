"""transformers' model of a checkpoint with the weights of one module at a time, read when it runs and freed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from dflash_local.config.module_names import HEAD, HEAD_MODULES
from dflash_local.config.quantization import MXFP4
from dflash_local.errors import CheckpointError
from dflash_local.kernels.qk_norm_rope_cache import coded
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.decoded_tensors import decoded_tensors
from dflash_local.models.fill_places import text_tensors
from dflash_local.models.load_target import MXFP4_FAMILIES
from dflash_local.models.reference_delta_net import ReferenceGatedDeltaNet
from dflash_local.models.target_facts import TargetFacts
from dflash_local.models.transformers_config import BUILD_ERRORS, text_model_config
from dflash_local.models.transformers_target import KVCache, TransformersTarget

MXFP4_PARTS = ("_blocks", "_scales")  # of a tensor that transformers decodes
# The norm in front of a layer's feed-forward part, the first of these names that the layer has.
MLP_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """The residual stream [M, H] behind the mixer and behind the feed-forward part of a layer."""

    mixer: torch.Tensor
    mlp: torch.Tensor


class CodedKVCache(KVCache):
    """Holds keys and values as a cache of int8 codes does."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(_as_coded(keys), _as_coded(values), layer)


def _as_coded(rows: torch.Tensor) -> torch.Tensor:
    codes, scales = coded(rows)
    return (codes * scales).to(rows.dtype)


class StreamedReference:
    """The reference engine's forward, module by module. Peak memory: the largest module's weights, decoded.

    Args:
        files: of which ``facts`` were read. device, dtype: that it computes on and in.
        kv_cache: as ``LoadConfig`` has it.

    Raises:
        CheckpointError: transformers does not take the configuration.
    """

    def __init__(
        self, files: Checkpoint, facts: TargetFacts, device: torch.device, dtype: torch.dtype, kv_cache: str
    ) -> None:
        self._files, self._facts, self._device, self._dtype = files, facts, device, dtype
        try:
            model = _without_weights(facts, dtype)
        except BUILD_ERRORS as error:
            raise CheckpointError(f"{files.path}: transformers cannot build this target: {error}") from error
        decoder = model.get_decoder()
        self._embedding, self._norm = decoder.embed_tokens, decoder.norm
        self._head, self._layers = model.get_output_embeddings(), decoder.layers
        decoder.rotary_emb.to(device)
        self._target = TransformersTarget(model, device=device)
        if kv_cache != "auto":
            self._target.kv = CodedKVCache()
        self._names = self._by_module()

    def _by_module(self) -> dict[str, list[str]]:
        """Names of the checkpoint's tensors by what they belong to: ``layers.3``, ``embed_tokens``, ``norm``, HEAD."""
        found: dict[str, list[str]] = {}
        for name in text_tensors(self._files, self._facts):
            parts = name.removeprefix(self._facts.prefix).split(".")
            at = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
            found.setdefault(HEAD if name.rpartition(".")[0] in HEAD_MODULES else at, []).append(name)
        return found

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows [M, H] as the first layer sees them."""
        with self._filled(self._embedding, "embed_tokens"):
            return self._target.embed(ids)

    def norm(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [M, H] of the last layer after the final norm."""
        with self._filled(self._norm, "norm"):
            return self._target.norm(rows.unsqueeze(0))

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        with self._filled(self._head, HEAD if HEAD in self._names else "embed_tokens"):
            return self._target.head(rows)

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """While its tensors are there, ``run`` takes this layer."""
        layer = self._layers[index]
        with self._filled(layer, f"layers.{index}"):
            mixer = getattr(layer, "linear_attn", None)
            if isinstance(mixer, ReferenceGatedDeltaNet) and mixer.cache is not None:
                mixer.attach(mixer.cache, mixer.slot)  # it keeps rates that it computes of its weights
            yield

    def run(self, index: int, rows: torch.Tensor, prompt: int, mlp_rows: torch.Tensor | None = None) -> LayerOutputs:
        """One layer over a sequence of its own: a prompt, and a block behind it.

        Args:
            rows: [M, H], the layer's input. prompt: how many of them are the prompt's.
            mlp_rows: [M, H], the residual stream that the feed-forward part is given instead of the mixer's result; it
                is added to that all the same.
        """
        target, layer = self._target, self._layers[index]
        norm = next(getattr(layer, name) for name in MLP_NORMS if hasattr(layer, name))
        outputs, mixed = [], []
        target.clear()
        for part, recording in ((slice(0, prompt), False), (slice(prompt, None), True)):
            hidden = rows[part].unsqueeze(0)
            target.kv.length = part.start
            given = None if mlp_rows is None else mlp_rows[part].unsqueeze(0)

            def observe(_: Any, inputs: Sequence[torch.Tensor], given: torch.Tensor | None = given) -> Any:
                mixed.append(inputs[0][0])
                return None if given is None else (given,)

            hook = norm.register_forward_pre_hook(observe)
            try:
                outputs.append(target.run_layer(index, hidden, target.begin(hidden, recording=recording))[0])
            finally:
                hook.remove()
        target.clear()
        return LayerOutputs(torch.cat(mixed), torch.cat(outputs))

    def experts(self, index: int, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Rows [M, H], as the norm in front of a mixture gives them, each through one expert, ``experts`` [M]."""
        rows, chosen = rows.to(self._device), experts.to(self._device).long()[:, None]
        found: torch.Tensor = self._layers[index].mlp.experts(rows, chosen, torch.ones_like(chosen, dtype=rows.dtype))
        return found

    @contextmanager
    def _filled(self, module: Any, at: str) -> Iterator[None]:
        """A module with its tensors, which are freed in the end."""
        names = self._names.get(at, [])
        found = self._read(names)
        prefix = f"{HEAD}." if at == HEAD else f"model.{at}."
        try:
            module.load_state_dict({name.removeprefix(prefix): each for name, each in found.items()}, assign=True)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            wrong = f"{self._files.path}: transformers' {at} does not take its tensors: {reason}"
            raise CheckpointError(wrong) from error
        module.requires_grad_(False)
        try:
            yield
        finally:
            for parent in module.modules():
                for name, weight in parent.named_parameters(recurse=False):
                    setattr(parent, name, torch.nn.Parameter(weight.to("meta"), requires_grad=False))

    def _read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Decoded tensors by transformers' names."""
        stored, packed = self._facts.model.quantization, dict[str, torch.Tensor]()
        if stored is not None and stored.method == MXFP4 and self._facts.model.family in MXFP4_FAMILIES:
            codes = [name for name in names if name.endswith(MXFP4_PARTS)]
            packed = _unpacked(dict(self._files.read(self._device, names=codes)), self._facts.prefix, self._dtype)
            names = [name for name in names if not name.endswith(MXFP4_PARTS)]
        files = replace(self._files, tensors={name: self._files.tensors[name] for name in names})
        return {**decoded_tensors(files, self._facts, self._device, self._dtype), **packed}


def _without_weights(facts: TargetFacts, dtype: torch.dtype) -> Any:
    """transformers' model with its parameters on the meta device and its buffers on the CPU."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = text_model_config(facts.model.family, facts.text_config)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return model.eval().requires_grad_(False)


def _unpacked(codes: Mapping[str, torch.Tensor], prefix: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What MXFP4 codes of gpt-oss stand for, as transformers decodes them: every value is one of bfloat16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = {}
    for name, blocks in codes.items():
        if name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            decoded = convert_moe_packed_tensors(blocks, codes[f"{whole}_scales"], dtype=torch.bfloat16)
            found[f"model.{whole.removeprefix(prefix)}"] = decoded.to(dtype)
    return found
