"""``engine.load_pair`` on checkpoints saved with transformers: families, wrapper, dtypes, formats, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_checkpoint import build_drafter
from dflash_local.catalog.bundled import Pair, find
from dflash_local.checkpoint_files.safetensors_folder import SafetensorsFolder
from dflash_local.checkpoint_files.safetensors_header import read_header
from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.config.read_model import read_model
from dflash_local.engine import LoadConfig, Session, load, load_fused
from dflash_local.errors import CheckpointError, PairError, UsageError
from dflash_local.kernels import timing
from dflash_local.kernels.timing import KernelTimer
from dflash_local.models import checkpoint
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import _options as target_options
from dflash_local.models.load_target import load_target, placement
from dflash_local.models.target_facts import TargetFacts
from dflash_local.planner import formats, hardware
from dflash_local.planner.machine import Machine, this_machine
from dflash_local.planner.plan import plan
from tests.engine_sessions import ask, random_prompt
from tests.expert_pairs import DRAFTER
from tests.families import FAMILIES, HIDDEN, RECURRENT, random_model, save_model

CPU32 = LoadConfig(dtype="float32", device="cpu")
PROMPT = random_prompt(12)
GOLDEN = Path(__file__).parent.parent / "golden"


def save_drafter(folder: Path, **changes: Any) -> Path:
    """A random drafter of the second schema for the tiny targets."""
    config = {**DRAFTER, "max_position_embeddings": 2048, "num_target_layers": 4, **changes}
    build_drafter(folder, config, HIDDEN, "cpu")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's saved random target; saved once."""
    root = tmp_path_factory.mktemp("families")

    def folder(family: str) -> Path:
        path = root / family
        return path if path.exists() else save_model(family, path)

    return folder


def plain_greedy(family: str, prompt: list[int], new: int) -> list[int]:
    """New ids of plain transformers, no cache."""
    model, ids = random_model(family), list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def open_pair(target: Path, drafter: Path | None, options: LoadConfig = CPU32) -> Session:
    return load(find(str(target), str(drafter) if drafter else None), options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_from_disk_and_equals_plain_transformers(
    family: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    session = open_pair(saved(family), save_drafter(tmp_path / "drafter"))
    want = plain_greedy(family, PROMPT, 9)
    assert ask(session, PROMPT, 9).ids == want
    assert ask(session, PROMPT, 9, mode="ar").ids == want
    assert session.runner.target.is_recurrent == (family in RECURRENT)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("qwen3_5", "float16")])
