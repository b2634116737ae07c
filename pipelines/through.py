"""A run through an endpoint: its requests go to the engines of a Serve application that is up, in the batch lane.

The engines are the endpoint's, and so are model, names and settings. People come first there: batch requests have what
its admission leaves them, and no more of them are sent than half of what an engine takes at a time, so that Serve's own
queue stays free for people. One of a run's replicas, which compute nothing themselves, is there for each engine.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from pipelines import traces
from pipelines.engine import Engine, EngineState
from pipelines.placement import Placement
from pipelines.served_engine import DEPLOYMENT, DIED, FULL, INGRESS, NOT_READY, RemoteEngine
from schemas.failures import EngineUnusable, NotBegun, UsageError
from schemas.requests import Answered, Event, Failed, Lane, Request, RunShare
from schemas.settings import EngineSettings, RunSettings

# An endpoint whose engines are all away is waited for so long.
_AWAY_S = 600.0
_LOOK_S = 1.0
# Of what an engine takes at a time runs have this much: the rest is for people.
_SHARE = 0.5
_ASK_S = 60.0
# A cluster whose every core is taken is waited for so long.
_TAKEN_S = 30.0


def adopt(settings: RunSettings) -> RunSettings:
    """The settings of a run with the model, names and engine of the endpoint that it goes through.

    On the endpoint's cluster. Raises UsageError where there is no such endpoint, and where a setting is its to make.
    """
    for flag, is_given in (
        ("--model", settings.model is not None),
        ("--served-name", bool(settings.served_names)),
        ("--adapter", bool(settings.adapters)),
        ("--engine", settings.engine != EngineSettings()),
        ("--replicas", settings.replicas is not None),
    ):
        if is_given:
            raise UsageError(f"{flag}: found it beside --through, where the endpoint's own is taken. Leave it out")
    if not settings.verbose:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
    told = _ask(settings)
    _find_a_core()
    return settings.model_copy(update={name: told[name] for name in ("model", "served_names", "adapters", "engine")})


def place_through(settings: RunSettings) -> Placement:
    """As many replicas as the endpoint has engines, that take nothing of the cluster. Raises UsageError."""
    told = _ask(settings)
    return Placement(
        num_replicas=max(1, told["num_engines"]),
        is_fixed=True,
        replicas_per_node=1,
        num_cpus=0,
        num_gpus=0,
        num_parts=1,
        rows_in_flight=max(1, int(told["max_ongoing_requests"] * _SHARE)),
        environment=traces.environment(),
    )


def _find_a_core() -> None:
    """Lines are checked and planned on cores that no engine has. Raises UsageError where there is none."""
    import ray

    until = time.monotonic() + _TAKEN_S
    while ray.available_resources().get("CPU", 0) < 1:
        if time.monotonic() > until:
            raise UsageError(
                f"--through: all {ray.cluster_resources().get('CPU', 0):.0f} CPU cores of the cluster are taken, and "
                "checking and planning need one. Give the endpoint fewer (serve --engine cores=N --replicas N), or the "
                "cluster more"
            )
        time.sleep(_LOOK_S)


def _app_of(settings: RunSettings) -> str:
    assert settings.through is not None
    return settings.through.removeprefix("serve:")


def _num_engines(app: str) -> int:
    """Engines of an application that are up. Raises UsageError where there is no such endpoint."""
    from ray import serve

    try:
        found = serve.status().applications
    except Exception as error:
        raise UsageError(
            f"--through serve:{app}: Serve isn't up on this cluster. Start the endpoint first, and give its cluster "
            "in RAY_ADDRESS where it isn't this machine's"
        ) from error
    if app not in found or DEPLOYMENT not in found[app].deployments:
        ours = sorted(name for name, one in found.items() if DEPLOYMENT in one.deployments)
        raise UsageError(
            f"--through serve:{app}: no endpoint of this name is up on this cluster; there are: "
            f"{', '.join(ours) or 'none'}"
        )
    return int(found[app].deployments[DEPLOYMENT].replica_states.get("RUNNING", 0))


def _ask(settings: RunSettings) -> dict[str, Any]:
    from ray import serve

    app = _app_of(settings)
    num_engines = _num_engines(app)
    try:
        told: dict[str, Any] = serve.get_deployment_handle(INGRESS, app).describe.remote().result(timeout_s=_ASK_S)
    except Exception as error:
        raise UsageError(
            f"--through serve:{app}: the endpoint doesn't say what it serves ({type(error).__name__}). Is it one of "
            "`overnight serve`, of this version?"
        ) from error
    return {**told, "num_engines": num_engines}


@dataclass(frozen=True, slots=True)
class ThroughStart:
    """Finds the endpoint from wherever it is called: picklable."""

    app: str
    # Requests that one of the run's replicas may have there at a time.
    most: int
    share: RunShare

    @classmethod
    def of(cls, settings: RunSettings, placement: Placement, run_id: str) -> "ThroughStart":
        share = RunShare(run_id, math.inf if settings.due is None else settings.due)
        return cls(_app_of(settings), placement.rows_in_flight, share)

    def __call__(self) -> Engine:
        return ThroughEngine(self.app, self.most, self.share)


class ThroughEngine:
    """The engines of an endpoint, as one: the verb of the seam, over Serve's handle."""

    def __init__(self, app: str, most: int, share: RunShare) -> None:
        """`most`: requests that may be there at a time; others wait here. `share`: what the engines are told of whose
        they are."""
        from ray import serve

        self._app = app
        self._share = share
        self._room = asyncio.Semaphore(most)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="through", daemon=True)
        self._thread.start()
        self._remote = RemoteEngine(serve.get_deployment_handle(DEPLOYMENT, app), app)
        self._is_draining = False
        self._looking = asyncio.run_coroutine_threadsafe(self._remote.keep_looking(), self.loop)

    async def generate(
        self, request: Request, *, lane: Lane, priority: int | None = None, deadline: float | None = None
    ) -> AsyncIterator[Event]:
        async with self._room:
            if self._is_draining:
                raise NotBegun
            async with contextlib.aclosing(self._answer(request, lane, priority, deadline)) as events:
                async for event in events:
                    yield event

    async def _answer(
        self, request: Request, lane: Lane, priority: int | None, deadline: float | None
    ) -> AsyncGenerator[Event, None]:
        """The events of one request, once an engine takes it."""
        until = time.monotonic() + _AWAY_S
        while True:
            refused: Failed | None = None
            async with contextlib.aclosing(self._send(request, lane, priority, deadline)) as events:
                async for event in events:
                    match event:
                        case Failed(failure) if failure == DIED:
                            raise EngineUnusable(f"an engine of serve:{self._app} died")
                        case Failed(failure) if failure in {FULL, NOT_READY}:
                            refused = event
                        case _:
                            yield event
            if refused is None:
                return
            if refused.failure == FULL:
                until = time.monotonic() + _AWAY_S
            elif time.monotonic() > until:
                raise EngineUnusable(f"no engine of serve:{self._app} has been up for {_AWAY_S:.0f} s")
            if self._is_draining:
                raise NotBegun
            await asyncio.sleep(_LOOK_S)

    def _send(
        self, request: Request, lane: Lane, priority: int | None, deadline: float | None
    ) -> AsyncGenerator[Event, None]:
        # What follows one another in a chunk shares its beginning: to the same engine, while that isn't crowded.
        affinity = f"run-{threading.get_native_id()}"
        request = replace(request, share=self._share)
        return self._remote.generate(request, lane=lane, priority=priority, deadline=deadline, affinity=affinity)

    def submit(self, request: Request, *, lane: Lane) -> "concurrent.futures.Future[Answered | Failed]":
        return asyncio.run_coroutine_threadsafe(self._last_event(request, lane), self.loop)

    async def _last_event(self, request: Request, lane: Lane) -> Answered | Failed:
        *_, last = [event async for event in self.generate(request, lane=lane)]
        assert isinstance(last, Answered | Failed), "a batch request doesn't stream"
        return last

    def press(self, urgency: int) -> None:
        self._share = replace(self._share, urgency=urgency)

    def drain(self) -> None:
        """What has been sent finishes; what waits to be sent isn't."""
        self._is_draining = True

    @property
    def state(self) -> EngineState:
        # The engines' own processes tell it.
        return EngineState()

    async def ask(self) -> EngineState:
        state = await self._remote.ask()
        if state is None:
            raise EngineUnusable(f"no engine of serve:{self._app} answers")
        return state

    def restart(self) -> None:
        """Wait until Serve has put another engine in the place of one that died."""
        until = time.monotonic() + _AWAY_S
        while time.monotonic() < until:
            if asyncio.run_coroutine_threadsafe(self._remote.is_ready(), self.loop).result():
                return
            time.sleep(_LOOK_S)
        raise EngineUnusable(f"no engine of serve:{self._app} came up again within {_AWAY_S:.0f} s")

    def close(self) -> None:
        if self._thread.is_alive():
            self._looking.cancel()
            asyncio.run_coroutine_threadsafe(self._shut_down(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
