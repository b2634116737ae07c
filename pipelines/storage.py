"""Files and object stores behind one face (fsspec), with writes that appear whole or not at all."""

import contextlib
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from schemas.failures import UsageError

log = logging.getLogger("overnight.storage")


@dataclass(frozen=True)
class Folder:
    """A folder on disk or in an object store. Picklable; opens its store where it is used."""

    # Absolute, so that it is the same place in every process, whatever that one's current folder.
    uri: str
    # As its user wrote it.
    typed: str

    @classmethod
    def at(cls, typed: str) -> "Folder":
        return cls(absolute(typed), typed)

    @cached_property
    def _store(self) -> tuple[Any, str]:
        return open_store(self.uri)

    def __getstate__(self) -> dict[str, str]:
        return {"uri": self.uri, "typed": self.typed}

    @property
    def is_local(self) -> bool:
        return isinstance(self._store[0], LocalFileSystem)

    def join(self, *parts: str) -> "Folder":
        return Folder(_join(self.uri, *parts), _join(self.typed, *parts))

    def show(self, *parts: str) -> str:
        """The path or URI that a person can type, from where the folder's own was typed."""
        return _join(self.typed, *parts)

    def names(self) -> list[str]:
        """Names of what the folder holds directly, sorted; none where there is no such folder."""
        fs, root = self._store
        fs.invalidate_cache()
        if not fs.isdir(root):
            return []
        return sorted(PurePosixPath(path).name for path in fs.ls(root, detail=False))

    def is_folder(self) -> bool:
        fs, root = self._store
        return bool(fs.isdir(root))

    def remove(self) -> None:
        fs, root = self._store
        if fs.exists(root):
            fs.rm(root, recursive=True)

    def open(self, *parts: str) -> IO[bytes]:
        fs, root = self._store
        stream: IO[bytes] = fs.open(_join(root, *parts), "rb")
        return stream

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        """Write a file that appears under its name only when the block ends without an exception."""
        fs, root = self._store
        if self.is_local:
            with _create_local(Path(_join(root, *parts))) as stream:
                yield stream
            return
        stream = fs.open(_join(root, *parts), "wb", autocommit=False)
        try:
            yield stream
            stream.close()
        except BaseException:
            stream.discard()
            raise
        stream.commit()

    def write(self, data: bytes, *parts: str) -> None:
        with self.create(*parts) as stream:
            stream.write(data)

    def create_once(self, data: bytes, name: str) -> bool:
        """Write a small file unless there is one of this name: whether it was written.

        Two that do so at once can't both succeed, on a disk and in a store with conditional writes; in another store
        they can, which is logged.
        """
        fs, root = self._store
        if self.is_local:
            return _create_local_once(Path(_join(root, name)), data)
        fs.invalidate_cache()
        if fs.exists(_join(root, name)):
            return False
        try:
            fs.pipe_file(_join(root, name), data, mode="create")
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError):  # what fsspec's stores say that know no such mode
            log.warning("%s has no conditional write: two runs that begin at once are not told apart", self.typed)
            fs.pipe_file(_join(root, name), data)
        return True

    def remove_file(self, name: str) -> None:
        """Remove a file that may be there."""
        fs, root = self._store
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(_join(root, name))

    def check_writable(self) -> None:
        """Write a small file below and remove it. Raises UsageError that names the folder and the store's answer."""
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self.write(b"overnight", name)
            fs, root = self._store
            fs.rm(_join(root, name))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{self.show()}: can't be written to ({explain(error)}). Give an --output folder that can"
            ) from error


@contextmanager
def _create_local(path: Path) -> Iterator[IO[bytes]]:
    """The bytes go to a hidden name beside it first; renaming is what shows them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with hidden.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def _create_local_once(path: Path, data: bytes) -> bool:
    """A link to a file that is whole already can be made once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        hidden.write_bytes(data)
        path.hardlink_to(hidden)
    except FileExistsError:
        return False
    finally:
        hidden.unlink(missing_ok=True)
    return True


def is_remote(spec: str) -> bool:
    """Whether a path or URI names an object store rather than this machine's disk."""
    return "://" in spec and not spec.startswith("file://")


def absolute(spec: str) -> str:
    """A path or URI that names the same place in every process of this machine."""
    if is_remote(spec):
        return spec
    # Not through pathlib, which takes `./~a` for a home folder and doesn't fold `..`.
    return os.path.abspath(os.path.expanduser(spec.removeprefix("file://")))  # noqa: PTH100, PTH111 - see above


def open_store(uri: str) -> tuple[Any, str]:
    """The file system of a path or URI, and its path there. Raises UsageError for an unknown or broken address."""
    if not is_remote(uri):
        # Not through fsspec's own reading of it, which takes `::` in a file's name for a chain of stores.
        return LocalFileSystem(), absolute(uri)
    try:
        fs, path = fsspec.core.url_to_fs(uri)
    except Exception as error:
        raise UsageError(f"{uri}: can't be reached ({explain(error)})") from error
    return fs, str(path)


def explain(error: BaseException) -> str:
    """What a store's exception says, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _join(base: str, *parts: str) -> str:
    return "/".join([base.rstrip("/"), *parts]) if parts else base
