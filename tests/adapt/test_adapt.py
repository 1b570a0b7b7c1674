"""A drafter that learns: a drifted toy is regained, the text stays the target's, and nothing of the source is kept."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load as load_tensors
from safetensors.torch import save

from dflash_local import settings
from dflash_local.adapt import report, run
from dflash_local.adapt.asked import AskedPrompt, of_conversations, of_itself
from dflash_local.adapt.gain import Gain, HeldOut, gain, gains, refusal
from dflash_local.adapt.held_out import chosen, measure
from dflash_local.adapt.openings import frame_of
from dflash_local.adapt.rehearsal import disk_bytes, rehearse
from dflash_local.app import measurements
from dflash_local.app.adaptation_plan import adaptation_folders
from dflash_local.app.adapting import TextSource
from dflash_local.app.loading import engine_session
from dflash_local.bench.trial import scored_target, write
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.check.record import digest, pair_files
from dflash_local.cli.main import main
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.errors import DoesNotFitError, UsageError
from dflash_local.request import Limits, Message, SamplingParams, user_request
from dflash_local.store import adaptations
from dflash_local.store.atomic import write_atomic
from dflash_local.transcripts.source_conversation import SourceConversation
from tests.adapt.drifted import MINUTES, conversations, drift, make_short, questions

CPU = LoadConfig(device="cpu", dtype="float32")
PLANTED = "quenby-7731"  # a phrase of the source that nothing kept may have


@contextmanager
def opened(pair: Pair, config: LoadConfig = CPU) -> Iterator[Session]:
    session = load(pair, config)
    try:
        yield session
    finally:
        session.close()


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The toy with a target that answers in another style than its drafter knows."""
    folder = tmp_path_factory.mktemp("drifted") / "target"
    drift(folder)
    return Pair("drifted", folder, bundled.find("demo").drafter, False)


def silent(text: str, fraction: float) -> None:
    """Show nothing."""


class Learning:
    """One run over the drifted pair: what it found, the file, and how often the pair was loaded."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.loads: list[Pair] = []
        self.pair, self.folder, self.written = pair, folder / "unfinished", 0
        planted = SourceConversation("planted", ((Message("user", f"Count from 3 to 9. {PLANTED}"),),))
        texts, kept = [planted, *conversations(20, 7)], folder / "kept.safetensors"
        self.learnt = run.adapt(pair, texts, MINUTES, CPU, self.folder, kept, self.open, self.look)
        self.data = kept.read_bytes()

    def look(self, text: str, fraction: float) -> None:
        """Note what lies in the folder when the most does: the state of a training and what it has learnt."""
        if text.startswith("learning"):
            files = [file for file in self.folder.rglob("*") if file.is_file()]
            self.written = max(self.written, sum(file.stat().st_size for file in files))

    def open(self, pair: Pair) -> Any:
        self.loads.append(pair)
        return opened(pair)


@pytest.fixture(scope="module")
def learning(drifted: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learning]:
    patch = pytest.MonkeyPatch()
    make_short(patch)
    yield Learning(drifted, tmp_path_factory.mktemp("adapting"))
    patch.undo()


@pytest.fixture
def adapted(learning: Learning, tmp_path: Path) -> Pair:
    file = tmp_path / "kept.safetensors"
    file.write_bytes(learning.data)
    return replace(learning.pair, adaptation=adaptations.read(file))


def test_half_of_what_a_drift_lost_is_regained(learning: Learning) -> None:
    facts = learning.learnt.facts
    with opened(bundled.find("demo")) as session:
        prompts = list(of_conversations(session, conversations(3, 7), 256))
        lengths = measure(session, prompts, silent).conversations
    published = sum(each.tokens for each in lengths) / sum(each.cycles for each in lengths)
    before, after = (facts["kinds"]["counting"][side] for side in ("before", "after"))
    assert not learning.learnt.refusal
    assert after - before >= (published - before) / 2, (published, before, after)
    assert facts["curve"][0]["held_out"] < facts["curve"][-1]["held_out"] and facts["minutes"] == MINUTES
    assert [each.adaptation is None for each in learning.loads] == [True, False]
    assert not list(learning.folder.iterdir()), "nothing is left of the run"


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_the_text_is_the_same_with_and_without_it(engine: str, learning: Learning, adapted: Pair) -> None:
    texts, lengths = [], []
    for pair in (learning.pair, adapted):
        with opened(pair, replace(CPU, engine=engine)) as session:
            assert ("adapted" in session.facts.computed_as) == (pair is adapted)
            found = [
                write(session, user_request(question, limits=Limits(48), sampling=sampling))
                for question, _ in questions(4, 11)
                for sampling in (SamplingParams(), SamplingParams(temperature=0.8, seed=3))
            ]
            texts.append([each.ids for each in found])
            lengths.append(sum(len(each.stats.acceptance_lengths) for each in found))
    assert texts[0] == texts[1] and lengths[1] < lengths[0]


def test_no_more_is_written_than_was_said(learning: Learning) -> None:
    drafter, recipe = run.trained_drafter(learning.pair), run.RECIPES["cpu"]
    with opened(learning.pair) as session:
        vocab = scored_target(session).vocab_size
    rehearsed = rehearse(drafter, vocab, "float32", recipe)
    said = disk_bytes(drafter, vocab, "float32", run.kept_tokens(MINUTES), rehearsed)
    assert rehearsed.state < learning.written < said
    assert rehearsed.learnt < len(learning.data) < 1.02 * rehearsed.learnt


def test_no_text_of_the_source_is_in_the_file(learning: Learning) -> None:
    assert PLANTED.encode() not in learning.data and b"Count from" not in learning.data
    assert len(learning.data) <= adaptations.MOST_BYTES


def test_an_interrupted_run_goes_on(
    drifted: Pair, learning: Learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended where it has learnt for a while; the target is not asked again. ``test_kills`` has more moments. What
    an earlier run learnt of more text stays, whatever this one gains.
    """
    monkeypatch.setattr(run, "refusal", lambda *_: "")

    class Killed(BaseException):
        pass

    looks = 0

    def look(text: str, fraction: float) -> None:
        nonlocal looks
        looks += text.startswith("learning")
        if looks == 3:
            raise Killed

    loads: list[Pair] = []

    def open_pair(pair: Pair) -> Any:
        loads.append(pair)
        return opened(pair)

    texts, kept = conversations(12, 7), tmp_path / "kept"
    kept.write_bytes(learning.data)
    with pytest.raises(Killed):
        run.adapt(drifted, texts, 0.2, CPU, tmp_path / "unfinished", kept, open_pair, look)
    learnt = run.adapt(drifted, texts, 0.2, CPU, tmp_path / "unfinished", kept, open_pair, silent)
    assert [each.adaptation and each.adaptation.path.name for each in loads] == [None, run.BEST, "kept"]
    assert learnt.refusal.startswith("what is kept already (adapted 2") and kept.read_bytes() == learning.data
    total = Gain(**learnt.facts["total"])
    assert not run._earlier_refusal(adaptations.Adaptation(kept, {}), total._replace(after=total.after - 0.01), total)
    minutes = [point["minutes"] for point in learnt.facts["curve"]]
    assert minutes == sorted(minutes) and minutes[2] > minutes[0]


