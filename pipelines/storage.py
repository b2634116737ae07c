"""Files and object stores behind one face (fsspec), with writes that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import IO, Any

import fsspec
import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from schemas.failures import UsageError


@dataclass(frozen=True)
class Folder:
    """A folder on disk or in an object store. Picklable; opens its store where it is used."""

    uri: str

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        return open_store(self.uri)

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    def __getstate__(self) -> dict[str, str]:
        return {"uri": self.uri}

    @property
    def is_local(self) -> bool:
        return isinstance(self._fs, LocalFileSystem)

    def path(self, *parts: str) -> str:
        """The path of a file below, as its own store names it (without `s3://`)."""
        return "/".join([self._opened[1].rstrip("/"), *parts])

    def join(self, *parts: str) -> "Folder":
        return Folder("/".join([self.uri.rstrip("/"), *parts]))

    def show(self, *parts: str) -> str:
        """The path or URI that a person can type, from where the folder's own was typed."""
        return self.join(*parts).uri

    def exists(self, *parts: str) -> bool:
        return bool(self._fs.exists(self.path(*parts)))

    def names(self) -> list[str]:
        """Names of what the folder holds directly, sorted; none where there is no such folder."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self.path()):
            return []
        return sorted(PurePosixPath(path).name for path in self._fs.ls(self.path(), detail=False))

    def remove(self) -> None:
        if self._fs.exists(self.path()):
            self._fs.rm(self.path(), recursive=True)

    def open(self, *parts: str) -> IO[bytes]:
        stream: IO[bytes] = self._fs.open(self.path(*parts), "rb")
        return stream

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        """Write a file that appears under its name only when the block ends without an exception.

        An object store shows an object only when it is closed. On disk the bytes go to a hidden name beside it first.
        """
        path = self.path(*parts)
        if not self.is_local:
            with self._fs.open(path, "wb") as stream:
                yield stream
            return
        folder, _, name = path.rpartition("/")
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - fsspec speaks in strings
        hidden = f"{folder}/.{name}.{os.getpid()}.tmp"
        try:
            with open(hidden, "wb") as stream:  # noqa: PTH123
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(hidden, path)  # noqa: PTH105
        except BaseException:
            if os.path.exists(hidden):  # noqa: PTH110
                os.unlink(hidden)  # noqa: PTH108
            raise

    def write(self, data: bytes, *parts: str) -> None:
        with self.create(*parts) as stream:
            stream.write(data)

    def check_writable(self) -> None:
        """Write a small file below and remove it. Raises UsageError that names the folder and the store's answer."""
        try:
            self.write(b"", ".probe")
            self._fs.rm(self.path(".probe"))
        except Exception as error:
            raise UsageError(
                f"{self.show()}: can't be written to ({explain(error)}). Give an --output folder that can"
            ) from error


def open_store(uri: str) -> tuple[Any, str]:
    """The file system of a path or URI, and its path there. Raises UsageError for an unknown or broken address."""
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
