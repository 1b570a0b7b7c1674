"""What the page asks of the command line: names from a browser, removal, facts, which pair is certified."""

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
from fake_hub import FakeHub

from dflash_local import settings
from dflash_local.catalog.bundled import find
from dflash_local.cli import certifying
from dflash_local.cli.web_backend import WebBackend
from dflash_local.errors import BusyError, DFlashError, UnknownModelError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import Verdict
from dflash_local.service.resident import Model, Resident
from tests.cli.conftest import DRAFTER, TARGET
from tests.service.scripted import ScriptedFacts, ScriptedSession

URL = "http://127.0.0.1:7860"


def model(name: str) -> Model:
    return Model(name, lambda _progress: ScriptedSession())


@pytest.fixture
def resident() -> Iterator[Resident]:
    kept = Resident(model("demo"), model, None)
    yield kept
    kept.close()


def backend_of(resident: Resident) -> WebBackend:
    user = settings.load()
    return WebBackend(resident, find("demo"), LoadConfig(device="cpu"), user, URL)


@pytest.mark.parametrize("name", ["", "nope", "/etc", "../..", "~", ".", "demo/../demo", "--all", "a\nb", "x" * 10_000])
def test_web_names_that_are_not_in_the_registry_are_refused(resident: Resident, name: str) -> None:
    backend = backend_of(resident)
    for call in (backend.offer, backend.removal, backend.remove, lambda name: backend.details(name, 80)):
        with pytest.raises(UnknownModelError) as raised:
            call(name)
        assert len(raised.value.message) < 200
    with pytest.raises(UnknownModelError):
        backend.pull(name, lambda _event: None, lambda: False)


def test_names_are_found_in_any_case_and_by_alias(resident: Resident) -> None:
    backend = backend_of(resident)
    assert backend.offer("DEMO").name == "demo" and backend.offer("qwen3-8b").name == "Qwen/Qwen3-8B"
    assert "z-lab/Qwen3-8B-DFlash-b16" in backend.details("qwen3-8b", 96)
    narrow = backend.details("qwen3-8b", 44).splitlines()
    assert max(map(len, narrow[:12])) <= 44
    assert {offer.name for offer in backend.offers()} >= {"demo", "demo-hybrid", "Qwen/Qwen3-8B"}


def test_a_pair_is_pulled_and_removed_but_not_while_it_is_loaded(resident: Resident, toy_hub: FakeHub) -> None:
    backend, heard = backend_of(resident), []
    backend.pull(TARGET, heard.append, lambda: False)
    assert heard and backend.offer(TARGET).state == "local"
    resident.switch(TARGET)
    for call in (backend.removal, backend.remove):
        with pytest.raises(BusyError, match="loaded") as raised:
            call("toy-9b")
        assert raised.value.hint == "unload it first"
    resident.unload()
    told = backend.removal(TARGET)
    assert TARGET in told and DRAFTER in told and "would be freed" in told
    assert "freed" in backend.remove(TARGET) and backend.offer(TARGET).state == "absent"
    with pytest.raises(UsageError, match="nothing of"):
        backend.removal(TARGET)


def test_what_another_program_put_there_stays(resident: Resident, toy_hub: FakeHub, own_home: Path) -> None:
    cache = own_home / ".cache" / "huggingface" / "hub"
    snapshot = cache / f"models--{TARGET.replace('/', '--')}" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    backend = backend_of(resident)
    for call in (backend.removal, backend.remove):
        with pytest.raises(UsageError, match="another program") as raised:
            call(TARGET)
        assert "dflash rm --all" in raised.value.hint
    assert (snapshot / "config.json").exists()


def test_a_toy_has_its_own_prompts_and_is_called_one(resident: Resident, toy_hub: FakeHub) -> None:
    backend = backend_of(resident)
    assert len(backend.bench_prompts()) == 6 and all(prompt.answer for prompt in backend.bench_prompts())
    assert backend.notes[0].startswith("Toy pair") and any("With a GPU" in note for note in backend.notes)
    backend.pull(TARGET, lambda _event: None, lambda: False)
    resident.switch(TARGET)
    assert [prompt.kind for prompt in backend.bench_prompts()] == ["code", "maths", "text", "table"]
    assert list(backend.notes) == []


def test_about_tells_the_pair_and_the_promise() -> None:
    checks = (Verdict("target", "ok", "fine"), Verdict("drafter", "warning", "accepts little", "another one"))
    resident = Resident(Model("demo", lambda _told: ScriptedSession(ScriptedFacts(checks=checks))), model, None)
    backend = backend_of(resident)
    before = backend.about()
    assert before["pair"] == "demo (unloaded)" and "engine" not in before and before["endpoint"] == f"{URL}/v1"
    resident.load()
    facts = backend.about()
    assert facts["pair"] == "demo (ready)" and facts["promise"] == "float32: exact" and facts["context"] == "512 tokens"
    assert facts["check of the target"] == "ok · fine"
    assert facts["check of the drafter"] == "warning · accepts little · another one"
    source = backend.provenance()
    assert source["engine"] == "reference" and source["machine"]["device"]["kind"] in ("cpu", "cuda", "mps")
    assert str(Path.home()) not in json.dumps(source), "it can be handed in as it is"
    resident.close()


def test_the_facts_are_known_without_torch() -> None:
    script = (
        "import sys\n"
        "from dflash_local import settings\n"
        "from dflash_local.catalog.bundled import find\n"
        "from dflash_local.load_config import LoadConfig\n"
        "from dflash_local.cli.web_backend import WebBackend\n"
        "from dflash_local.service.resident import Model, Resident\n"
        "user = settings.load()\n"
        "resident = Resident(Model('demo', None), None, None)\n"
        "backend = WebBackend(resident, find('demo'), LoadConfig(), user, '')\n"
        "assert backend.about() and backend.provenance() and backend.offers() and backend.details('demo', 80)\n"
        "assert backend.notes\n"
        "heavy = {'torch', 'transformers', 'gradio', 'textual'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]


def test_a_certificate_is_of_the_pair_that_is_served_and_unloads_it(
    resident: Resident, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    states: list[str] = []
    in_it, go_on = threading.Event(), threading.Event()

    def run(argv: list[str], *_: Any) -> dict[str, Any]:
        asked.append(argv)
        states.append(resident.status.state)
        in_it.set()
        assert go_on.wait(10)
        return {"verdict": "identical"}

    monkeypatch.setattr(certifying, "run", run)
    backend = backend_of(resident)
    resident.switch("demo-hybrid")
    told: list[str] = []
    thread = threading.Thread(target=lambda: backend.certify(lambda text, _share: told.append(text), lambda: False))
    thread.start()
    assert in_it.wait(10)
    with pytest.raises(BusyError, match="being made already"):
        backend.certify(lambda _text, _share: None, lambda: False)
    go_on.set()
    thread.join(10)
    assert asked[0][3:] == ["certify", "demo-hybrid", "--json", "--device", "cpu"] and states == ["unloaded"]
    assert told[0] == "unloading demo-hybrid"
    with pytest.raises(DFlashError):
        monkeypatch.setattr(certifying, "run", lambda *_: (_ for _ in ()).throw(UsageError("no")))
        backend.certify(lambda _text, _share: None, lambda: False)
    monkeypatch.setattr(certifying, "run", lambda *_: {"verdict": "BUG"})
    assert backend.certify(lambda _text, _share: None, lambda: False) == {"verdict": "BUG"}
