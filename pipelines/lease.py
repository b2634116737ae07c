"""Lease: one writer to an output folder at a time.

The writer holds `_work/lease.json` and renews it; one that isn't renewed any more, or whose process is gone from this
machine, may be taken. It is made by an exclusive write: of the disk, or of a store that refuses to write a name twice.
"""

import contextlib
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
from schemas.failures import Busy, StorageFailed, UsageError

log = logging.getLogger("overnight.lease")

RENEW_S = 10.0
# One that is older than this is nobody's.
EXPIRES_S = 60.0
# Two that take one over at once see by then who was last.
_SETTLE_S = 1.0
_NAME = "lease.json"


class Lease:
    """Held for as long as the block lasts, unless it is lost: `check` before what another run must not see.

    Raises Busy where another run writes to the folder.
    """

    def __init__(self, output: Folder) -> None:
        self._output, self._folder = output, output.join("_work")
        self._token = uuid.uuid4().hex
        self._stop = threading.Event()
        # Set when another run has taken it, since this one stood still for too long.
        self._is_lost = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        if not self._folder.create_once(self._data(), _NAME):
            holder = self._read()
            # A store's answer to the first try may have been lost on the way.
            is_ours = holder is not None and holder["token"] == self._token
            if holder is not None and not is_ours and not _is_free(holder):
                told = f"{_name(holder)}, last heard of {time.time() - holder['renewed']:.0f} s ago"
                raise Busy(
                    f"{self._output.typed}: another run writes there ({told}). Wait for it, or give another --output",
                    told,
                )
            self._folder.write(self._data(), _NAME)
            time.sleep(_SETTLE_S)
            holder = self._read()
            if holder is None or holder["token"] != self._token:
                raise Busy(
                    f"{self._output.typed}: another run has begun to write there just now. Wait for it",
                    "begun just now",
                )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        # Where the store fails it expires.
        with contextlib.suppress(StorageFailed):
            if self._is_ours():
                self._folder.remove_file(_NAME)

    def check(self) -> None:
        """Raises UsageError where another run has taken the lease."""
        if self._is_lost.is_set() or not self._is_ours():
            raise UsageError(
                f"{self._output.typed}: another run has taken this folder over, since this one stood still for "
                f"{EXPIRES_S:.0f} s or longer. Leave it to that one"
            )

    def _is_ours(self) -> bool:
        # One that is gone was another's, whose run is over by now.
        holder = self._read()
        return holder is not None and holder["token"] == self._token

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                if not self._is_ours():
                    self._is_lost.set()
                    return
                self._folder.write(self._data(), _NAME)
            except Exception:  # a store that doesn't answer now may do so in time
                log.warning("the lease on %s wasn't renewed", self._folder.typed, exc_info=True)

    def _data(self) -> bytes:
        told = {"token": self._token, "host": socket.gethostname(), "pid": os.getpid()}
        told |= {"started": psutil.Process().create_time(), "renewed": time.time()}
        return json.dumps(told).encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            held: dict[str, Any] = json.loads(self._folder.read(_NAME))
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
