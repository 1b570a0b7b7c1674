"""Which files of a listing are wanted, and which names are refused."""

from __future__ import annotations

import pytest

from dflash_local.errors import DownloadError
from dflash_local.store.hub import Listing, RemoteFile
from dflash_local.store.selection import is_weight, wanted


def listing(*names: str) -> Listing:
    files = tuple(RemoteFile(name, 10, None, "0" * 40) for name in names)
    return Listing("owner/name", "1" * 40, files, False)


def chosen(*names: str) -> list[str]:
    return [file.path for file in wanted(listing(*names))]


def test_only_what_the_loader_reads_is_fetched() -> None:
    rest = ["README.md", "model.bin", "pytorch_model.bin", "consolidated.00.pth", "mask_embedding.pt", "a.gguf"]
    rest += ["original/model.safetensors", "metal/model.bin", "onnx/model.onnx", "modeling_dflash.py", ".gitattributes"]
    rest += ["consolidated.safetensors", "adapter_model.safetensors"]
    kept = ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
    assert sorted(chosen(*rest, *kept)) == sorted(kept)


@pytest.mark.parametrize("shard", ["model-0000{}-of-00002", "model.safetensors-0000{}-of-00002"])
def test_shards_come_with_their_index_and_after_it(shard: str) -> None:
    """One may have a name of its own: official fp8 mixtures have the MTP head in one, and their index names it."""
    names = [*(f"{shard.format(number)}.safetensors" for number in (1, 2)), "mtp.safetensors"]
    others = ("consolidated.safetensors", "adapter_model.safetensors", "model.safetensors.index.json")
    assert chosen("config.json", *names, *others) == ["config.json", "model.safetensors.index.json", *names]


def test_one_file_wins_over_shards_as_in_the_loader() -> None:
    names = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert chosen("config.json", "model.safetensors", *names) == ["config.json", "model.safetensors"]


def test_a_repo_without_safetensors_is_refused_in_words() -> None:
    with pytest.raises(DownloadError, match="neither model.safetensors nor") as caught:
        chosen("config.json", "pytorch_model.bin")
    assert caught.value.exit_code == 4 and "safetensors" in caught.value.hint


def test_a_repo_without_config_is_refused() -> None:
    with pytest.raises(DownloadError, match="has no config.json"):
        chosen("model.safetensors")


HOSTILE = [
    "../../.ssh/x",
    "..",
    "/etc/passwd",
    "a/../../b",
    "C:\\x",
    "C:x.safetensors",
    "\\\\h\\s",
    "a/..\\..\\b",
    "model.safetensors\0.json",
    "model\n.safetensors",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_anywhere_refuses_the_repo(name: str) -> None:
    with pytest.raises(DownloadError, match="refused") as caught:
        chosen("config.json", "model.safetensors", name)
    assert caught.value.exit_code == 4 and "\0" not in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["model-" + "a" * 300 + ".safetensors", "model:x.safetensors", "model?.safetensors"])
def test_a_wanted_name_must_be_one_on_every_system(name: str) -> None:
    with pytest.raises(DownloadError, match="refused"):
        chosen("config.json", "model.safetensors.index.json", name)


def test_names_that_windows_takes_for_one_are_refused() -> None:
    with pytest.raises(DownloadError, match="has both"):
        chosen("config.json", "model.safetensors.index.json", "model-a.safetensors", "model-A.safetensors")


def test_odd_names_that_nobody_wants_do_no_harm() -> None:
    odd = ["assets/what?.png", "x" * 300 + ".md", "images/a:b.png"]
    assert chosen("config.json", "model.safetensors", *odd) == ["config.json", "model.safetensors"]


def test_weights_are_told_from_the_rest() -> None:
    assert [is_weight(file) for file in wanted(listing("config.json", "model.safetensors"))] == [False, True]
