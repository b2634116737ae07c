"""An engine as a Serve deployment, and how an ingress calls it: the engine's verb on both sides of a handle.

What goes wrong between them (a full queue, a replica that died) becomes a Failure here and nowhere else.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pipelines.engine import LATE, Engine, EngineState
from pipelines.meters import EngineMeters
from pipelines.relay import relay
from schemas.failures import EngineUnusable, Failure
from schemas.requests import Answered, Event, Failed, Lane, Request, RunShare, Streamed

log = logging.getLogger("overnight.serve")

# Names of the two deployments.
DEPLOYMENT, INGRESS = "Engine", "Ingress"
DIED = Failure(503, "engine_died", "the engine died with this request in it; another takes its place. Send it again")
_GONE = Failed(DIED)
NOT_READY = Failure(503, "not_ready", "no engine is up yet. Come back in some seconds")
FULL = Failure(503, "overloaded", "as many requests wait as may. Come back in some seconds")
_FULL = Failed(FULL)
_BROKEN = Failure(500, "internal_error", "the server failed on this request")

# The engine keeps deadlines itself; a request that hasn't reached it by then is ended here, so much later.
_GRACE_S = 1.0
_SHOW_S = 1.0
# Serve's controller is asked rarely while all is well, since an answer costs it some milliseconds; often for a while
# after an engine died.
_LOOK_S, _LOOK_SOON_S, _LOOK_AGAIN_S = 10.0, 0.5, 0.1
_UNSURE_S = 60.0
_ASK_S = 10.0
# A run that was told to come back does so within this time.
_HEARD_S = 5.0


class ServedEngine:
    """A replica: one engine, on the loop of its own, behind Serve's."""

    def __init__(self, start: Callable[[], Engine], most_batch: int, most_urgency: int = 0) -> None:
        """`most_batch`: batch requests that may be here at a time, of all runs together; `most_urgency`: by how much a
        run may raise its priorities."""
        self._engine = start()
        self._runs = _Runs(most_batch, most_urgency)
        self._meters = EngineMeters()
        self._showing = asyncio.run_coroutine_threadsafe(self._keep_showing(), self._engine.loop)

    async def generate(
        self, request: Request, lane: Lane, priority: int | None, deadline: float | None
    ) -> AsyncGenerator[Event, None]:
        """The events of one request. A dead engine is told as a Failed, so that a client is answered at once; Serve
        learns of it by `check_health`. A batch request for which its run has no place is told to come back."""
        if lane == "batch":
            share = self._runs.enter(request.share or RunShare(""))
            if share is None:
                yield _FULL
                return
            request = replace(request, share=share)
        try:
            async with contextlib.aclosing(self._answer(request, lane, priority, deadline)) as events:
                async for event in events:
                    yield event
        finally:
            if lane == "batch" and request.share is not None:
                self._runs.left(request.share)

    async def _answer(
        self, request: Request, lane: Lane, priority: int | None, deadline: float | None
    ) -> AsyncGenerator[Event, None]:
        def make() -> AsyncGenerator[Event, None]:
            # The protocol says iterator; engines are generators, and end when they are closed.
            return self._engine.generate(request, lane=lane, priority=priority, deadline=deadline)  # type: ignore[return-value]

        try:
            async with contextlib.aclosing(relay(self._engine.loop, make)) as events:
                async for event in events:
                    yield event
        except EngineUnusable as error:
            log.warning("%s: %s", request.id, error.reason)
            yield _GONE

    async def ask(self) -> EngineState:
        """Raises EngineUnusable."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._engine.ask(), self._engine.loop))

    async def check_health(self) -> None:
        """Serve's question, every some seconds; a replica whose engine doesn't answer is replaced."""
        await self.ask()

    async def _keep_showing(self) -> None:
        while True:
            # An engine that is dead shows nothing; Serve is about to notice.
            with contextlib.suppress(EngineUnusable):
                self._meters.show(await self._engine.ask())
            await asyncio.sleep(_SHOW_S)

    def __del__(self) -> None:
        """Called by Serve once all requests are answered, or the time for it is over."""
        self._showing.cancel()
        self._engine.close()


class _Runs:
    """Who of several runs may have how many requests in one replica: equal parts, so that none keeps the others out."""

    def __init__(self, most: int, most_urgency: int) -> None:
        self._most = most
        self._most_urgency = most_urgency
        self._num_here: Counter[str] = Counter()
        # When each was heard of.
        self._heard: dict[str, float] = {}

    def enter(self, share: RunShare) -> RunShare | None:
        """Let one more request of a run in, which is counted until `left`, and as urgent as it may be; None where the
        run has as many as it may have."""
        now, run = time.monotonic(), share.run
        self._heard[run] = now
        self._heard = {one: at for one, at in self._heard.items() if self._num_here[one] or now - at < _HEARD_S}
        if self._num_here[run] >= max(1, self._most // len(self._heard)):
            return None
        self._num_here[run] += 1
        return replace(share, urgency=min(share.urgency, self._most_urgency))

    def left(self, share: RunShare) -> None:
        self._num_here[share.run] -= 1


@dataclass(slots=True)
class RemoteEngine:
    """The engine deployment as an ingress sees it."""

    handle: Any
    app_name: str
    # By Serve's own word; a request that comes while it is False is turned away at once.
    _is_up: bool = False
    _looked_at: float = 0.0
    _unsure_until: float = 0.0
    _look: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def generate(
        self, request: Request, *, lane: Lane, priority: int | None, deadline: float | None, affinity: str
    ) -> AsyncGenerator[Event, None]:
        """The events of one request, the last one a Streamed, an Answered or a Failed; raises nothing but a cancelled
        await. `affinity`: requests with the same one go to the same engine where they can; "": to the least busy."""
        if not await self.is_ready():
            yield Failed(NOT_READY)
            return
        handle = self.handle.options(stream=True, session_id=affinity)
        until = None
        if deadline is not None:
            until = asyncio.get_running_loop().time() + deadline - time.time() + _GRACE_S
        response, is_over = None, False
        try:
            response = handle.generate.remote(request, lane, priority, deadline)
            while not is_over:
                async with asyncio.timeout_at(until):
                    event = await anext(response)
                is_over = isinstance(event, Answered | Streamed | Failed)
                if event == _GONE:
                    self._unsure_until = time.monotonic() + _UNSURE_S
                yield event
        except Exception as error:
            is_over = not isinstance(error, TimeoutError)
            failed = Failed(_explain(error))
            if failed == _GONE:
                self._unsure_until = time.monotonic() + _UNSURE_S
            yield failed
        finally:
            # Its reader went away, or it is late: the engine is to stop.
            if response is not None and not is_over:
                response.cancel()

    async def ask(self) -> EngineState | None:
        """How an engine is; None when none answers."""
        if not await self.is_ready():
            return None
        try:
            async with asyncio.timeout(_ASK_S):
                state: EngineState = await self.handle.ask.remote()
                return state
        except Exception:
            return None

    async def keep_looking(self) -> None:
        """Learn from Serve, time and again, whether an engine is up."""
        while True:
            async with self._look:
                await self._ask_serve()
            started = time.monotonic()
            while time.monotonic() < started + (_LOOK_S if self._is_sure() else 0.0):
                await asyncio.sleep(_LOOK_SOON_S)
            await asyncio.sleep(_LOOK_SOON_S)

    def _is_sure(self) -> bool:
        return self._is_up and time.monotonic() > self._unsure_until

    async def is_ready(self) -> bool:
        """Whether an engine is up; one that has just come up is seen at once."""
        if self._is_up:
            return True
        # One look at a time: an older one that ends later would say again that none is up.
        async with self._look:
            if not self._is_up and time.monotonic() - self._looked_at > _LOOK_AGAIN_S:
                await self._ask_serve()
        return self._is_up

    async def _ask_serve(self) -> None:
        from ray import serve

        try:
            app = (await asyncio.to_thread(serve.status)).applications.get(self.app_name)
            states = app.deployments[DEPLOYMENT].replica_states if app is not None else {}
            self._is_up = states.get("RUNNING", 0) > 0
        except Exception as error:
            # Serve's controller is away; its replicas go on, and so do we.
            log.warning("Serve doesn't tell how the engines are: %s", error)
        self._looked_at = time.monotonic()


def _explain(error: Exception) -> Failure:
    """What went wrong between an ingress and an engine."""
    from ray.exceptions import RayActorError, TaskCancelledError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

    match error:
        case TimeoutError():
            return LATE
        case BackPressureError():
            return FULL
        case RayActorError() | ReplicaUnavailableError() | TaskCancelledError():
            return DIED
        case DeploymentUnavailableError():
            return NOT_READY
    log.error("a request failed on its way to the engine", exc_info=error)
    return _BROKEN
