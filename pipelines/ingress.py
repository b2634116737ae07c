"""The HTTP side of the endpoint: who asks, whether he may, and how the answer is sent. Needs no GPU.

Judges requests by the same checks as the batch door; FastAPI routes alone, and validates nothing a second time.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from ray import serve
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from pipelines.access import Access, headers_of
from pipelines.intake import Intake, Refused
from pipelines.limits import read_limits
from pipelines.meters import DoorMeters
from pipelines.model import resolve
from pipelines.served_engine import FULL, NOT_READY, RemoteEngine
from pipelines.traces import Traces
from schemas.dialects import EXTERNAL_CHAT, LEGACY, LEGACY_STREAM
from schemas.failures import Failure
from schemas.openapi import document
from schemas.replies import to_json
from schemas.requests import Answered, Chunk, Endpoint, Event, Failed, Streamed, Timing
from schemas.rules import refuse, show
from schemas.settings import ServeSettings

log = logging.getLogger("overnight.serve")

# A stream that says nothing for so long sends a comment, so that no proxy on the way takes it for dead.
KEEP_ALIVE_S = 15.0
_DONE = "data: [DONE]\n\n"
_COMPLETIONS: Endpoint = "/v1/completions"
# What proxies on the way must know of a stream.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_INTERNAL = Failure(500, "internal_error", "the server failed on this request")
_GONE = Failure(499, "client_gone", "the client went away")

# What may stand in a log as it is.
_REQUEST_ID = re.compile(r"[\w.-]{1,64}")

app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)


@dataclass(slots=True, eq=False)
class Visit:
    """One HTTP request from its arrival to its end: what is counted of it."""

    route: Endpoint
    # Serve's own, which it also gives the client (`X-Request-ID`); a client may have brought it.
    id: str
    # Of the request, for the span that it may be part of.
    asked_with: Mapping[str, str] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.time)
    role: str = ""
    is_stream: bool = False
    # Of the answer, beside those that all have.
    headers: dict[str, str] = field(default_factory=dict)
    # What became of it; nobody is told of a client that left. None: it was answered, as these say.
    end: Failure | None = _GONE
    timing: Timing | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)

    def answered(self, timing: Timing, usage: Mapping[str, Any]) -> None:
        self.end, self.timing, self.usage = None, timing, usage


class EventStream(StreamingResponse):
    """A stream that is put away when its client is gone, and not when somebody finds the time."""

    def __init__(self, parts: AsyncGenerator[str, None], end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(parts, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._parts, self._end = parts, end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with aclosing(self._parts):
                await super().__call__(scope, receive, send)
        finally:
            await self._end()


@app.exception_handler(HTTPException)
async def _tell_of_routes(http: HttpRequest, error: HTTPException) -> Response:
    """Paths and methods that there aren't, in the form of all errors."""
    failures = {
        404: Failure(404, "unknown_route", f"there is no {show(http.url.path)} here; see /openapi.json"),
        405: Failure(405, "unknown_method", f"{http.method} isn't for this path; see /openapi.json"),
    }
    failure = failures.get(error.status_code, Failure(error.status_code, "bad_request", str(error.detail)))
    return JSONResponse(failure.body(), failure.status_code, dict(error.headers or {}))


@app.exception_handler(Exception)
async def _tell_of_faults(http: HttpRequest, error: Exception) -> Response:
    log.error("%s failed in the ingress", http.url.path, exc_info=error)
    return JSONResponse(_INTERNAL.body(), 500)


