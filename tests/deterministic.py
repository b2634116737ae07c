"""A deterministic engine, for scale and for faults that the real one can't be made to have. Says nothing about vLLM.

The answer to a prompt is its words in reverse; some words in a prompt ask for a fault.
"""

import asyncio
import glob
import math
import os
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import jiter

from schemas.failures import EngineUnusable, Failure
from schemas.requests import Answered, Event, Failed, Lane, Request, Timing


class DeterministicEngine:
    """Answers at once, or after `slow:<seconds>`; fails on `fail`; dies on `die`, and on `die:<file>` unless the file
    is there, which it then is; is late on `late:<file>` in the same way; takes the whole process with it on `exit`, and
    after its waits on `exit:<file>` in the same way; answers with a NaN on `nan`. Waits on `until:<pattern>` for a file
    whose path is like that, a minute at most."""

    def __init__(self, dies_after: int | None = None) -> None:
        """`dies_after`: so many requests it answers; then it is dead, however often it is started again."""
        self._left = dies_after
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._is_dead = False

    async def generate(
        self, request: Request, *, lane: Lane, priority: int | None = None, deadline: float | None = None
    ) -> AsyncIterator[Event]:
        body = jiter.from_json(request.body.encode())
        words = str(body.get("prompt")).split()
        once = [path for word in words if (path := Path(word.removeprefix("die:"))) != Path(word) and not path.exists()]
        for path in once:
            path.touch()
        if self._left is not None:
            self._left -= 1
        if self._is_dead or "die" in words or once or (self._left is not None and self._left < 0):
            self._is_dead = True
            raise EngineUnusable("the engine's process has died")
        if "exit" in words:
            os._exit(1)
        if "fail" in words:
            yield Failed(Failure(400, "asked_to_fail", "the prompt asks for a failure", "prompt"))
            return
        for path in (Path(word.removeprefix("late:")) for word in words if word.startswith("late:")):
            if not path.exists():
                path.touch()
                yield Failed(Failure(504, "deadline_exceeded", "too late"))
                return
        await asyncio.sleep(sum(float(word.partition(":")[2]) for word in words if word.startswith("slow:")))
        for pattern in (word.removeprefix("until:") for word in words if word.startswith("until:")):
            until = time.monotonic() + 60
            while not glob.glob(pattern) and time.monotonic() < until:  # noqa: PTH207 - looks at no folder for one path
                await asyncio.sleep(0.1)
        for path in (Path(word.removeprefix("exit:")) for word in words if word.startswith("exit:")):
            if not path.exists():
                path.touch()
                os._exit(1)
        choice = {"index": 0, "text": " ".join(reversed(words)), "finish_reason": "stop"}
        usage = {"prompt_tokens": len(words), "completion_tokens": len(words), "total_tokens": 2 * len(words)}
        # Not part of an API's answer: what reached the engine, for tests that compare it.
        received = request.body
        if "nan" in words:
            choice["logprobs"] = {"token_logprobs": [math.nan]}
        answer = {"id": request.id, "created": int(time.time()), "model": "test", "choices": [choice], "usage": usage}
        answer["received"] = received
        yield Answered(answer, Timing(None, None, 1.0))

    def submit(self, request: Request, *, lane: Lane) -> "Future[Event]":
        async def last() -> Event:
            return [event async for event in self.generate(request, lane=lane)][-1]

        return asyncio.run_coroutine_threadsafe(last(), self._loop)

    def restart(self) -> None:
        self._is_dead = False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


@dataclass(frozen=True)
class Starts:
    """Starts a deterministic engine, or doesn't."""

    error: str | None = None
    # A folder where engines meet, and how many: none answers before all are up.
    meeting: tuple[str, int] | None = None
    dies_after: int | None = None

    def __call__(self) -> DeterministicEngine:
        if self.meeting is not None:
            folder, number = Path(self.meeting[0]), self.meeting[1]
            (folder / str(os.getpid())).touch()
            while len(list(folder.iterdir())) < number:
                time.sleep(0.05)
        if self.error is not None:
            raise EngineUnusable(self.error)
        return DeterministicEngine(self.dies_after)