def test_too_little_text_says_how_much_is_needed(drifted: Pair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too little text") as caught:
        run.adapt(drifted, conversations(3, 7), 0.2, CPU, tmp_path, tmp_path / "kept", opened, silent)
    assert f"{run.LEAST:,} and {run.LEAST // 4:,} are needed" in caught.value.hint
    assert not list(tmp_path.iterdir()), "nothing is left of it"


def test_what_an_unfinished_run_left_is_of_one_way_to_load_and_goes_with_rm(
    drifted: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    work, _ = adaptation_folders(drifted, settings.load())
    left = run.work_folder(drifted, work)
    left.mkdir(parents=True)
    same = run._same(drifted, None, 1.0, CPU)
    assert same != run._same(drifted, None, 1.0, replace(CPU, draft_window=1)), "before and after are of one load"
    (left / adaptations.SAME).write_text(same)
    again = str(drifted.target.parent / ".." / drifted.target.parent.name / "target")
    assert main(["rm", again, "--adaptation"]) == 0 and str(left) in capsys.readouterr().out
    assert not left.exists()


def test_conversations_that_cannot_be_asked_are_left_out() -> None:
    asked = conversations(2, 7)
    long = SourceConversation("long", ((Message("user", "much " * 9000),),))
    with opened(bundled.find("demo")) as session:
        found = list(of_conversations(session, [asked[0], long, asked[1]], 8))
    assert len(found) == sum(len(each.prompts) for each in asked)


def test_a_target_without_a_template_is_asked_what_begins_with_something(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(bundled.find("demo")) as session:
        assert session.tokenizer is not None
        frame = frame_of(session.tokenizer)
        monkeypatch.setattr("dflash_local.adapt.asked.frame_of", lambda _: replace(frame, before=(), after=()))
        assert all(each.ids for each in islice(of_itself(session), 12))


def test_what_does_not_rise_or_falls_in_a_kind_is_not_kept() -> None:
    def found(text: float, *code: float) -> str:
        """What is said where cycles of twelve prompts each bring so many times the tokens: texts, and code by turns."""
        before = [HeldOut(kind, 400 + at, 100 + at % 3) for kind in ("text", "code") for at in range(12)]
        times = [text] * 12 + [*code] * (12 // len(code))
        after = [HeldOut(kind, tokens, round(cycles / by)) for (kind, tokens, cycles), by in zip(before, times)]
        return refusal(gain(before, after), gains(before, after))

    assert found(1.08, 1.03) == ""
    assert "1.02 times" in found(1.02, 1.02)
    assert "code falls to 0.9" in found(1.3, 0.95, 0.93)
    assert found(1.8, 0.75, 1.15) == "", "prompts that go both ways tell nothing"
    before = [HeldOut(kind, 400, 100) for kind in ("text",) * 12 + ("code",) * 2]
    after = [each._replace(cycles=cycles) for each, cycles in zip(before, (60, 110, 50, 90) * 3 + (107, 107))]
    assert refusal(gain(before, after), gains(before, after)) == "", "nor do two that happen to agree"
    for few in (1, 4):
        assert "may be chance" in refusal(gain(before[:few], after[:few]), {}), "of a text that rises by 1.3 and more"


def test_conversations_are_what_is_compared_and_each_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [AskedPrompt((at,), "text", name, True) for at, name in enumerate("aaabbc")]
    assert [each.ids[0] for each in chosen(asked)] == [0, 3, 5, 1, 4, 2]
    with opened(bundled.find("demo")) as session:
        prompts = [each._replace(ids=session.render(user_request("Count from 3 to 5.")).ids) for each in asked]
        found = measure(session, [*prompts, prompts[0]._replace(kind="code")], silent).conversations
    assert [each.kind for each in found] == ["text"] * 3 + ["code"]
    assert found[0].cycles > found[1].cycles > found[2].cycles


def test_texts_that_the_drafter_knows_bring_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's own pair drafts its own text nearly whole: nothing is kept, and it says why."""
    make_short(monkeypatch)
    pair = bundled.find("demo")
    learnt = run.adapt(pair, None, 0.25, CPU, tmp_path, tmp_path / "kept", opened, silent)
    assert learnt.refusal.startswith("held-out acceptance is"), json.dumps(learnt.facts["total"])
    assert not list(tmp_path.iterdir()), "nothing is kept"
    told, lines = report.presented(pair, learnt, "itself")
    assert lines[-1] == f"nothing is kept: {learnt.refusal}" and told["refusal"] == learnt.refusal


def test_what_was_kept_is_taken_by_every_load_until_files_change(
    learning: Learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(learning.pair.target, folder)
    pair, user = replace(learning.pair, name=str(folder), target=folder), settings.load()
    facts = {**learning.learnt.facts, "files": digest(pair_files(pair)), "target": str(folder)}
    data = save(load_tensors(learning.data), adaptations.metadata(facts))

    def adapt(
        pair: Pair, texts: None, minutes: float, how: LoadConfig, folder: Path, kept: Path, *_: object
    ) -> run.Learnt:
        write_atomic(kept, data)
        return run.Learnt(facts, "")

    monkeypatch.setattr(run, "adapt", adapt)
    _, lines = measurements.adapt_pair(pair, CPU, TextSource(None, "itself"), 1.0, user, print)
    assert lines[-1].startswith("kept: ")
    told: list[str] = []

    def notify(event: object) -> None:
        told.append(getattr(event, "message", ""))

    for config, adapted in ((CPU, True), (replace(CPU, adaptation=False), False)):
        with engine_session(pair, config, user, notify) as session:
            assert bool(session.facts.adapted) == adapted
    assert not [text for text in told if "adapted" in text]
    told_by = folder / "config.json"
    told_by.write_text(told_by.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with engine_session(pair, CPU, user, notify) as session:
        assert not session.facts.adapted and "are others than its drafter was adapted to" in " ".join(told)
    assert main(["rm", str(folder / ".." / "target"), "--adaptation"]) == 0 and "removed" in capsys.readouterr().out
    assert main(["rm", str(folder), "--adaptation"]) == 0 and "learnt anything here" in capsys.readouterr().out


def test_a_full_disk_is_a_line(learning: Learning, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "texts.json")

    monkeypatch.setattr(run, "adapt", full)
    with pytest.raises(DoesNotFitError, match="texts.json cannot be written: No space left"):
        measurements.adapt_pair(learning.pair, CPU, TextSource(None, "itself"), 1.0, settings.load(), print)


def test_files_that_are_no_adaptations(learning: Learning, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(learning.data[:1000])
    with pytest.raises(Exception, match="truncated"):
        adaptations.read(damaged)
    plain = tmp_path / "plain.safetensors"
    plain.write_bytes((bundled.FOLDER / "demo" / "drafter" / "model.safetensors").read_bytes())
    with pytest.raises(Exception, match="no adaptation"):
        adaptations.read(plain)
    assert adaptations.read(tmp_path / "missing") is None
