"""What benchmarks of whole runs share: an engine that writes down what it answers, and a Show that says nothing."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Watched:
    """An engine that writes down each answer that it gives, a line of JSON each: the request's id, when it came and
    went, and its tokens."""

    def __init__(self, engine: Any, folder: str) -> None:
        self._engine = engine
        self._stream = (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Any, *, lane: Any) -> "Future[Any]":
        came = time.time()
        future = self._engine.submit(request, lane=lane)

        def gone(done: "Future[Any]") -> None:
            if done.exception() is None:
                tokens = done.result().usage["completion_tokens"]
                told = {"id": request.id, "came": came, "gone": time.time(), "tokens": tokens}
                self._stream.write(json.dumps(told) + "\n")

        future.add_done_callback(gone)
        return future


@dataclass(frozen=True)
class WatchedStart:
    """Starts an engine that is watched."""

    start: Callable[[], Any]
    folder: str

    def __call__(self) -> Watched:
        return Watched(self.start(), self.folder)


def read_watched(folder: Path) -> list[list[dict[str, Any]]]:
    """What each engine wrote down; nothing of one that answered nothing."""
    lines = [file.read_text().splitlines() for file in sorted(folder.glob("*.jsonl"))]
    return [[json.loads(line) for line in some] for some in lines if some]


class Silence:
    """A Show that says nothing."""

    def phase(self, text: str) -> None: ...
    def checked(self, num_rows: int) -> None: ...
    def progress(self, now: Any) -> None: ...
    def drains(self, draining: Any) -> AbstractContextManager[None]:
        return nullcontext()
