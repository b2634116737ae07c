"""What answers: the same for the same files and settings, another where anything that reaches an answer differs."""

import pytest

from pipelines import identity
from pipelines.adapters import Adapter
from pipelines.identity import identities
from pipelines.model import Model
from schemas.settings import EngineSettings


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "weights.safetensors").write_bytes(bytes(range(256)) * 100)
    return path


def of(folder, adapters=None, **settings):
    return identities(Model(str(folder), "m", str(folder)), adapters or {}, EngineSettings(**settings))


def test_a_copy_of_the_files_elsewhere_answers_alike(folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    before = of(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(folder)
    (folder / ".cache").write_text("left by a download")
    assert of(folder) == before and list(before) == [""]


@pytest.mark.parametrize(
    "setting", [{"dtype": "float32"}, {"max_model_len": 64}, {"seed": 1}, {"tool_parser": "hermes"}]
)
def test_settings_that_reach_an_answer_count(folder, setting):
    assert of(folder, **setting) != of(folder)
    assert of(folder, max_num_seqs=3) == of(folder)


def test_a_changed_file_is_another_model(folder, monkeypatch):
    before = of(folder)
    (folder / "config.json").write_text("[]")
    changed = of(folder)
    assert changed != before
    # A file that is too large to be read whole is known by pieces of it.
    monkeypatch.setattr(identity, "_WHOLE_BYTES", 1_000)
    monkeypatch.setattr(identity, "_PIECE_BYTES", 400)
    pieces = of(folder)
    (folder / "weights.safetensors").write_bytes(b"x" * 25_600)
    assert of(folder) != pieces


def test_an_adapter_is_known_beside_its_model(folder, tmp_path):
    formal = tmp_path / "formal"
    formal.mkdir()
    (formal / "adapter_config.json").write_text("{}")
    told = of(folder, {"formal": Adapter(str(formal), 8, "formal")})
    assert told[""] == of(folder)[""] and told["formal"].startswith(told[""])
    (formal / "adapter_config.json").write_text("[]")
    assert of(folder, {"formal": Adapter(str(formal), 8, "formal")})["formal"] != told["formal"]
