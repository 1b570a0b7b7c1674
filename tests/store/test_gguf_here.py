"""GGUF files of other programs: each once, under its program's name, with the bytes of all its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.store.gguf_here import GgufHere, gguf_here


def write(path: Path, size: int = 5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def manifest(models: Path, name: str, digest: str, kind: str = "model") -> None:
    layer = {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": 1}
    other = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "f" * 64}
    write(models / "manifests" / name).write_text(json.dumps({"layers": [other, layer]}), encoding="utf-8")


def found() -> dict[str, tuple[str, int, Path]]:
    return {one.name: (one.program, one.size, one.path) for one in gguf_here(settings.load())}


def test_each_program_has_its_folders(own_home: Path) -> None:
    assert gguf_here(settings.load()) == ()
    studio = write(own_home / ".lmstudio" / "models" / "them" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf", 7)
    older = write(own_home / ".cache" / "lm-studio" / "models" / "them" / "old.gguf")
    llama = write(own_home / ".cache" / "llama.cpp" / "them_tiny.gguf", 3)
    hub = write(own_home / ".cache" / "huggingface" / "hub" / "models--a--b-GGUF" / "snapshots" / "c" / "b-Q8_0.gguf")
    write(own_home / ".cache" / "huggingface" / "hub" / "datasets--a--b" / "no-model.gguf")
    write(own_home / ".lmstudio" / "models" / "them" / "Qwen3-8B-GGUF" / "mmproj-F16.gguf")
    write(own_home / ".cache" / "llama.cpp" / "them_tiny.gguf.json")
    blob = write(own_home / ".ollama" / "models" / "blobs" / f"sha256-{'a' * 64}", 9)
    manifest(own_home / ".ollama" / "models", "registry.ollama.ai/library/qwen3/8b", f"sha256:{'a' * 64}")
    assert found() == {
        "Qwen3-8B-Q4_K_M": ("LM Studio", 7, studio),
        "old": ("LM Studio", 5, older),
        "them_tiny": ("llama.cpp", 3, llama),
        "b-Q8_0": ("Hugging Face cache", 5, hub),
        "qwen3:8b": ("ollama", 9, blob),
    }


def test_variables_of_the_programs_win(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(own_home / ".cache" / "llama.cpp" / "unused.gguf")
    write(own_home / ".ollama" / "models" / "blobs" / f"sha256-{'b' * 64}")
    manifest(own_home / ".ollama" / "models", "registry.ollama.ai/library/unused/1", f"sha256:{'b' * 64}")
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    write(tmp_path / "llama" / "used.gguf")
    write(tmp_path / "ollama" / "blobs" / f"sha256-{'c' * 64}")
    manifest(tmp_path / "ollama", "hf.co/them/model/Q4_K_M", f"sha256:{'c' * 64}")
    manifest(tmp_path / "ollama", "registry.ollama.ai/me/own/latest", f"sha256:{'c' * 64}")
    names = set(found())
    assert names == {"used", "hf.co/them/model:Q4_K_M"}, "one blob under two names is one model"


def test_parts_of_a_split_model_are_one_and_a_link_to_the_same_file_none(own_home: Path) -> None:
    folder = own_home / ".lmstudio" / "models" / "a" / "b"
    first = write(folder / "big-00001-of-00003.gguf", 1)
    write(folder / "big-00002-of-00003.gguf", 10)
    write(folder / "big-00003-of-00003.gguf", 100)
    write(folder / "headless-00002-of-00002.gguf")
    (own_home / ".cache" / "llama.cpp").mkdir(parents=True)
    (own_home / ".cache" / "llama.cpp" / "again.gguf").symlink_to(first)
    (own_home / ".cache" / "llama.cpp" / "gone.gguf").symlink_to(folder / "gone.gguf")
    assert gguf_here(settings.load()) == (GgufHere(first, "big-00001-of-00003", 111, "LM Studio"),)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"layers": 3}',
        '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../../etc/passwd"}]}',
        '{"layers": [{"mediaType": "application/vnd.ollama.image.model"}]}',
        f'{{"layers": [{{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:{"d" * 64}"}}]}}',
    ],
)
def test_a_manifest_that_names_no_blob_is_passed_over(own_home: Path, text: str) -> None:
    models = own_home / ".ollama" / "models"
    write(models / "manifests" / "registry.ollama.ai" / "library" / "odd" / "1").write_text(text, encoding="utf-8")
    write(models / "blobs" / f"sha256-{'a' * 64}")
    manifest(models, "registry.ollama.ai/library/good/1", f"sha256:{'a' * 64}")
    assert set(found()) == {"good:1"}
