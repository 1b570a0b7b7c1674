"""What of a target's own layer is handed to an engine where it drafts beside another drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.catalog.bundled import Pair, find
from dflash_local.drafters.kinds import LOOKUP, OWN, folder_of
from dflash_local.drafters.mtp.layout import FINAL_NORM, PREFIX
from dflash_local.engine import LoadConfig, load, load_pair
from dflash_local.engine.checked_pair import CheckedPair
from dflash_local.errors import CheckpointError, UsageError
from tests.engine.test_load import save_drafter
from tests.families import save_model
from tests.gguf_models import GOLDEN
from tests.mtp_checkpoints import add, own_pair, save_target

BOTH = LoadConfig(device="cpu", dtype="float32", mtp=True)


class Checked(Exception):
    """Ends a load where an engine would begin."""

    def __init__(self, pair: CheckedPair) -> None:
        self.pair = pair


def own_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The layer and its files, as an engine gets them; None twice where it gets none."""

    def stop(pair: CheckedPair, _progress: object) -> None:
        raise Checked(pair)

    with monkeypatch.context() as patch, pytest.raises(Checked) as caught:
        patch.setattr(load_pair, "load_runner", stop)
        load(pair, BOTH)
    return caught.value.pair.own or (None, None)


def test_a_layer_is_read_as_where_it_drafts_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target", {"mtp_block_size": 3})
    pair = replace(own_pair(folder), drafter=save_drafter(tmp_path / "drafter"))
    layer, files = own_of(pair, monkeypatch)
    assert (layer.kind, layer.block_size, layer.normed) == (OWN, 3, True)
    assert len(files.tensors) == 15 and all(name.startswith(PREFIX) for name in files.tensors)
    layer, _ = own_of(replace(pair, target_keys={FINAL_NORM: False}), monkeypatch)
    assert not layer.normed
    folder = save_target("qwen3_5", tmp_path / "said", {FINAL_NORM: True})
    layer, _ = own_of(replace(pair, target=folder, target_keys={FINAL_NORM: False}), monkeypatch)
    assert layer.normed, "what config.json says wins"
    add(folder, {"mtp.norm.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"mtp.norm.weight has shape \[3\], expected \[32\]"):
        load(replace(pair, target=folder), BOTH)
    session = load(find("demo-hybrid"), BOTH)
    assert session.facts.load.mtp and not session.facts.notices


@pytest.mark.parametrize("target", ["qwen3_5", "llama", "qwen35.gguf"])
def test_without_a_layer_the_drafter_drafts_alone_and_a_notice_says_so(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = GOLDEN / target if target.endswith("gguf") else save_model(target, tmp_path / target)
    taps = {"mask_token_id": 5, "target_layer_ids": [0], "block_size": 4}
    drafter = save_drafter(tmp_path / "drafter", dflash_config=taps, num_target_layers=None)
    pair = replace(own_pair(folder), drafter=drafter)
    session = load(pair, BOTH)
    assert [text for text in session.facts.notices if "--mtp" in text] == [load_pair.NO_LAYER]
    assert session.facts.drafting and not session.facts.load.mtp
    assert load(pair, replace(BOTH, mtp=False)).facts.notices == session.facts.notices[:-1]


def test_beside_the_layer_itself_or_copies_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = own_pair(save_target("qwen3_5", tmp_path / "target"))
    assert own_of(pair, monkeypatch) == (None, None) and not load(pair, BOTH).facts.notices
    with pytest.raises(UsageError, match="--mtp goes with a drafter") as caught:
        load(replace(pair, drafter=folder_of(LOOKUP)), BOTH)
    assert caught.value.hint == "take --drafter mtp"