# Last, since Serve takes a copy of the class as soon as it is there, with the names that exist by then.
@serve.ingress(app)
class Ingress:
    """Takes requests in for one or more engines."""

    def __init__(self, settings: ServeSettings, engine: Any, max_ongoing: int, max_in_flight: int) -> None:
        """`max_ongoing`: requests that an engine takes at a time. `max_in_flight`: requests under way here, past which
        the next is turned away unread."""
        self._settings, self._bounds = settings, settings.bounds
        model = resolve(settings.model)
        self._limits = read_limits(model, settings.served_names, settings.engine, settings.adapters)
        self._access, self._intake = Access(settings), Intake(settings, self._limits)
        self._max_ongoing, self._max_in_flight, self._num_in_flight = max_ongoing, max_in_flight, 0
        self._started = int(time.time())
        self._meters, self._traces = DoorMeters(), Traces()
        context = serve.get_replica_context()
        self._engine = RemoteEngine(engine, context.app_name)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._engine.keep_looking()), loop.create_task(self._prepare_compiler())]

    @app.post("/v1/completions")
    async def create_completion(self, http: HttpRequest) -> Response:
        return await self._answer(http, _COMPLETIONS)

    @app.post("/v1/chat/completions")
    async def create_chat_completion(self, http: HttpRequest) -> Response:
        return await self._answer(http, "/v1/chat/completions")

    @app.post(EXTERNAL_CHAT)
    async def create_external_chat_completion(self, http: HttpRequest) -> Response:
        return await self._answer(http, EXTERNAL_CHAT)

    @app.post(LEGACY)
    async def create_legacy_chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, LEGACY)

    @app.post(LEGACY_STREAM)
    async def stream_legacy_chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, LEGACY_STREAM)

    @app.get("/v1/models")
    async def list_models(self, http: HttpRequest) -> Response:
        if isinstance(caller := await self._access.identify(http), Failure):
            return self._tell(caller)
        names = (*self._limits.served_names, *self._limits.adapter_names)
        return JSONResponse({"object": "list", "data": [self._describe(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(self, http: HttpRequest, name: str) -> Response:
        if isinstance(caller := await self._access.identify(http), Failure):
            return self._tell(caller)
        if name not in (*self._limits.served_names, *self._limits.adapter_names):
            return self._tell(refuse("unknown_model", "model", f"found {show(name)}, which isn't served here", 404))
        return JSONResponse(self._describe(name))

    @app.post("/token")
    async def create_token(self, http: HttpRequest) -> Response:
        try:
            return await self._access.logins.answer(http)
        except ClientDisconnect:
            return self._tell(_GONE)

    @app.get("/health")
    async def health(self) -> Response:
        if await self._engine.ask() is None:
            return self._tell(NOT_READY)
        return JSONResponse({"status": "ok"})

    @app.get("/openapi.json")
    async def openapi(self) -> Response:
        described = document(self._settings.root, self._bounds.timeout_header, self._settings.is_guarded)
        return JSONResponse(described)

    async def describe(self) -> dict[str, Any]:
        """What a run that goes through this endpoint has to know; by a handle, and not over HTTP."""
        settings = self._settings
        named = ("model", "served_names", "adapters", "engine")
        return {name: getattr(settings, name) for name in named} | {"max_ongoing_requests": self._max_ongoing}

    async def _prepare_compiler(self) -> None:
        """The process that compiles grammars takes some seconds to start: after the engine, and before it is needed."""
        while not await self._engine.is_ready():
            await asyncio.sleep(1)
        self._intake.prepare_compiler()

    def __del__(self) -> None:
        # Also when what comes before it failed.
        if hasattr(self, "_traces"):
            self._traces.close()

    # --- one request ----------------------------------------------------------------------------------------------

    async def _answer(self, http: HttpRequest, endpoint: Endpoint) -> Response:
        """Whatever comes in, something goes out, and is counted once."""
        told = http.headers.get("x-request-id", "")
        visit = Visit(endpoint, told if _REQUEST_ID.fullmatch(told) else uuid.uuid4().hex, http.headers)
        if self._num_in_flight >= self._max_in_flight:
            full = self._tell_of(visit, FULL)
            self._count(visit)
            return full
        self._num_in_flight += 1
        self._meters.in_flight.set(self._num_in_flight)
        response: Response | None = None
        try:
            response = await self._respond(http, endpoint, visit)
        except Refused as refused:
            response = self._tell_of(visit, refused.failure)
        except ClientDisconnect:
            response = self._tell_of(visit, _GONE)
        except Exception:
            log.exception("%s failed in the ingress", visit.id)
            response = self._tell_of(visit, _INTERNAL)
        finally:
            if not isinstance(response, EventStream):
                self._finish(visit)
        return response

    async def _respond(self, http: HttpRequest, endpoint: Endpoint, visit: Visit) -> Response:
        """The whole way of a request: who, whether, what; then to an engine, and its answer back. Raises Refused."""
        caller = await self._access.identify(http)
        if isinstance(caller, Failure):
            raise Refused(caller)
        visit.role = caller.role
        taken = await self._intake.take(http, endpoint, visit.id, caller)
        visit.is_stream, visit.headers = taken.is_stream, taken.headers
        events = self._engine.generate(
            taken.request, lane="online", priority=taken.priority, deadline=taken.deadline, affinity=taken.affinity
        )
        stream = None
        try:
            first = await anext(events)
            if isinstance(first, Chunk | Streamed):
                stream = EventStream(self._stream(visit, first, events), lambda: self._end(visit, events))
                stream.headers.update(visit.headers)
                return stream
            return self._tell_of(visit, first.failure) if isinstance(first, Failed) else self._send(visit, first)
        finally:
            if stream is None:
                await events.aclose()

    # --- answers --------------------------------------------------------------------------------------------------

    def _send(self, visit: Visit, answered: Answered) -> Response:
        try:
            text = to_json(answered.body)
        except ValueError:
            # What the batch door does with a number that is none.
            return self._tell_of(visit, Failure(500, "not_json", "the engine's answer holds a number that is none"))
        visit.answered(answered.timing, answered.usage)
        return Response(text, media_type="application/json", headers=visit.headers)

    async def _stream(
        self, visit: Visit, event: Event, events: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[str, None]:
        """Server-sent events: chunks, then perhaps an error, then the end; comments while nothing comes."""
        came = time.monotonic()
        self._meters.first_token.observe(came - visit.arrived)
        coming: asyncio.Future[Event] | None = None
        try:
            while isinstance(event, Chunk):
                yield f"data: {event.data}\n\n"
                coming = asyncio.ensure_future(anext(events))
                while not (await asyncio.wait({coming}, timeout=KEEP_ALIVE_S))[0]:
                    yield ": keep-alive\n\n"
                event = coming.result()
                now = time.monotonic()
                self._meters.inter_token.observe(now - came)
                came = now
            match event:
                case Failed(failure):
                    visit.end = failure
                    yield f"data: {to_json(failure.body())}\n\n"
                case Streamed():
                    visit.answered(event.timing, event.usage)
            if visit.route != LEGACY_STREAM:
                # That API's streams just end.
                yield _DONE
        finally:
            if coming is not None and not coming.done():
                coming.cancel()
                await asyncio.wait({coming})

    async def _end(self, visit: Visit, events: AsyncGenerator[Event, None]) -> None:
        await events.aclose()
        self._finish(visit)

    def _finish(self, visit: Visit) -> None:
        self._num_in_flight -= 1
        self._meters.in_flight.set(self._num_in_flight)
        self._count(visit)

    def _count(self, visit: Visit) -> None:
        """What came of a request, for whoever watches: metrics, a line of the log, a span. Nothing of what it said."""
        end, total_s = visit.end, time.monotonic() - visit.arrived
        told = {
            "route": visit.route,
            "status": str(end.status_code if end is not None else 200),
            "reason": end.reason if end is not None else "",
            "role": visit.role,
            "stream": str(visit.is_stream).lower(),
        }
        self._meters.total.observe(total_s)
        self._meters.requests.inc(1, told)
        self._meters.tokens.count(visit.usage)
        tokens = {name: visit.usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
        times = asdict(visit.timing) if visit.timing is not None else {}
        log.info("request", extra={"request_id": visit.id, **told, **tokens, **times, "total_ms": total_s * 1000})
        who: dict[str, str | bool] = {
            "overnight.request_id": visit.id,
            "overnight.role": visit.role,
            "overnight.stream": visit.is_stream,
        }
        became = end if end is not None else visit.timing or Timing(None, None, total_s * 1000)
        self._traces.record(visit.route, became, visit.began, visit.usage, who, visit.asked_with)

    def _tell_of(self, visit: Visit, failure: Failure) -> Response:
        visit.end = failure
        return self._tell(failure)

    def _tell(self, failure: Failure) -> Response:
        headers = headers_of(failure)
        if failure.status_code == 503:
            headers["Retry-After"] = str(self._bounds.retry_after_s)
        return JSONResponse(failure.body(), failure.status_code, headers)

    def _describe(self, name: str) -> dict[str, Any]:
        own = self._limits.served_names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "overnight",
            "root": own,
            "parent": own if name in self._limits.adapter_names else None,
            "max_model_len": self._limits.context_length,
        }
