"""Inputs: what `--input` names, as a list of files in one order."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.storage import explain, is_remote, open_store
from schemas.failures import InputMissing, UsageError

SUFFIXES = tuple(name + packed for name in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst"))


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file: its place in the order of the run, the name that tables show, and its address."""

    index: int
    name: str
    uri: str
    size_bytes: int
    # Changes when the file does: the store's etag, else the time of modification.
    version: str


def find_inputs(inputs: tuple[str, ...]) -> list[InputFile]:
    """The files that `inputs` (files, folders, globs, URIs) name, each once, in order.

    A folder stands for the files below it that end in one of SUFFIXES and don't begin with `.` or `_`.
    Raises UsageError for an input that isn't there, can't be read, or holds no such file.
    """
    found: dict[str, InputFile] = {}
    for spec in inputs:
        fs, root = open_store(spec)
        for path in _expand(spec, fs, root):
            uri = fs.unstrip_protocol(path) if is_remote(spec) else path
            key = uri if is_remote(spec) else os.path.realpath(path)
            if key not in found:
                found[key] = _describe(len(found), _show(spec, path, uri), uri, fs, path)
    return list(found.values())


def _expand(spec: str, fs: Any, root: str) -> list[str]:
    """The paths that one input names, in its store's own form. Raises UsageError where there are none."""
    try:
        if fs.isfile(root) or (not is_remote(spec) and Path(root).exists() and not fs.isdir(root)):
            return [root]
        if fs.isdir(root):
            below = fs.find(root) if is_remote(spec) else _walk(root)
            paths = sorted(path for path in below if path.endswith(SUFFIXES) and not _is_hidden(path[len(root) :]))
            if not paths:
                raise InputMissing(
                    f"{spec}: holds no file that ends in {', '.join(SUFFIXES)}. Name the files, or a glob"
                )
            return paths
        if glob.has_magic(root):
            paths = sorted(path for path in fs.glob(root) if fs.isfile(path))
            if not paths:
                raise InputMissing(f"{spec}: no file matches. Check the pattern (quoted, if the shell would expand it)")
            return paths
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{spec}: can't be read ({explain(error)}). Check its permissions") from error
    raise InputMissing(f"{spec}: no such file or folder. Check --input")


def _walk(root: str) -> Iterator[str]:
    """All files below a local folder, through links too. Raises OSError for a folder that can't be read."""

    def fail(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for folder, children, files in os.walk(root, followlinks=True, onerror=fail):
        seen.add(os.path.realpath(folder))
        children[:] = [child for child in children if os.path.realpath(f"{folder}/{child}") not in seen]
        yield from (f"{folder}/{name}" for name in files)


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _show(spec: str, path: str, uri: str) -> str:
    """How tables name a file: relative where the user's own words were."""
    if is_remote(spec):
        return uri
    return path if spec.startswith(("/", "~", "file://")) else os.path.relpath(path)


def _describe(index: int, name: str, uri: str, fs: Any, path: str) -> InputFile:
    if not _is_text(name):
        raise UsageError(f"{name!a}: the file's name isn't UTF-8, so no table could hold it. Rename the file")
    try:
        info = fs.info(path)
        if not is_remote(uri):
            with fs.open(path, "rb") as stream:
                stream.read(1)
        elif info["size"]:
            # A byte of it and no more: a store's file that is opened is read ahead, by megabytes.
            fs.cat_file(path, start=0, end=1)
    except Exception as error:
        raise UsageError(f"{name}: can't be read ({explain(error)}). Check its permissions") from error
    version = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("LastModified")
    return InputFile(index, name, uri, int(info["size"]), str(version))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
