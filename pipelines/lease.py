"""Lease: one writer to an output folder at a time.

The writer holds `_work/lease.json` and renews it; one that isn't renewed any more, or whose process is gone from this
machine, may be taken. It is made by an exclusive write: of the disk, or of a store that refuses to write a name twice.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

import psutil

from pipelines.storage import Folder
from schemas.failures import UsageError

log = logging.getLogger("overnight.lease")

RENEW_S = 10.0
# One that is older than this is nobody's.
EXPIRES_S = 60.0
# Two that take one over at once see by then who was last.
_SETTLE_S = 1.0
_NAME = "lease.json"


class Lease:
    """Held for as long as the block lasts. Raises UsageError where another run writes to the folder."""

    def __init__(self, output: Folder) -> None:
        self._folder = output.join("_work")
        self._token = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        if not self._folder.create_once(self._data(), _NAME):
            holder = self._read()
            if holder is not None and not _is_free(holder):
                raise UsageError(
                    f"{self._folder.typed.removesuffix('/_work')}: another run writes there ({_name(holder)}, last "
                    f"heard of {time.time() - holder['renewed']:.0f} s ago). Wait for it, or give another --output"
                )
            self._folder.write(self._data(), _NAME)
            time.sleep(_SETTLE_S)
            holder = self._read()
            if holder is None or holder["token"] != self._token:
                raise UsageError(f"{self._folder.typed}: another run has begun to write there just now. Wait for it")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        holder = self._read()
        if holder is not None and holder["token"] == self._token:
            self._folder.remove_file(_NAME)

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                self._folder.write(self._data(), _NAME)
            except Exception:  # a store that doesn't answer now may do so in time
                log.warning("the lease on %s wasn't renewed", self._folder.typed, exc_info=True)

    def _data(self) -> bytes:
        told = {"token": self._token, "host": socket.gethostname(), "pid": os.getpid()}
        told |= {"started": psutil.Process().create_time(), "renewed": time.time()}
        return json.dumps(told).encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            with self._folder.open(_NAME) as stream:
                held: dict[str, Any] = json.load(stream)
        except (FileNotFoundError, ValueError):
            return None
        return held


def _is_free(holder: dict[str, Any]) -> bool:
    if time.time() - holder["renewed"] > EXPIRES_S:
        return True
    if holder["host"] != socket.gethostname():
        return False
    try:
        return bool(psutil.Process(holder["pid"]).create_time() != holder["started"])
    except psutil.NoSuchProcess:
        return True


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}"
