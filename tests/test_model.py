"""The model: what `--model` may name, and what is said of what it may not."""

import json
import multiprocessing
import time
from pathlib import Path

import fsspec
import pytest

from pipelines import model
from schemas.failures import UsageError


def slow_maker(folder: Path) -> None:
    (folder / "half").touch()
    time.sleep(0.5)
    (folder / "whole").touch()


def make(target: str) -> list[str]:
    return sorted(path.name for path in model._make_once(Path(target), slow_maker).iterdir())


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).write_text("{}")
    return path


def test_two_processes_that_start_at_once_make_one_whole_folder(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(make, [str(tmp_path / "cache" / "m")] * 2, chunksize=1)
    assert results == [["half", "whole"]] * 2
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["m", "m.lock"]


def test_making_that_fails_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").touch()
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        model._make_once(tmp_path / "m", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["m.lock"]


def test_the_embedded_model_is_a_whole_model_folder():
    resolved = model.resolve(None)
    assert resolved.name == "smollm2-135m-instruct"
    config = json.loads((Path(resolved.path) / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    model._check_folder(model.MODEL, "embedded", Path(resolved.path))
    assert "<|im_start|>" in (Path(resolved.path) / "chat_template.jinja").read_text()


def test_a_local_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(model_folder(tmp_path / "my-model").parent)
    assert model.resolve("my-model") == model.Model(str(tmp_path / "my-model"), "my-model", str(tmp_path / "my-model"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("./nowhere", "no such folder"),
        ("a-file", "is a file, expected a folder"),
        ("a-folder", "lacks config.json and weights"),
        ("memory://nowhere", "no such folder, or an empty one"),
        ("not a name", "no such folder"),
    ],
)
def test_what_is_no_model_is_named_with_what_it_lacks(tmp_path, monkeypatch, spec, words):
    (tmp_path / "a-file").touch()
    (tmp_path / "a-folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^--model {spec}: ") as caught:
        model.resolve(spec)
    assert words in str(caught.value)


def test_a_model_in_an_object_store_is_mirrored_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERNIGHT_CACHE", str(tmp_path))
    store = fsspec.filesystem("memory")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        store.pipe(f"/models/tiny/{name}", b"{}")
    first = model.resolve("memory://models/tiny")
    assert first.name == "tiny" and (Path(first.path) / "tokenizer.json").read_text() == "{}"
    assert model.resolve("memory://models/tiny") == first
    store.pipe("/models/tiny/config.json", b'{"changed": true}')
    second = model.resolve("memory://models/tiny")
    assert second != first and "changed" in (Path(second.path) / "config.json").read_text()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OVERNIGHT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match=r"cache: the model can't be kept there .* OVERNIGHT_CACHE"):
        model.resolve(None)
