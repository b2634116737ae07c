"""The seam between the doors and what answers: an engine, behind one verb. vLLM's is `pipelines/vllm_engine.py`."""

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from schemas.failures import Failure
from schemas.requests import Answered, Event, Failed, Lane, Request

LATE = Failure(504, "deadline_exceeded", "the request's deadline passed before it was answered")


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine has to do: sequences in it, prompts that wait before it, and the share of its KV cache in use."""

    num_running: int = 0
    num_waiting: int = 0
    kv_share: float = 0.0
    # Of batch requests: sequences in it, as many as may be, and those that its last step left out for people; and since
    # it started: how often one was set aside for people, and tokens of answers that were computed for nothing then.
    num_batch: int = 0
    batch_budget: int = 0
    num_left_out: int = 0
    num_set_aside: int = 0
    num_lost_tokens: int = 0


class Engine(Protocol):
    """What answers requests. The seam between the doors and vLLM; the tests' deterministic engine is one, too."""

    loop: asyncio.AbstractEventLoop

    def generate(
        self, request: Request, *, lane: Lane, priority: int | None = None, deadline: float | None = None
    ) -> AsyncIterator[Event]:
        """The events of one request; the last one is an Answered or a Failed. One whose body streams has Chunks, and a
        Streamed in place of the Answered. To be called on `loop`. Ending it early frees the engine.

        `priority`: lower is earlier; None means what the body says. `deadline`: `time.time()` at which to give up.
        Raises EngineUnusable when the fault is the engine's and not the request's, and NotBegun after `drain`.
        """
        ...

    def submit(self, request: Request, *, lane: Lane) -> "concurrent.futures.Future[Answered | Failed]":
        """Start a request from any thread; the future holds its last event."""
        ...

    def drain(self) -> None:
        """Let no more requests in: those that wait, or come, raise NotBegun, and those that are in finish.

        From any thread.
        """
        ...

    def press(self, urgency: int) -> None:
        """From now on its requests are so much more urgent than they say, to engines that other runs share. From any
        thread."""
        ...

    @property
    def state(self) -> EngineState:
        """How it is, as far as is known without asking it. From any thread."""
        ...

    async def ask(self) -> EngineState:
        """How it is, by its own word. On `loop`. Raises EngineUnusable when it can't answer any request."""
        ...

    def restart(self) -> None:
        """Start the engine's processes again, after EngineUnusable. From any thread but the engine's.

        Raises EngineUnusable when they don't start.
        """
        ...

    def close(self) -> None:
        """End the engine and its processes. Requests in flight fail. May be called twice."""
        ...
