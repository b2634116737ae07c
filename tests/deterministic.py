"""A deterministic engine, for scale and for faults that the real one can't be made to have. Says nothing about vLLM.

The answer to a prompt is its words in reverse; some words in a prompt ask for a fault.
"""

import asyncio
import contextlib
import glob
import json
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import jiter

from pipelines.engine import LATE, EngineState
from schemas.dialects import engine_endpoint, to_engine
from schemas.failures import EngineUnusable, Failure, NotBegun
from schemas.replies import reply_to
from schemas.requests import Answered, Chunk, Event, Failed, Lane, Request, Streamed, Timing


class DeterministicEngine:
    """Answers at once, or after `slow:<seconds>`; fails on `fail`; dies on `die`, and on `die:<file>` unless the file
    is there, which it then is; is late on `late:<file>` in the same way; takes the whole process with it on `exit`, and
    after its waits on `exit:<file>` in the same way; answers with a NaN on `nan`. Waits on `until:<pattern>` for a file
    whose path is like that, a minute at most."""

    def __init__(self, dies_after: int | None = None) -> None:
        """`dies_after`: so many requests it answers; then it is dead, however often it is started again."""
        self._left = math.inf if dies_after is None else dies_after
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._is_dead = self._is_draining = False
        self._num_running = 0

    async def generate(
        self, request: Request, *, lane: Lane, priority: int | None = None, deadline: float | None = None
    ) -> AsyncIterator[Event]:
        if self._is_draining:
            raise NotBegun
        self._num_running += 1
        until = None if deadline is None else asyncio.get_running_loop().time() + deadline - time.time()
        try:
            async with contextlib.aclosing(self._answer(request, lane, priority)) as events:
                while True:
                    async with asyncio.timeout_at(until):
                        event = await anext(events, None)
                    if event is None:
                        return
                    yield event
        except TimeoutError:
            yield Failed(LATE)
        finally:
            self._num_running -= 1

    async def _answer(self, request: Request, lane: Lane, priority: int | None) -> AsyncGenerator[Event, None]:
        body = to_engine(jiter.from_json(request.body.encode()), request.endpoint, None)
        is_chat = engine_endpoint(request.endpoint) != "/v1/completions"
        words = str(body["messages"][-1]["content"] if is_chat else body.get("prompt")).split()
        once = [path for word in words if (path := Path(word.removeprefix("die:"))) != Path(word) and not path.exists()]
        for path in once:
            path.touch()
        self._left -= 1
        if self._is_dead or "die" in words or once or self._left < 0:
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
        await _wait(words)
        if body.get("stream"):
            async for event in self._stream(request, body, words):
                yield event
            return
        said = " ".join(reversed(words))
        told = {"message": {"role": "assistant", "content": said}} if is_chat else {"text": said}
        choice = {"index": 0, "finish_reason": "stop", **told}
        usage = {"prompt_tokens": len(words), "completion_tokens": len(words), "total_tokens": 2 * len(words)}
        # Not part of an API's answer: what reached the engine, for tests that compare it.
        received = request.body
        if "nan" in words:
            choice["logprobs"] = {"token_logprobs": [math.nan]}
        answer = {"id": request.id, "created": int(time.time()), "model": "test", "choices": [choice], "usage": usage}
        answer |= {"object": "chat.completion" if is_chat else "text_completion", "received": received}
        if lane == "online":
            answer |= {"priority": priority, "engine": os.getpid()}
        timing = Timing(None, None, 1.0)
        told = reply_to(request.endpoint).answer(answer, timing)
        yield Answered(told, timing, None if "usage" in told else answer)

    async def _stream(self, request: Request, body: dict, words: list[str]) -> AsyncIterator[Event]:
        """A chunk a word; `pause:<seconds>` waits before each. `break` fails and `perish` dies after the first."""
        is_chat, reply = engine_endpoint(request.endpoint) != "/v1/completions", reply_to(request.endpoint)
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        shared = {"id": request.id, "object": kind, "created": int(time.time()), "model": "test"}
        said = " ".join(reversed(words)).split(" ")
        for number, word in enumerate(said):
            await asyncio.sleep(sum(float(one.partition(":")[2]) for one in words if one.startswith("pause:")))
            if number and "break" in words:
                yield Failed(Failure(500, "asked_to_break", "the prompt asks for a failure in the middle"))
                return
            if number and "perish" in words:
                self._is_dead = True
                raise EngineUnusable("the engine's process has died")
            end = "stop" if number == len(said) - 1 else None
            text = f" {word}" if number else word
            told = {"delta": {"content": text}} if is_chat else {"text": text}
            if (event := reply.chunk(shared | {"choices": [{"index": 0, "finish_reason": end, **told}]})) is not None:
                yield Chunk(json.dumps(event))
        usage = {"prompt_tokens": len(words), "completion_tokens": len(words), "total_tokens": 2 * len(words)}
        asks_for_usage = (body.get("stream_options") or {}).get("include_usage")
        last = reply.chunk(shared | {"choices": [], "usage": usage}) if asks_for_usage else None
        if last is not None:
            yield Chunk(json.dumps(last))
        for event in reply.last(Timing(None, None, 1.0)):
            yield Chunk(json.dumps(event))
        yield Streamed(usage, Timing(None, None, 1.0))

    @property
    def state(self) -> EngineState:
        return EngineState(self._num_running)

    async def ask(self) -> EngineState:
        if self._is_dead:
            raise EngineUnusable("the engine's process has died")
        return self.state

    def submit(self, request: Request, *, lane: Lane) -> "Future[Event]":
        async def last() -> Event:
            return [event async for event in self.generate(request, lane=lane)][-1]

        return asyncio.run_coroutine_threadsafe(last(), self.loop)

    def press(self, urgency: int) -> None:
        self.urgency = urgency

    def drain(self) -> None:
        self._is_draining = True

    def restart(self) -> None:
        self._is_dead = False

    def close(self) -> None:
        def end() -> None:
            # Whoever waits for an answer hears that there will be none.
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_soon(self.loop.stop)

        self.loop.call_soon_threadsafe(end)


async def _wait(words: list[str]) -> None:
    """What a prompt asks for before its answer."""
    await asyncio.sleep(sum(float(word.partition(":")[2]) for word in words if word.startswith("slow:")))
    for pattern in (word.removeprefix("until:") for word in words if word.startswith("until:")):
        until = time.monotonic() + 60
        while not glob.glob(pattern) and time.monotonic() < until:  # noqa: PTH207 - looks at no folder for one path
            await asyncio.sleep(0.1)
    for path in (Path(word.removeprefix("exit:")) for word in words if word.startswith("exit:")):
        if not path.exists():
            path.touch()
            os._exit(1)


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
