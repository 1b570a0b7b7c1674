"""``dflash show`` and ``dflash plan``: figures as the sources quote them, and whether they fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app import fitting
from dflash_local.catalog import bundled
from dflash_local.catalog.shapes import shape
from dflash_local.config.quantizers import USUAL
from dflash_local.drafters.dflash2 import layout as dflash2_layout
from dflash_local.planner import accelerators, card_probe, cpu_probe, hardware, machine
from dflash_local.planner.accelerators import Accelerator
from dflash_local.store import adaptations
from tests.cli.conftest import DRAFTER, TARGET, Cli
from tests.fake_hub import FakeHub

GIB = 2**30


def line_of(text: str, start: str) -> str:
    return next(line.strip() for line in text.splitlines() if line.strip().startswith(start))


def test_show_agrees_with_the_quoted_figures(cli: Cli) -> None:
    shown = cli("show", "Qwen/Qwen3.5-9B", "--gpu-memory", "24", "--details")
    text = shown.out
    assert (
        shown.code == 0 and line_of(text, "download") == "download      17.98 GiB target + 2.41 GiB drafter = 20.39 GiB"
    )
    assert re.search(r"^context +262,144 tokens$", text, re.M) and "not gated" in line_of(text, "licence")
    assert re.search(r"v2 +6 +16 +4096 +unknown +unknown +1 5 9 13 17 21 25 29", text)
    assert re.search(r"v1 +5 +16 +none +248070 +492f4b532a95 +1 8 15 22 29", text)
    flat = " ".join(text.split())
    assert "target KV 32.0 KiB" in flat and "the recurrent state 49.5 MiB whatever the context" in flat
    assert re.search(r"Math500 +5\.67 +3\.4x +7\.34 +4\.1x", text) and "not measured here" in text
    assert "B200" in text and "SGLang" in text and "as a server" in text
    assert re.search(r"^Qwen/Qwen3.5-9B in bfloat16, context [\d,]+, block 16: fits$", text, re.M)
    assert all(len(line) <= 100 for line in text.splitlines() if "--spec" not in line)


def test_show_json_is_complete(cli: Cli) -> None:
    found = cli("show", "qwen3.5-9b", "--gpu-memory", "24", "--json").json
    assert found["target"]["id"] == "Qwen/Qwen3.5-9B" and found["drafter"]["id"] == "z-lab/Qwen3.5-9B-DFlash"
    assert found["per_token_bytes"] == {"target_kv": 32768, "drafter_kv": 24576, "recurrent_state": 51904512}
    assert abs(found["per_token_bytes"]["recurrent_state"] / 51.9e6 - 1) < 0.01
    sizes = {line["name"]: line["bytes"] for line in found["plan"]["ledger"]["lines"]}
    assert abs(sizes["drafter weights"] / GIB - 2.41) < 0.1  # and the rope table, which no file holds
    assert 16 < (sizes["target weights"] + sizes["head"]) / GIB < 17.98  # vision and MTP parts stay unloaded
    formats = ["bfloat16", "fp8", "int8", "int4", "bnb-int8", "bnb-nf4"]
    assert [plan["format"] for plan in found["fits"]] == formats and found["plan"]["fits"]
    assert found["local"]["state"] == "absent" and set(found["server_commands"]) == {"vLLM", "SGLang"}
    cells = {(cell["task"], cell["block"], cell["concurrency"]): cell for cell in found["published"]}
    assert cells["Math500", 16, 1]["acceptance_length"] == 7.34 and len(cells) > 12


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["Qwen/Qwen3.6-35B-A3B", "zai-org/GLM-5.1", "demo"])
def test_show_keeps_to_the_width(cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int, name: str) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = cli("show", name, "--gpu", "H200", "--details")
    commands = ("vllm serve", "sglang.launch_server")
    lines = [line for line in shown.out.splitlines() if not any(word in line for word in commands)]
    assert shown.code == 0 and max(map(len, lines)) <= width and "None" not in shown.out


def test_unknown_stays_unknown(cli: Cli) -> None:
    announced = cli("show", "zai-org/GLM-5.1")
    assert announced.code == 0 and "none published yet" in announced.out and "no source tells" in announced.out
    found = cli("show", "zai-org/GLM-5.1", "--json").json
    assert found["plan"] is None and found["context"] is None and found["per_token_bytes"]["target_kv"] is None


def test_a_server_target_shows_the_exact_command(cli: Cli) -> None:
    expected = (
        "vllm serve moonshotai/Kimi-K2.5 --speculative-config "
        '\'{"method": "dflash", "model": "z-lab/Kimi-K2.5-DFlash", "num_speculative_tokens": 7, "revision": '
    )
    for command in ("show", "plan"):
        told = cli(command, "moonshotai/Kimi-K2.5")
        assert told.code == 0 and "runs on a server only, on 8 GPUs" in told.out
        assert any(line.strip().startswith(expected) for line in told.out.splitlines())
        assert "dflash chat MODEL --url http://HOST:PORT" in told.out
        flagged = [line for line in told.out.splitlines() if "--trust-remote-code" in line]
        assert len(flagged) == 1 and "they start with --trust-remote-code only" in flagged[0]
    found = cli("plan", "moonshotai/Kimi-K2.5", "--json").json
    assert found["runs_on"] == "server" and found["tensor_parallel"] == 8
    assert found["server_commands"]["vLLM"].startswith(expected)
    weights = found["plan"]["ledger"]["lines"][0]["bytes"] / GIB
    assert abs(weights / 554.3 - 1) < 0.01


def test_a_dflash2_pair_is_planned_as_another_is(cli: Cli) -> None:
    name = "Qwen/Qwen3.8-27B"
    for gib, weights in (("24", "int4"), ("80", "bfloat16")):
        told = cli("plan", name, "--gpu-memory", gib, "--details")
        assert told.code == 0 and f"{name} in {weights}" in told.out and "block 8: fits" in told.out
        assert "engine: fused" in told.out and "slow" not in told.out.partition("what fits")[0]
        assert "not quoted by any source, of Qwen/Qwen3.8-27B" in told.out
    shown = " ".join(cli("show", name).out.split())
    assert "z-lab/Qwen3.8-27B-DFlash2, kind dflash2 " in shown and "server only" not in shown


def test_what_only_the_reference_engine_drafts_with_is_called_slow(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash2_layout, "MOST_CANDIDATES", 8)
    name = "Qwen/Qwen3.8-27B"
    told = cli("plan", name, "--gpu-memory", "24", "--details")
    line = next(line for line in " ".join(told.out.split()).split(" weights: ") if "engine: reference" in line)
    why = "its drafter chooses among 16 candidates, 8 fit"
    assert f"{why}, which is slow: with --mode ar the fused engine runs the target" in line
    short = " ".join(cli("plan", name, "--gpu-memory", "24").out.split())
    assert f"which is slow: {why}" in short and "better --mode ar: the fused engine" in short
    alone = cli("plan", name, "--gpu-memory", "24", "--mode", "ar", "--details")
    assert alone.code == 0 and "engine: fused" in alone.out and "slow" not in alone.out.partition("what fits")[0]
    asked = cli("plan", name, "--gpu-memory", "80", "--engine", "fused")
    assert asked.code == 2 and why in asked.err
    reference = cli("plan", name, "--gpu-memory", "80", "--engine", "reference").out
    assert "slow" in reference and "--mode ar" not in reference and why not in reference


def test_a_targets_own_layer_is_planned(cli: Cli) -> None:
    norms = 5 * 4096 + 2 * 256  # which the fused engine keeps in float32
    for engine, wider in (("auto", norms), ("reference", 0)):
        asked = ("plan", "Qwen/Qwen3.5-9B", "--drafter", "mtp", "--gpu-memory", "24", "--engine", engine)
        found = cli(*asked, "--json").json["plan"]
        sizes = {line["name"]: line["bytes"] for line in found["ledger"]["lines"]}
        assert (found["engine"], found["block_size"]) == ("fused" if wider else "reference", 5)
        assert sizes["drafter weights"] == 2 * (243_290_624 + wider)
    told = " ".join(cli("plan", "Qwen/Qwen3.5-9B", "--drafter", "mtp", "--gpu-memory", "24", "--details").out.split())
    assert "engine: fused" in told and "which is slow" not in told
    refused = cli("plan", "demo", "--drafter", "mtp")
    assert refused.code == 6 and "a layer of its own has a target of architecture Qwen3_5ForCausalLM" in refused.err


def test_plan_takes_what_fits_and_says_why_nothing_finer_does(cli: Cli) -> None:
    found = cli("plan", "Qwen/Qwen3.6-27B", "--gpu-memory", "24", "--details")
    flat = " ".join(found.out.split())
    assert found.code == 0 and found.err == "" and "Qwen/Qwen3.6-27B in int4 g128, context" in flat
    assert "weights: autoround-int4, published in 4 bits; their fidelity is not known" in flat
    assert "take them with: dflash chat Qwen/Qwen3.6-27B --variant autoround-int4" in flat
    assert re.search(r"fp8, rounded at load: .* needs .* GiB too little", flat)
    assert re.search(r"bfloat16 +no +2,048 +\d+\.\d\d GiB +\d+\.\d\d GiB too little", found.out)
    asked = cli("plan", "Qwen/Qwen3.6-27B", "--gpu-memory", "32", "--quantize", "bnb-nf4", "--details")
    assert asked.code == 0 and "in bnb-nf4" in asked.out and asked.err == ""


def test_plan_says_what_does_not_fit_and_what_would(cli: Cli) -> None:
    failed = cli("plan", "Qwen/Qwen3.6-27B", "--gpu-memory", "24", "--quantize", "fp8", "--details")
    assert failed.code == 5 and failed.out == ""
    assert "Qwen/Qwen3.6-27B in fp8, context 2,048, block 16: does not fit" in failed.err
    assert "--quantize int4" in verdict_of(failed.err)["nearest"]
    tiny = cli("plan", "Qwen/Qwen3.6-27B", "--gpu-memory", "12")
    assert tiny.code == 5 and verdict_of(tiny.err)["nearest"].startswith("a card of ")
    assert tiny.err.count("does not fit") == 1 and "error" not in tiny.err and "too little" not in tiny.err


def test_plan_tells_the_speed_of_a_card_of_which_a_data_sheet_is_known(cli: Cli) -> None:
    text = " ".join(cli("plan", "qwen3.5-9b", "--gpu", "RTX 4090", "--details").out.split())
    assert "predicted speed, fitted to measurements of one NVIDIA H200 with random weights" in text
    assert "scaled by data sheets, 1,008 of 4,800 GB/s" in text
    assert "never measured on such a card" in text and "acceptance length 5.1 to 7.93: model card of" in text
    assert re.search(r"1,024 \d+ tok/s \d+ to \d+ tok/s 0\.\d+ s 8,192", text) and "first token: of a prompt" in text
    assert "cycle" not in text
    found = cli("plan", "qwen3.5-9b", "--gpu", "RTX 4090", "--prefer", "speed", "--json").json["recommended"]
    assert found["preference"] == "speed" and found["best"]["variant"] and found["best"]["prediction"]["at"]
    plain = cli("plan", "qwen3.5-9b", "--gpu", "RTX 4090", "--mode", "ar", "--details").out
    assert re.search(r"1,024 +\d+ tok/s +- +0\.\d+ s\n", plain) and "acceptance" not in plain


def test_plan_says_what_several_gpus_are_good_for(cli: Cli) -> None:
    flat = " ".join(cli("plan", "qwen3.6-27b", "--gpu", "RTX 3090", "--gpus", "2").out.split())
    assert re.search(r"over 2 x RTX 3090 --device balanced takes [\d.]+ GiB of the 47.20 GiB there are with \S+,", flat)
    many = " ".join(cli("plan", "qwen3-coder-next", "--gpu-memory", "12", "--gpus", "2").err.split())
    assert "GiB there are, too much with" in many
    assert re.search(r"\(0\.\d+ % slower than one RTX 3090 that held it all, predicted: 58 us to the other card", flat)
    assert "1 % slower than one card that held it all, two H200" in " ".join(
        cli("plan", "qwen3.5-9b", "--gpu", "RTX 3060", "--gpus", "2").out.split()
    )
    assert re.search(r"all of them at once, but the published weights take 27\.\d+ GiB of each, and 23\.60", flat)
    server = " ".join(cli("plan", "qwen3.6-27b", "--gpu", "RTX A6000", "--gpus", "2").out.split())
    assert "at once: vllm serve Qwen/Qwen3.6-27B" in server and server.endswith("--tensor-parallel-size 2")
    three = " ".join(cli("plan", "qwen3.6-27b", "--gpu", "RTX A6000", "--gpus", "3").out.split())
    assert "a server works on 2 of them at once: vllm" in three and three.endswith("--tensor-parallel-size 2")
    found = cli("plan", "qwen3.5-9b", "--gpu-memory", "24", "--gpus", "4", "--json").json
    spread = found["several_gpus"]["spread"]
    assert spread["engine"] == found["plan"]["engine"] == "fused" and spread["machine"]["name"].startswith("2 of 4 x ")
    plain = cli("plan", "qwen3.5-9b", "--gpu-memory", "24", "--gpus", "4", "--engine", "reference", "--json").json
    assert plain["several_gpus"]["spread"]["machine"]["name"].startswith("4 x ")
    assert cli("plan", "qwen3.5-9b", "--gpu-memory", "24", "--json").json["several_gpus"] is None
    unlike = cli("plan", "qwen3.6-27b", "--gpu", "RTX 3090", "--gpu", "RTX 5060 Ti", "--json").json["several_gpus"]
    assert unlike["slower"]["card"] == "RTX 3090" and 0.1 < unlike["slower"]["share"] < 0.5
    cards, needs = unlike["spread"]["machine"], unlike["spread"]["ledger"]["cards"]
    assert cards["name"] == "RTX 3090 and RTX 5060 Ti" and needs[0] > 1.3 * needs[1]
    asked = ("plan", "qwen3.6-27b", "--gpu", "RTX 5060 Ti", "--gpu", "RTX 3090")
    roomier = cli(*asked, "--json").json
    assert roomier["plan"]["machine"]["name"] == "RTX 3090", "the one that a machine of both would choose"
    cards, needs = (roomier["several_gpus"]["spread"][key] for key in ("machine", "ledger"))
    assert cards["name"] == "RTX 5060 Ti and RTX 3090" and needs["cards"][1] > needs["cards"][0]
    both = cli(*asked, "--device", "balanced", "--json").json
    assert both["plan"]["machine"]["name"] == cards["name"] and both["several_gpus"] is None
    begin = "start it with: dflash chat Qwen/Qwen3.6-27B --variant autoround-int4\n"
    assert begin in cli(*asked, "--device", "cpu").out, "which this machine has, not that one"
    third = " ".join(cli("plan", "qwen3.6-27b", "--gpu", "L4", *asked[2:], "--gpu", "RTX 4090").out.split())
    assert "over RTX 3090 and RTX 4090 --device cuda:2,3 takes" in third, "the two with most memory"
    unknown = " ".join(cli("plan", "qwen3.5-9b", "--gpu", "RTX 3090", "--gpu", "RTX 3060").out.split())
    assert "(each layer at the speed of its card, which is not predicted)" in unknown and "1 % slower" not in unknown
    short = cli("plan", "qwen3-coder-next", "--gpu-memory", "12", "--gpus", "3", "--device", "balanced").err
    assert re.search(r"missing +[\d.]+ GiB: 23\.20 GiB is free", short), "of the two that the fused engine takes"
    assert "two cards like this one" not in short and "nearest  a card of 48 GiB" in short
    refused = cli("plan", "qwen3.6-27b", "--gpu", "RTX 3090", "--gpu", "RTX 4090", "--gpus", "2").err
    assert "--gpu is given more than once" in refused
    alone = " ".join(cli("plan", "qwen3.5-27b", "--gpu-memory", "12").err.split())
    assert "RTX 4090) or two cards like this one with --device balanced (autoround-int4)" in alone
    assert "--gpus 2 needs to know which" in cli("plan", "qwen3.5-9b", "--gpus", "2").err


def test_plan_json_carries_the_ledger_either_way(cli: Cli) -> None:
    failed = cli("plan", "Qwen/Qwen3.6-27B", "--gpu-memory", "24", "--quantize", "int8", "--json")
    told = json.loads(failed.err)
    assert failed.code == 5 and failed.out == "" and told["error"]["type"] == "DoesNotFitError"
    assert told["fits"] is False and told["nearest"]["format"] == "int4" and told["nearest"]["fits"]
    book = told["plan"]["ledger"]
    weights = sum(line["bytes"] for line in book["lines"] if line["name"] in ("target weights", "head"))
    (embedding, _snapshots) = book["host"]  # what could be spared of the device is
    assert 25 < (weights + embedding["bytes"]) / GIB < 30
    fits = cli("plan", "Qwen/Qwen3-4B", "--gpu-memory", "24", "--context", "8192", "--json").json
    assert fits["fits"] and fits["plan"]["context"] == 8192 and fits["nearest"] is None
    assert fits["plan"]["ledger"]["total"] <= fits["plan"]["machine"]["free"]


def test_plan_takes_bundled_pairs_folders_and_options(cli: Cli) -> None:
    folder = bundled.FOLDER / "demo-hybrid"
    for argv in (("demo",), (str(folder / "target"), "--drafter", str(folder / "drafter"))):
        found = cli("plan", *argv, "--json").json
        assert found["fits"] and found["plan"]["block_size"] == 8 and found["plan"]["context"] == 2048
    alone = cli("plan", "demo", "--mode", "ar", "--json").json["plan"]
    assert not alone["draft"] and "drafter weights" not in {line["name"] for line in alone["ledger"]["lines"]}
    assert cli("plan", "demo", "--context", "4096").code == 2
    assert cli("plan", "nothing/here").code == 3
    assert cli("plan", "zai-org/GLM-5.1").code in (0, 3)


def test_plan_of_a_quantised_folder_counts_what_is_stored(cli: Cli, tmp_path: Path) -> None:
    known = {key: value for key, value in (shape("Qwen/Qwen3.5-9B") or {}).items() if not key.startswith("_")}
    (tmp_path / "config.json").write_text(json.dumps({**known, "quantization_config": USUAL["int4-g128"]}))
    shown = cli("plan", str(tmp_path), "--gpu-memory", "12", "--details")
    assert shown.code == 0 and "in int4 g128, context" in shown.out and "engine: fused" in shown.out
    assert re.search(r"target weights +5\.23 GiB +int4 g128, as stored", shown.out)
    decoded = cli("plan", str(tmp_path), "--gpu-memory", "12", "--engine", "reference", "--details")
    assert decoded.code == 5 and "in bfloat16, context 2,048" in " ".join(decoded.err.split())


def test_plan_of_a_target_quantised_for_servers_says_where_replies_differ(cli: Cli, tmp_path: Path) -> None:
    known = {key: value for key, value in (shape("Qwen/Qwen3.5-9B") or {}).items() if not key.startswith("_")}
    (tmp_path / "config.json").write_text(json.dumps({**known, "quantization_config": USUAL["nvfp4"]}))
    shown = cli("plan", str(tmp_path), "--gpu-memory", "16", "--details")
    assert shown.code == 0 and "in nvfp4, context" in shown.out
    assert "quantised for activations in 4 bits" in " ".join(shown.out.split())
    (tmp_path / "config.json").write_text(json.dumps({**known, "quantization_config": USUAL["int4-g128"]}))
    assert "quantised for" not in cli("plan", str(tmp_path), "--gpu-memory", "16", "--details").out


def test_plan_takes_the_gpus_that_are_named_the_first_with_head_and_drafter(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"NVIDIA GeForce RTX 3090": 24, "NVIDIA GeForce RTX 5060 Ti": 16, "NVIDIA L4": 23}
    seen = tuple(
        Accelerator(at, f"GPU-{at}", name, "580.1", size * 2**30, size * 2**30 - 2**28, capability=(8, 6))
        for at, (name, size) in enumerate(sizes.items())
    )
    monkeypatch.setattr(accelerators, "nvidia", lambda _probe: seen)
    monkeypatch.setattr(accelerators, "unusable", lambda _driver: "")
    monkeypatch.setattr(machine, "find_spec", lambda _name: object())
    monkeypatch.setattr(card_probe, "take", lambda *_given: None)
    needs = {}
    for device in ("cuda:0,1", "cuda:1,0"):
        found = cli("plan", "qwen3.6-27b", "--device", device, "--json").json["plan"]
        assert found["engine"] == "fused" and found["machine"]["device"] == device
        needs[device] = found["ledger"]["cards"]
    assert needs["cuda:0,1"][0] > 1.2 * needs["cuda:0,1"][1] and needs["cuda:1,0"][1] > 1.2 * needs["cuda:1,0"][0]
    three = cli("plan", "qwen3.6-27b", "--device", "cuda:2,0,1", "--json").json["plan"]["machine"]["name"]
    assert three == "2 of NVIDIA L4 and NVIDIA GeForce RTX 3090 and NVIDIA GeForce RTX 5060 Ti"
    refused = cli("plan", "qwen3.6-27b", "--device", "cuda:0,3")
    assert refused.code == 2 and "device 'cuda:3' is not there" in refused.err
    assert "names a GPU twice" in cli("plan", "qwen3.6-27b", "--device", "cuda:0,0").err
    monkeypatch.setenv("DFLASH_DEVICE", "cuda:1")
    asked = (("models",), ("show", "qwen3.6-27b"), ("show", "qwen3.6-27b", "--device", "cuda:1"))
    assert {cli(*words, "--json").json["machine"]["device"] for words in asked} == {"cuda:1"}
    assert cli("show", "qwen3.6-27b", "--device", "cuda:2", "--json").json["machine"]["device"] == "cuda:2"
    monkeypatch.setenv("DFLASH_DEVICE", "cuda:7")
    assert cli("models", "--json").json["machine"]["device"] == "cuda:0", "a list is shown all the same"


def test_a_device_that_is_not_there_is_an_error_in_words(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gone = cli("plan", "Qwen/Qwen3-4B", "--device", "cuda")
    assert gone.code == 2 and "device 'cuda' is not there" in gone.err and "Traceback" not in gone.err
    assert cli("plan", "demo").code == 0 and "CPU" in cli("plan", "demo").out


def test_plan_says_that_other_programs_have_the_memory(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory", lambda: hardware.Memory(24 * 2**30, 3 * 2**30, limited=False))
    for rate in (1e9, 1e12):  # bytes/s: too slow for a chat, and not
        rates = cpu_probe.CpuRates("", dict.fromkeys(cpu_probe.ROWS, rate))
        monkeypatch.setattr(fitting, "_cpu_rates", lambda *_, rates=rates: rates)
        told = cli("plan", "Qwen/Qwen3-4B", "--device", "cpu")
        flat = " ".join(told.out.split())
        assert told.code == 0 and ("below the 3 that a chat needs" in flat) == (rate == 1e9)
        assert flat.count("and 3.0 GiB of main memory is free right now: close other programs first") == 1


def test_show_tells_what_is_here(cli: Cli, toy_hub: FakeHub, own_home: Path) -> None:
    assert f"no; dflash pull {TARGET}" in cli("show", TARGET).out
    assert cli("pull", TARGET).code == 0
    shown = cli("show", DRAFTER).out
    assert "verified, 7.4 MiB in" in " ".join(shown.split()) and "overridden" in shown
    assert re.search(r"weights +float32, .*\n +context +2,048", shown)  # the shape comes from the files now
    found = cli("show", TARGET, "--json").json
    assert found["local"]["state"] == "local" and found["local"]["verified"] and found["overridden"]
    hub = own_home / ".cache" / "huggingface" / "hub" / "models--toys--Toy-9B"
    next(hub.glob("snapshots/*/model.safetensors")).unlink()
    told = " ".join(cli("show", TARGET).out.split())  # a long path moves the line ends
    assert "in part, " in told and "lacking: target" in told


def test_a_pre_quantised_target_is_planned_by_its_own_name(cli: Cli) -> None:
    failed = cli("plan", "Qwen/Qwen3.5-27B-GPTQ-Int4", "--gpu-memory", "24", "--json")
    told = json.loads(failed.err)
    book = told["plan"]["ledger"]
    sizes = {line["name"]: line["bytes"] for line in (*book["lines"], *book["host"])}
    assert failed.code == 5 and told["fits"] is False
    assert sizes["target weights"] + sizes["head"] + sizes["embedding"] == pytest.approx(26.44 * GIB, rel=0.001)
    assert cli("plan", "cyankiwi/Qwen3.6-27B-AWQ-INT4", "--gpu-memory", "24").code == 0


def test_variants_are_planned_and_the_one_that_fits_is_taken(cli: Cli) -> None:
    found = cli("plan", "qwen3.6-27b", "--gpu-memory", "24", "--details")
    told = cli("plan", "qwen3.6-27b", "--gpu-memory", "24", "--json").json
    fits = {one["name"]: one["fits"] for one in told["variants"]}
    assert fits["autoround-int4"] and fits["pack-quantized-int4"] and not fits["fp8"] and not fits["gptq-int8"]
    assert next(one for one in told["variants"] if one["name"] == "awq-int4")["plan"] is None, "unknown is not guessed"
    assert told["recommended"]["best"]["variant"] == "autoround-int4"
    assert re.search(
        r"fp8 +no +2,048 +\d+\.\d\d GiB +\d+\.\d\d GiB too little", found.out.partition("pre-quantised")[2]
    )
    tight = cli(
        "plan", "qwen3.6-27b", "--gpu-memory", "24", "--context", "49152", "--drafter-precision", "8bit", "--details"
    )
    assert re.search(r"autoround-int4 +yes .* embedding in host", tight.out)
    roomy = cli("plan", "qwen3.6-27b", "--gpu-memory", "80", "--details")
    assert roomy.code == 0 and "autoround-int4" in roomy.out and "take them with" not in roomy.out
    shown = cli("show", "qwen3.6-27b", "--gpu-memory", "24", "--details").out
    assert "Lorbus/Qwen3.6-27B-int4-AutoRound" in shown and "licence Apache-2.0" in shown and "--variant" in shown
    plans = {one["name"]: one for one in cli("show", "qwen3.6-27b", "--json").json["variant_plans"]}
    assert plans["fp8"]["plan"]["ledger"]["lines"][0]["bytes"] > 20 * GIB


def test_a_variant_is_its_repository_under_another_name(cli: Cli) -> None:
    by_name = cli("plan", "qwen3.6-27b", "--variant", "AutoRound-Int4", "--gpu-memory", "24", "--json").json
    by_repo = cli("plan", "Lorbus/Qwen3.6-27B-int4-AutoRound", "--gpu-memory", "24", "--json").json
    assert by_name == by_repo and by_name["plan"]["format"] == "int4 g128" and by_name["variants"] == []
    wrong = cli("plan", "qwen3.6-27b", "--variant", "int3")
    assert wrong.code == 2 and "has no variant 'int3'" in wrong.err and "autoround-int4" in wrong.err
    of_another = cli("plan", "Lorbus/Qwen3.6-27B-int4-AutoRound", "--variant", "pack-quantized-int4", "--json")
    assert "cyankiwi/Qwen3.6-27B-AWQ-INT4" in of_another.out + of_another.err
    assert cli("plan", "no-such", "--variant", "fp8").err.startswith("error: unknown model 'no-such'")
    none = cli("plan", "demo", "--variant", "fp8")
    assert none.code == 2 and "no pre-quantised variants of demo are known" in none.err
    for command in ("run", "chat", "serve", "bench", "pull", "plan"):
        assert "--variant" in cli(command, "--help-all").out


def test_show_names_a_damaged_adaptation(cli: Cli) -> None:
    path = adaptations.path_of(settings.load(), bundled.find("demo").drafting_name)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no header" * 9)
    shown = cli("show", "demo")
    assert shown.code == 0 and f"{path.name} has a header of" in shown.out
    assert "its drafter is taken as it was published (remove it, or run dflash adapt again)" in shown.out


def test_show_has_a_line_for_each_of_several_machines(cli: Cli) -> None:
    found = cli("show", "moonshotai/Kimi-K2.5", "--nodes", "2")
    lines = [line.strip() for line in found.out.splitlines()]
    vllm = [line for line in lines if line.startswith("vllm serve moonshotai/Kimi-K2.5 ")]
    assert found.code == 0 and len(vllm) == 2 and all("--tensor-parallel-size 16" in line for line in vllm)
    assert "--node-rank 0" in vllm[0] and "--node-rank 1" in vllm[1] and vllm[1].endswith("--headless")
    assert "then: dflash chat moonshotai/Kimi-K2.5 --url http://HEAD_ADDRESS:8000" in lines
    sglang = [line for line in lines if "sglang.launch_server" in line]
    assert len(sglang) == 2 and all("--tp-size 16 " in line and "--nnodes 2" in line for line in sglang)
    assert all(len(line) <= 100 for line in found.out.splitlines() if "--nnodes" not in line)
    commands = cli("show", "qwen3.5-9b", "--nodes", "4", "--json").json["server_commands"]
    assert {name: len(of_nodes) for name, of_nodes in commands.items()} == {"vLLM": 4, "SGLang": 4}


def test_show_of_several_machines_refuses_what_it_cannot_say(cli: Cli) -> None:
    none = cli("show", "demo", "--nodes", "2")
    assert none.code == 3 and "no command is known that serves" in none.err
    assert cli("show", "qwen3.5-9b", "--nodes", "1").code == 2


def verdict_of(text: str) -> dict[str, str]:
    """The four lines that a page opens with, by their labels."""
    found, label = dict[str, str](), ""
    for line in text.splitlines()[1:]:
        if not line.startswith("  "):
            break
        if line[2] == " ":
            found[label] += f" {line.strip()}"
        else:
            label, _, found[label] = line.strip().partition(" ")
    return {label: words.strip() for label, words in found.items()}


def test_plan_opens_with_a_verdict_of_four_lines(cli: Cli) -> None:
    shown = cli("plan", "qwen3.5-9b", "--gpu-memory", "24").out
    assert shown.startswith("Qwen/Qwen3.5-9B on RTX 4090 (24 GiB, 1,008 GB/s): fits\n") and len(shown.splitlines()) < 12
    found = verdict_of(shown)
    assert list(found) == ["weights", "context", "speed", "better"]
    assert found["weights"] == "bfloat16, published weights, 20.39 GiB to download"
    assert re.fullmatch(r"[\d,]+ tokens of 262,144", found["context"])
    assert re.fullmatch(r"about \d+ tok/s plain, \d+ to \d+ drafted \(published acceptance\)", found["speed"])
    assert re.match(r"--variant autoround-int4: about \d+ tok/s plain, \d+ to \d+ drafted, ", found["better"])
    assert "cycle" not in shown and "MEMORY" not in shown and "--details" in shown
    assert verdict_of(cli("show", "qwen3.5-9b", "--gpu-memory", "24").out) == found
    short = verdict_of(cli("plan", "qwen3-14b", "--gpu-memory", "16").out)
    assert "acceptance of similar pairs" in short["speed"]
    assert re.fullmatch(r".*--kv-cache int8: [\d,]+ more tokens of context, which changes replies", short["better"])
    whole = verdict_of(cli("plan", "qwen3.5-9b", "--gpu-memory", "80", "--prefer", "speed").out)
    assert "all that the models were made for" in whole["context"] and "variant autoround-int4" in whole["weights"]
    assert whole["better"] == "nothing that this program knows"


def test_what_does_not_fit_says_what_is_missing_and_the_nearest_that_does(cli: Cli) -> None:
    large = cli("plan", "qwen3.6-35b-a3b", "--gpu-memory", "8")
    found = verdict_of(large.err)
    assert large.code == 5 and list(found) == ["weights", "needs", "missing", "nearest"]
    needs, missing = (float(found[label].partition(" ")[0]) for label in ("needs", "missing"))
    assert missing == pytest.approx(needs - 7.6, abs=0.01) and "a card of 24 GiB (RTX 4090)" in found["nearest"]
    alone = verdict_of(cli("plan", "qwen3.5-9b", "--gpu-memory", "8").err)["nearest"]
    assert alone.startswith("int4 without its drafter, ") and "--mode ar" in alone and "--context" not in alone
    huge = verdict_of(cli("plan", "qwen3.5-122b-a10b", "--gpu-memory", "8", "--quantize", "int8").err)
    assert huge["nearest"].startswith("several cards") and huge["weights"].startswith("int8, rounded at load; ")


def test_what_is_not_known_has_four_lines_too(cli: Cli, toy_hub: FakeHub) -> None:
    unknown = cli("plan", TARGET)
    found = verdict_of(unknown.err)
    assert unknown.code == 3 and "error: nothing is known of the shape" in unknown.err
    assert list(found) == ["weights", "context", "speed", "better"] and f"dflash pull {TARGET}" in found["better"]
    server = verdict_of(cli("plan", "moonshotai/Kimi-K2.5").out)
    assert server["here"] == "no: no single GPU holds it" and server["weights"] == "int4 g32; 560.78 GiB to download"
