"""The pair's contract: golden pairs pass, every planted mismatch is refused with its two numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.errors import CheckpointError, PairError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.pair import PairFacts, check_pair, check_tokenizer_size
from dflash_local.models.target_facts import TargetFacts

GOLDEN = Path(__file__).parents[1] / "golden"
PAIRS = {
    "llama31-v1-b10": "llama",
    "qwen3-v1-b8": "qwen3",
    "qwen3-v2-swa-b16": "qwen3",
    "qwen35-v2-swa-b8": "qwen3_5",
    "qwen3-dflash2-b8": "qwen3",
    "qwen3-dflash2-b16": "qwen3",
}


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "qwen3-v1-b8", tmp_path / "pair")
    return tmp_path / "pair"


def edit(folder: Path, **changes: object) -> None:
    """Change keys of a config.json; ``dflash_config`` is merged, a value of None deletes the key."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        if key == "dflash_config":
            config[key].update(value)
        elif value is None:
            config.pop(key, None)
        else:
            config[key] = value
    file.write_text(json.dumps(config))


def retensor(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def check(pair: Path, **options: Any) -> PairFacts:
    return check_pair(Checkpoint.open(pair / "target"), Checkpoint.open(pair / "drafter"), **options)


@pytest.mark.parametrize("name", PAIRS)
def test_golden_pairs_pass(name: str) -> None:
    facts = check(GOLDEN / name)
    assert facts.target.model.family == PAIRS[name] and facts.target.embedding_rows == 96
    assert facts.notices == () and facts.context == 2048
    assert facts.block_size == facts.drafter.block_size == int(name.rsplit("b", 1)[1])


MISMATCHES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "vocabulary": ({"vocab_size": 100}, "drafter vocab_size 100, target vocab_size 96", True),
    "beyond": ({"dflash_config": {"target_layer_ids": [1, 2, 9]}}, "layer 9, but the target has 5 layers", False),
    "last": ({"dflash_config": {"target_layer_ids": [1, 2, 4]}}, "layer 4, but the target has 5 layers", False),
    "unsorted": ({"dflash_config": {"target_layer_ids": [2, 1, 3]}}, "not in order", True),
    "twice": ({"dflash_config": {"target_layer_ids": [1, 1, 3]}}, "a layer twice", True),
    "layers": ({"num_target_layers": 6}, "a target of 6 layers, this one has 5", True),
    "fc": ({"dflash_config": {"target_layer_ids": [1, 2]}}, "takes 192 features, 2 taps .* give 128", False),
    "mask": ({"dflash_config": {"mask_token_id": 96}}, "mask_token_id 96 .* 96 rows", False),
    "hidden": ({"hidden_size": 32}, "drafter hidden size 32, target hidden size 64", False),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_names_both_numbers(pair: Path, name: str) -> None:
    changes, said, overridable = MISMATCHES[name]
    edit(pair / "drafter", **changes)
    with pytest.raises(PairError, match=said) as caught:
        check(pair)
    assert caught.value.exit_code == 6
    if overridable:
        assert "--allow-mismatch" in caught.value.hint
        assert any("acceptance may be near 1" in notice for notice in check(pair, allow_mismatch=True).notices)
    else:
        with pytest.raises(PairError, match=said):
            check(pair, allow_mismatch=True)


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_mask_is_an_eos_id(pair: Path, where: str) -> None:
    (pair / "target" / "generation_config.json").write_text("{}")
    file = pair / "target" / where
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [1, 95]}))
    with pytest.raises(PairError, match="95 is the target's end-of-sequence id"):
        check(pair)


def test_block_sizes(pair: Path) -> None:
    assert check(pair, block_size=1).block_size == 1 and check(pair, block_size=5).block_size == 5
    for wanted in (0, -3, 4096):
        with pytest.raises(PairError, match=f"block size {wanted} is outside"):
            check(pair, block_size=wanted, allow_mismatch=True)
    with pytest.raises(PairError, match="9 is larger than the trained 8"):
        check(pair, block_size=9)
    assert check(pair, block_size=9, allow_mismatch=True).block_size == 9
    edit(pair / "drafter", block_size=1)
    with pytest.raises(CheckpointError, match="block_size 1 is outside 2..64"):
        check(pair)


def test_context_is_the_smaller_of_both(pair: Path) -> None:
    edit(pair / "drafter", max_position_embeddings=500)
    facts = check(pair)
    assert facts.context == 500 and "500 positions" in facts.notices[0]


def test_known_generations(pair: Path) -> None:
    known = {"layers": 2, "taps": [1, 2, 3], "mask_id": 95, "block": 8, "window": None}
    assert check(pair, generations=[{**known, "layers": 9}, known]).notices == ()
    with pytest.raises(PairError, match="none of the generations"):
        check(pair, generations=[{**known, "mask_id": 94}])


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [(151669, 151936, True), (151936, 151669, True), (151669, 151937, False), (151936, 150000, False)],
)
def test_padding_rule(pair: Path, one: int, other: int, fits: bool) -> None:
    """Up to 1024 rows and 1 %, the larger a multiple of 64: as Qwen3's 151669 ids in 151936 rows."""

    def table(tensors: dict[str, Any]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.zeros(other, 64, dtype=torch.bfloat16)

    retensor(pair / "target", table)
    edit(pair / "target", vocab_size=other)
    edit(pair / "drafter", vocab_size=one)
    if fits:
        assert check(pair).target.embedding_rows == other
    else:
        with pytest.raises(PairError, match=f"drafter vocab_size {one}, target vocab_size {other}"):
            check(pair)


def test_tokenizer_larger_than_the_embedding() -> None:
    facts = TargetFacts.from_checkpoint(Checkpoint.open(GOLDEN / "qwen3-v1-b8/target"))
    check_tokenizer_size(facts, 96)
    with pytest.raises(PairError, match="97 ids, the target's embedding 96 rows"):
        check_tokenizer_size(facts, 97)


def wrap(folder: Path, prefix: str, architecture: str, **top: object) -> None:
    """Turn a text target into its multimodal wrapper, with vision and mtp tensors beside it."""

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.") if name.startswith("model.") else name] = tensors.pop(name)
        tensors["model.visual.patch.weight"] = torch.ones(2)
        tensors["mtp.fc.weight"] = torch.ones(2)

    retensor(folder, rename)
    text = {**json.loads((folder / "config.json").read_text()), "model_type": "qwen3_5_text"}
    text["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
    config = {"architectures": [architecture], "model_type": "qwen3_5", "text_config": text, **top}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_wrapped_target_is_seen_through(pair: Path, prefix: str) -> None:
    wrap(pair / "target", prefix, "Qwen3_5ForConditionalGeneration", quantization_config={"quant_method": "modelopt"})
    facts = check(pair).target
    assert (facts.wrapped, facts.prefix, facts.model.num_layers) == (True, prefix, 5)
    assert facts.model.quantization.method == "modelopt"
    assert facts.model_type == "qwen3_5_text" and facts.model.family == "qwen3_5"


def test_tied_embeddings(pair: Path) -> None:
    retensor(pair / "target", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing and embeddings are not tied"):
        check(pair)
    edit(pair / "target", tie_word_embeddings=True)
    assert check(pair).target.model.tie_word_embeddings


def test_the_contract_is_checked_without_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from dflash_local.models.checkpoint import Checkpoint as C;"
        "from dflash_local.models.pair import check_pair; p = Path(sys.argv[1]);"
        "check_pair(C.open(p / 'target'), C.open(p / 'drafter')); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(GOLDEN / "qwen3-v1-b8")]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60).returncode == 0
