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

from schemas.failures import StorageFailed, UsageError

log = logging.getLogger("overnight.storage")

# How S3 is asked, where the environment doesn't say otherwise: throttled and broken requests are sent again by
# botocore, with growing delays of at most 20 s and jitter.
_RETRIES = {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "8"}
_S3 = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60}}
# Whose exceptions a store's answers come as, beside OSError.
_STORE_LIBRARIES = {"aiobotocore", "aiohttp", "botocore", "urllib3"}


@dataclass(frozen=True)
class Folder:
    """A folder on disk or in an object store. Picklable; opens its store where it is used.

    Its methods raise StorageFailed where the store fails; `open`, FileNotFoundError for what isn't there.
    """

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
        with self.telling("listed"):
            if not fs.isdir(root):
                return []
            # A store's folder may hold an object of its own name, as consoles make them.
            paths = (path for path in fs.ls(root, detail=False) if path.rstrip("/") != root.rstrip("/"))
            return sorted(PurePosixPath(path).name for path in paths)

    def is_folder(self) -> bool:
        fs, root = self._store
        with self.telling("listed"):
            return bool(fs.isdir(root))

    def remove(self) -> None:
        """Remove the folder and all below it, if it is there."""
        fs, root = self._store
        with self.telling("removed"), contextlib.suppress(FileNotFoundError):
            fs.rm(root, recursive=True)

    @contextmanager
    def open(self, *parts: str) -> Iterator[IO[bytes]]:
        """Read a file."""
        fs, root = self._store
        with self.telling("read", *parts), fs.open(_join(root, *parts), "rb") as stream:
            yield stream

    def read(self, *parts: str) -> bytes:
        """All of a small file, in one request: it may be replaced by another at any moment."""
        fs, root = self._store
        with self.telling("read", *parts):
            data: bytes = fs.cat_file(_join(root, *parts))
        return data

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        """Write a file that appears under its name only when the block ends without an exception."""
        fs, root = self._store
        path = _join(root, *parts)
        with (
            self.telling("written", *parts),
            _create_local(Path(path)) if self.is_local else _upload(fs, path) as stream,
        ):
            yield stream

    def write(self, data: bytes, *parts: str) -> None:
        with self.create(*parts) as stream:
            stream.write(data)

    def create_once(self, data: bytes, name: str) -> bool:
        """Write a small file unless there is one of this name: whether it was written.

        Two that do so at once can't both succeed, on a disk and in a store with conditional writes; in another store
        they can, which is logged.
        """
        fs, root = self._store
        path = _join(root, name)
        with self.telling("written", name):
            if self.is_local:
                return _create_local_once(Path(path), data)
            if fs.exists(path):
                return False
            try:
                fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, TypeError):  # what fsspec's stores say that know no such mode
                log.warning("%s has no conditional write: two runs that begin at once are not told apart", self.typed)
                fs.pipe_file(path, data)
            return True

    def remove_file(self, name: str) -> None:
        """Remove a file that may be there."""
        fs, root = self._store
        with self.telling("removed", name), contextlib.suppress(FileNotFoundError):
            fs.rm_file(_join(root, name))

    def check_writable(self) -> None:
        """Write a small file below and remove it. Raises UsageError that names the folder and the store's answer."""
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self.write(b"overnight", name)
            self.remove_file(name)
        except StorageFailed as error:
            raise UsageError(
                f"{self.show()}: can't be written to ({explain(error)}). Give an --output folder that can"
            ) from error

    @contextmanager
    def telling(self, done: str, *parts: str) -> Iterator[None]:
        """Raise StorageFailed for what a store's library raises in the block; its words say what can't be `done` with
        the file."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FileNotFoundError) and done == "read":
                raise
            if not isinstance(error, OSError) and not _is_of_store(error):
                raise
            raise StorageFailed(f"{self.show(*parts)}: can't be {done} ({explain(error)})") from error


@contextmanager
def _upload(fs: Any, path: str) -> Iterator[IO[bytes]]:
    stream = fs.open(path, "wb")
    try:
        yield stream
    except BaseException:
        # What it holds by now may appear neither here nor when it is collected.
        stream.closed = True
        with contextlib.suppress(Exception):  # it may be the store itself that fails
            stream.discard()
        raise
    stream.close()


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
    options: dict[str, Any] = {}
    if uri.startswith(("s3://", "s3a://")):
        for name, value in _RETRIES.items():
            os.environ.setdefault(name, value)
        options = _S3
    try:
        # Others write there, too: what was seen a moment ago may be another by now.
        fs, path = fsspec.core.url_to_fs(uri, use_listings_cache=False, **options)
    except Exception as error:
        raise UsageError(f"{uri}: can't be reached ({explain(error)})") from error
    return fs, str(path)


def explain(error: BaseException) -> str:
    """What a store's exception says, on one line."""
    if isinstance(error, StorageFailed) and error.__cause__ is not None:
        return explain(error.__cause__)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = " ".join(str(error).split())
    return text or type(error).__name__


def is_stores(error: BaseException) -> bool:
    """Whether it was the store, or the disk, that failed, and not what a file of it holds: packed data that breaks off
    raises an OSError, too, without a number."""
    if isinstance(error, OSError):
        kinds = ConnectionError | FileNotFoundError | PermissionError | TimeoutError
        return error.errno is not None or isinstance(error, kinds)
    return _is_of_store(error)


def _is_of_store(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _STORE_LIBRARIES


def _join(base: str, *parts: str) -> str:
    return "/".join([base.rstrip("/"), *parts]) if parts else base
