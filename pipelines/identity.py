"""What answers: an identity of a model or adapter, and of the engine settings that reach an answer.

Part of the fingerprint (`schemas/fingerprint.py`): where it is the same, so are the answers of deterministic requests,
as far as the engine's own rounding lets them be.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pipelines.adapters import Adapter
from pipelines.model import Model
from schemas.settings import EngineSettings

# A larger file is hashed in pieces spread evenly over it: weights that differ do so nearly everywhere.
_WHOLE_BYTES = 16 << 20
_PIECES, _PIECE_BYTES = 64, 64 << 10
_SETTINGS = ("dtype", "max_model_len", "seed", "tool_parser", "reasoning_parser")


def identities(model: Model, adapters: Mapping[str, Adapter], settings: EngineSettings) -> dict[str, str]:
    """By the name of an adapter, and under "" for the model itself: what answers, in hexadecimal digits."""
    said = repr([getattr(settings, name) for name in _SETTINGS])
    own = hashlib.blake2b(f"{_folder_hash(model.path)} {said}".encode(), digest_size=16).hexdigest()
    return {"": own} | {name: f"{own}+{_folder_hash(adapter.path)}" for name, adapter in adapters.items()}


def _folder_hash(folder: str) -> str:
    """A hash of the names, sizes and contents of a folder's files; of large ones, of pieces of their contents."""
    told = hashlib.blake2b(digest_size=16)
    root = Path(folder)
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = path.relative_to(root)
        if any(part.startswith(".") for part in name.parts):
            continue
        size = path.stat().st_size
        told.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                told.update(file.read())
                continue
            for piece in range(_PIECES):
                file.seek((size - _PIECE_BYTES) * piece // (_PIECES - 1))
                told.update(file.read(_PIECE_BYTES))
    return told.hexdigest()