def test_half_precision_runs_and_the_drafter_stays_out_of_float16(
    family: str, dtype: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    session = open_pair(saved(family), save_drafter(tmp_path / "d"), LoadConfig(dtype=dtype, device="cpu"))
    assert len(ask(session, PROMPT, 20).ids) == 20
    assert session.runner.target.dtype == getattr(torch, dtype)
    assert session.runner.proposer.drafter.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "stored", "flags", "dtype"),
    [
        ("llama", torch.bfloat16, "avx512_bf16", "bfloat16"),
        ("llama", torch.bfloat16, "avx512f", "float32"),
        ("llama", torch.float32, "amx_bf16", "float32"),  # no stored bit is rounded away
        # Parts of these compute several rows otherwise than one.
        ("qwen3_5_moe", torch.bfloat16, "avx512_bf16", "float32"),
        ("gemma2", torch.bfloat16, "avx512_bf16", "float32"),
    ],
)
def test_the_automatic_dtype_of_a_cpu_is_the_plans(
    family: str, stored: torch.dtype, flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(family).to(stored).save_pretrained(tmp_path / family)
    (tmp_path / "cpuinfo").write_text(f"model name\t: a CPU\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(hardware, "PROCESSORS", tmp_path / "cpuinfo")
    model = read_model(json.loads((tmp_path / family / "config.json").read_text()), family)
    machine = this_machine("cpu")
    config, pair = LoadConfig(device="cpu"), Pair(family, tmp_path / family, None, False)
    assert load(pair, config).facts.load.dtype == plan(model, None, machine, config).dtype == "float32"  # a toy
    monkeypatch.setattr(formats, "SMALL", 0)
    assert load(pair, config).facts.load.dtype == plan(model, None, machine, config).dtype == dtype


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_a_pair_out_of_another_source_writes_alike(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Renamed(SafetensorsFolder):
        """Its weights have a name that nothing else looks for."""

        def tensors(self) -> dict[str, TensorInfo]:
            return read_header(self.path / "weights")

    pair, options = GOLDEN / "qwen3-v1-b8", replace(CPU32, engine=engine)
    want = ask(open_pair(pair / "target", pair / "drafter", options), PROMPT, 12).ids
    for part in ("target", "drafter"):
        shutil.copytree(pair / part, tmp_path / part)
        (tmp_path / part / "model.safetensors").rename(tmp_path / part / "weights")
    monkeypatch.setattr(checkpoint, "open_source", Renamed)
    assert ask(open_pair(tmp_path / "target", tmp_path / "drafter", options), PROMPT, 12).ids == want


def test_bitsandbytes_quantizes_the_weights_of_a_gguf_file() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: no wheel for this platform")
    options = LoadConfig(dtype="float32", device="cpu", quantize="bnb-int8")
    read, want = (open_pair(GOLDEN / "gguf" / name, None, options) for name in ("qwen3.gguf", "qwen3"))
    assert "Linear8bitLt" in {type(module).__name__ for module in read.runner.target.model.modules()}
    assert ask(read, PROMPT, 12, mode="ar").ids == ask(want, PROMPT, 12, mode="ar").ids


@pytest.mark.parametrize(("quantize", "layer"), [("bnb-nf4", "Linear4bit"), ("bnb-int8", "Linear8bitLt")])
def test_what_bitsandbytes_quantizes_runs_and_is_read_when_it_is_stored(
    quantize: str, layer: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: no wheel for this platform")
    pair, options = GOLDEN / "qwen35-v2-swa-b8", LoadConfig(dtype="bfloat16", device="cpu")
    made = open_pair(pair / "target", pair / "drafter", replace(options, quantize=quantize))
    assert layer in {type(module).__name__ for module in made.runner.target.model.modules()}
    assert made.facts.formats == f"{quantize} bfloat16" and len(ask(made, PROMPT, 12, mode="ar").ids) == 12
    files = Checkpoint.open(pair / "target")
    facts = TargetFacts.from_checkpoint(files)
    load_target(files, facts, placement("cpu", "bfloat16", quantize)).save_pretrained(tmp_path)
    read = open_pair(tmp_path, pair / "drafter", options)
    assert read.facts.loaded_as.startswith(f"reference {quantize} bfloat16 cpu")
    assert ask(read, PROMPT, 12).ids == ask(made, PROMPT, 12).ids
    stored, plain = (
        read_model(json.loads((each / "config.json").read_text()), "x") for each in (tmp_path, pair / "target")
    )
    machine = Machine("CPU", "cpu", 2**40, 2**40, "test", "cpu")
    found, want = plan(stored, None, machine, options), plan(plain, None, machine, replace(options, quantize=quantize))
    assert (found.engine, found.format, found.ledger) == ("reference", quantize, want.ledger)
    with pytest.raises(UsageError, match=f"int4 on top of {quantize} is not supported"):
        open_pair(tmp_path, None, replace(options, quantize="int4"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bitsandbytes_on_fused_experts_is_refused_by_name(family: str, saved: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"nf4.*experts"):
        open_pair(saved(family), None, LoadConfig(device="cpu", quantize="bnb-nf4"))


def test_kimi_style_drafter_with_yarn_over_a_latent_attention_target(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    yarn = {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    drafter = save_drafter(tmp_path / "drafter", rope_parameters=yarn)
    drafts = []
    for factor in (None, 1.4159):
        session = open_pair(
            saved("deepseek_v3"), drafter, LoadConfig(dtype="float32", device="cpu", attention_factor=factor)
        )
        assert ask(session, PROMPT, 20).ids == plain_greedy("deepseek_v3", PROMPT, 20)
        drafts.append(session.runner.proposer.drafter._rope.rows(7, 2)[0])
    assert torch.allclose(drafts[1], drafts[0] * 1.4159, rtol=1e-4), "the override scales cos and sin"


def damaged(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text((source / name).read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


NORM = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"{NORM}.*missing|missing.*{NORM}"),
        (lambda t: t.update({"model.layers.1.extra.weight": torch.ones(2)}), "model.layers.1.extra.weight"),
        (lambda t: t.update({NORM: torch.ones(3, 3)}), NORM),
        (lambda t: t[NORM].view(-1)[:1].fill_(float("nan")), NORM),
    ],
    ids=["missing", "extra", "shape", "nan"],
)
def test_a_damaged_target_is_refused_by_tensor_name(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        open_pair(damaged(saved("qwen3"), tmp_path / "target", change), None)
    assert error.value.exit_code == 6


def test_a_mismatched_pair_is_refused_before_weights_and_mismatch_can_be_allowed(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    drafter = save_drafter(tmp_path / "drafter", num_target_layers=6)
    with pytest.raises(PairError, match="6 layers"):
        open_pair(saved("qwen3"), drafter)
    session = open_pair(saved("qwen3"), drafter, LoadConfig(dtype="float32", device="cpu", allow_mismatch=True))
    assert any("6 layers" in n for n in session.facts.notices)
    assert ask(session, PROMPT, 12).ids == plain_greedy("qwen3", PROMPT, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [(LoadConfig(device="cuda:99"), "'cuda:99'"), (LoadConfig(device="cpu", context=10**9), "context 1000000000")],
)
def test_options_this_machine_cannot_take_are_refused_by_name(
    options: LoadConfig, message: str, saved: Callable[[str], Path]
) -> None:
    with pytest.raises(UsageError, match=message):
        open_pair(saved("qwen3"), None, options)


def test_the_reference_engine_says_that_it_drafts_in_full(saved: Callable[[str], Path], tmp_path: Path) -> None:
    drafter = save_drafter(tmp_path / "drafter")
    for given, told in (("8bit", 1), ("full", 0), ("auto", 0)):
        session = open_pair(saved("qwen3"), drafter, LoadConfig(engine="reference", drafter_precision=given))
        assert sum("--drafter-precision 8bit" in notice for notice in session.facts.notices) == told
        assert session.facts.load.drafter_precision == "full"


def test_the_drafters_position_table_caps_the_context(saved: Callable[[str], Path], tmp_path: Path) -> None:
    session = open_pair(saved("qwen3"), save_drafter(tmp_path / "drafter", max_position_embeddings=64))
    assert session.facts.context == 64
    assert len(ask(session, PROMPT, 500).ids) == 64 - len(PROMPT)


def test_a_draft_window_changes_drafts_never_text() -> None:
    pair = GOLDEN / "qwen3-v1-b8"
    case = json.loads((pair / "expected.json").read_text())["cases"][2]
    options = LoadConfig(dtype="float32", device="cpu", draft_window=4)
    reply = ask(open_pair(pair / "target", pair / "drafter", options), case["prompt_ids"], 72)
    assert reply.ids == case["output_ids"]
    assert list(reply.finished.stats.acceptance_lengths) != case["acceptance_lengths"]


def test_times_that_changed_since_the_choice_are_a_notice_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[KernelTimer] = []
    monkeypatch.setattr(timing, "repeat", lambda work, seconds: None)

    def choose_configs(layers: object, rows: int, progress: object, timer: KernelTimer) -> None:
        timers.append(timer)
        timer.agrees(100.0, lambda: None, lambda: 250.0)

    monkeypatch.setattr(load_fused, "choose_configs", choose_configs)
    monkeypatch.setattr(load_fused, "choose_experts", lambda parts, rows, exact, progress, timer: timers.append(timer))
    session = load(find("demo"), LoadConfig(device="cpu", engine="fused"))
    first, second = timers
    assert first is second, "one for a load"
    assert [line for line in session.facts.notices if "measured again" in line] == [first.notice]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says that two are there, with 1000 and 1001 bytes free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1000 + index, 2000))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "home", "gpus"),
    [("cuda", "cuda", ()), ("cuda:1", "cuda:1", ()), ("balanced", "cuda:0", (0, 1)), ("cuda:1,0", "cuda:1", (1, 0))],
)
def test_of_several_gpus_the_first_one_is_home(
    device: str, home: str, gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = placement(device, "auto")
    assert (where.home, where.gpus) == (home, gpus)
    asked = []
    monkeypatch.setattr(load_fused, "even_split", lambda *given: asked.append(given[-1]) or SimpleNamespace(layers=3))
    pair: Any = SimpleNamespace(
        where=where, facts=SimpleNamespace(model=None), contract=None, config=LoadConfig(), context=9
    )
    front = load_fused._front(pair)
    if gpus:
        assert front == (3, torch.device("cuda", gpus[1])) and asked == [tuple(1000 + index for index in gpus)]
    else:
        assert front is None and not asked


def test_the_split_of_two_cards_is_found_before_a_drafter_takes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()
    for name in ("_front", "_block_weights"):
        real = getattr(load_fused, name)
        monkeypatch.setattr(load_fused, name, lambda *how, name=name, real=real: (order.append(name), real(*how))[1])
    load(find("demo"), LoadConfig(device="cpu", engine="fused", drafter_precision="8bit", context=256)).close()
    assert order == ["_front", "_block_weights"]


@pytest.mark.usefixtures("two_gpus")
def test_transformers_is_told_of_the_named_gpus_alone() -> None:
    named, every = (target_options(placement(each, "auto"), None) for each in ("cuda:1,0", "balanced"))
    assert named["device_map"] == every["device_map"] == "balanced" and "max_memory" not in every
    assert named["max_memory"] == {1: 1001, 0: 1000}
    for device in ("cuda:2", "cuda:0,2"):
        with pytest.raises(UsageError, match="device 'cuda:2' is not there"):
            placement(device, "auto")
