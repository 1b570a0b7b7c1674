"""What the page does with the pairs of this machine: names from a browser, removal, facts, which pair is certified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.app import served_pair
from dflash_local.app.model_sources import LocalModels
from dflash_local.app.models import registry
from dflash_local.app.served_pair import ServedPair
from dflash_local.catalog.bundled import Pair, find
from dflash_local.errors import BusyError, UnknownModelError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import Verdict
from dflash_local.service.backend import Model
from dflash_local.service.service import Service
from dflash_local.ui.pair_text import pair_page
from tests.cli.conftest import DRAFTER, TARGET
from tests.fake_hub import FakeHub
from tests.service.scripted import ScriptedFacts, ScriptedSession

URL = "http://127.0.0.1:7860"


class Models(LocalModels):
    """Pairs of this machine, loaded as scripted sessions."""

    def model(self, pair: Pair, load: LoadConfig, thinking: bool) -> Model:
        return Model(pair.name, lambda _progress: ScriptedSession(), pair, thinking=thinking)


def models() -> Models:
    return Models(settings.load(), LoadConfig(), lambda _event: None)


@pytest.fixture
def service() -> Iterator[Service]:
    kept = Service(models().model(find("demo"), LoadConfig(), False), models().find)
    yield kept
    kept.close()


def served(service: Service) -> ServedPair:
    return ServedPair(service, models(), LoadConfig(device="cpu"), settings.load(), URL)


@pytest.mark.parametrize("name", ["", "nope", "/etc", "../..", "~", ".", "demo/../demo", "--all", "a\nb", "x" * 10_000])
def test_web_names_that_are_not_in_the_registry_are_refused(service: Service, name: str) -> None:
    pair = served(service)
    for call in (pair.entry, pair.removal, pair.remove, pair.details, pair.begin_with):
        with pytest.raises(UnknownModelError) as raised:
            call(name)
        assert len(raised.value.message) < 200
    with pytest.raises(UnknownModelError):
        pair.pull(name, lambda _event: None, lambda: False)


def test_names_are_found_in_any_case_and_by_alias(service: Service) -> None:
    pair = served(service)
    assert pair.entry("DEMO").name == "demo" and pair.entry("qwen3-8b").name == "Qwen/Qwen3-8B"
    details = pair.details("qwen3-8b")
    assert "z-lab/Qwen3-8B-DFlash-b16" in "\n".join(pair_page(*details, 96))
    assert max(map(len, pair_page(*details, 44)[:12])) <= 44
    assert {entry.name for entry in pair.entries()} >= {"demo", "demo-hybrid", "Qwen/Qwen3-8B"}


def test_the_pair_to_begin_with_is_kept_for_the_next_start(service: Service, own_home: Path) -> None:
    assert served(service).begin_with("qwen3-8b") == "dflash begins with Qwen/Qwen3-8B from now on"
    assert settings.load().model == "Qwen/Qwen3-8B"


def test_a_pair_is_pulled_and_removed_but_not_while_it_is_loaded(service: Service, toy_hub: FakeHub) -> None:
    pair = served(service)
    heard: list[Any] = []
    pair.pull(TARGET, heard.append, lambda: False)
    assert heard and pair.entry(TARGET).state == "local"
    service.switch(TARGET)
    for call in (pair.removal, pair.remove):
        with pytest.raises(BusyError, match="loaded") as raised:
            call("toy-9b")
        assert raised.value.hint == "unload it first"
    service.unload()
    told = pair.removal(TARGET)
    assert TARGET in told and DRAFTER in told and "would be freed" in told
    assert "freed" in pair.remove(TARGET) and pair.entry(TARGET).state == "absent"
    with pytest.raises(UsageError, match="nothing of"):
        pair.removal(TARGET)


def test_a_pair_is_not_removed_while_it_is_being_loaded() -> None:
    def load(_progress: object) -> ScriptedSession:
        with pytest.raises(BusyError, match="demo is loaded"):
            served(begun).removal("demo")
        return ScriptedSession()

    with Service(Model("demo", load, find("demo"))) as begun:
        begun.load()


def test_a_pair_is_not_removed_while_a_variant_of_it_is_loaded() -> None:
    row = next(row for row in registry(settings.load()).rows if row.variants)
    with Service(Model(row.variants[0].model, lambda _progress: ScriptedSession(), find("demo"))) as variant:
        variant.load()
        with pytest.raises(BusyError, match=f"{row.name} is loaded"):
            served(variant).removal(row.name)


def test_what_another_program_put_there_stays(service: Service, toy_hub: FakeHub, own_home: Path) -> None:
    cache = own_home / ".cache" / "huggingface" / "hub"
    snapshot = cache / f"models--{TARGET.replace('/', '--')}" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    pair = served(service)
    for call in (pair.removal, pair.remove):
        with pytest.raises(UsageError, match="another program") as raised:
            call(TARGET)
        assert "dflash rm --all" in raised.value.hint
    assert (snapshot / "config.json").exists()


def test_a_toy_has_its_own_prompts_and_is_called_one(service: Service, toy_hub: FakeHub) -> None:
    pair = served(service)
    assert len(pair.bench_prompts()) == 6 and all(prompt.answer for prompt in pair.bench_prompts())
    assert pair.notes[0].startswith("Toy pair") and any("With a GPU" in note for note in pair.notes)
    pair.pull(TARGET, lambda _event: None, lambda: False)
    service.switch(TARGET)
    assert [prompt.kind for prompt in pair.bench_prompts()] == ["code", "maths", "text", "table"]
    assert list(pair.notes) == []


def test_about_tells_the_pair_and_the_promise() -> None:
    checks = (Verdict("target", "ok", "fine"), Verdict("drafter", "warning", "accepts little", "another one"))
    service = Service(Model("demo", lambda _told: ScriptedSession(ScriptedFacts(checks=checks)), find("demo")))
    pair = served(service)
    before = pair.about()
    assert before["pair"] == "demo (unloaded)" and "engine" not in before and before["endpoint"] == f"{URL}/v1"
    service.load()
    facts = pair.about()
    assert facts["pair"] == "demo (ready)" and facts["promise"] == "float32: exact" and facts["context"] == "512 tokens"
    assert facts["check of the target"] == "ok · fine"
    assert facts["check of the drafter"] == "warning · accepts little · another one"
    source = pair.provenance()
    assert source["engine"] == "reference" and source["machine"]["device"]["kind"] in ("cpu", "cuda", "mps")
    assert str(Path.home()) not in json.dumps(source), "it can be handed in as it is"
    service.close()


def test_the_facts_are_known_without_torch() -> None:
    script = (
        "import sys\n"
        "from dflash_local import settings\n"
        "from dflash_local.catalog.bundled import find\n"
        "from dflash_local.load_config import LoadConfig\n"
        "from dflash_local.app.served_pair import ServedPair\n"
        "from dflash_local.app.model_sources import LocalModels\n"
        "from dflash_local.service.service import Service\n"
        "user = settings.load()\n"
        "models = LocalModels(user, LoadConfig(), None)\n"
        "service = Service(models.model(find('demo'), LoadConfig(), False))\n"
        "pair = ServedPair(service, models, LoadConfig(), user, '')\n"
        "assert pair.about() and pair.provenance() and pair.entries() and pair.details('demo')\n"
        "assert pair.notes\n"
        "heavy = {'torch', 'transformers', 'gradio', 'textual'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]


def test_a_certificate_is_of_the_pair_that_is_served_and_unloads_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    states: list[str] = []
    in_it, go_on = threading.Event(), threading.Event()

    def measure(name: str, job: Any, *_: Any) -> tuple[dict[str, Any], list[str]]:
        asked.append((name, job.args[0].drafter, job.args[1].device))
        states.append(service.status.state)
        in_it.set()
        assert go_on.wait(60)
        return {"verdict": "BUG"}, []

    monkeypatch.setattr(served_pair, "measure", measure)
    pair = served(service)
    service.switch("demo-hybrid")
    told: list[str] = []
    found: list[Any] = []

    def certify() -> None:
        found.append(pair.certify(lambda text, _share: told.append(text), lambda: False))

    thread = threading.Thread(target=certify)
    thread.start()
    assert in_it.wait(60)
    with pytest.raises(BusyError, match="being made already"):
        pair.certify(lambda _text, _share: None, lambda: False)
    go_on.set()
    thread.join(60)
    assert asked == [("demo-hybrid", find("demo-hybrid").drafter, "cpu")] and states == ["unloaded"]
    assert told[0] == "unloading demo-hybrid" and found == [{"verdict": "BUG"}]
