"""vLLM as an engine, in this process. vLLM is imported once an engine starts, and not before.

`generate` is what batch and the online door call. vLLM's own serving handlers do the work (`pipelines/handlers.py`), so
bodies, log-probabilities and usage are vLLM's. The engine lives on an event-loop thread of its own: callers may be
threads (`submit`) or coroutines of that loop (`generate`). vLLM's errors are told by `pipelines/translation.py`.
"""

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import jiter

from pipelines import logs, machine, orphans
from pipelines.adapters import Adapter, lora_arguments, resolve_adapters
from pipelines.engine import LATE, Engine, EngineState
from pipelines.limits import read_limits
from pipelines.model import Model, resolve
from pipelines.pacing import Targets
from pipelines.translation import translate, translate_response
from schemas.dialects import EngineEndpoint, engine_endpoint, in_words_of, to_engine
from schemas.failures import EngineUnusable, Failure, NotBegun
from schemas.limits import ModelLimits
from schemas.replies import Reply, reply_to, to_json
from schemas.requests import Answered, Chunk, Event, Failed, Lane, Request, RunShare, Streamed, Timing
from schemas.settings import EngineSettings

log = logging.getLogger("overnight.engine")
T = TypeVar("T")

# An idle engine needs about 10 s on a slow machine to end by itself; after this it is killed.
_SHUTDOWN_S = 20
# An engine that doesn't answer for so long won't any more; a step takes less, however much is in it.
_ANSWER_S = 60
# What vLLM ends its streams with.
_DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class EngineStart:
    """How to start an engine, on whichever machine it is called: picklable, and light until then."""

    model: str | None
    served_names: tuple[str, ...]
    settings: EngineSettings
    num_replicas: int
    num_cores: int | None
    # Folders of adapters, by name.
    adapters: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> Engine:
        """Bring the model to this machine, load it and wait until it can answer. Raises EngineUnusable."""
        model = resolve(self.model)
        return VllmEngine.start(
            model,
            self.served_names,
            self.settings,
            adapters=resolve_adapters(self.adapters, model),
            num_replicas=self.num_replicas,
            num_cores=self.num_cores,
        )


class VllmEngine:
    """vLLM's AsyncLLM and its completion and chat handlers. Made with `start`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        claim: machine.CoreClaim | None,
        limits: ModelLimits,
    ) -> None:
        self.loop = loop
        self._thread = thread
        self._claim = claim
        # How its processes are started, and with which environment.
        self._start: Callable[[], Coroutine[Any, Any, None]]
        self._environment: Mapping[str, str]
        # What its requests are judged by.
        self.limits = limits
        self._llm: Any = None
        # By endpoint: the class of vLLM's request, and what answers one.
        self._handlers: dict[EngineEndpoint, tuple[Any, Any]] = {}

    @classmethod
    def start(
        cls,
        model: Model,
        served_names: tuple[str, ...],
        settings: EngineSettings,
        *,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        num_replicas: int = 1,
        num_cores: int | None = None,
    ) -> "VllmEngine":
        """Load a model and wait until it can answer.

        `adapters`: by the name under which they answer. `num_replicas`: how many engines share this machine's memory.
        `num_cores`: the CPU cores to take of it.
        Raises EngineUnusable with vLLM's reason when it doesn't start.
        """
        from vllm.platforms import current_platform

        limits = read_limits(model, served_names, settings, adapters)
        claim, num_parts = None, settings.tensor_parallel_size or 1
        # The model is here by now; nothing may wait for a hub that can't be reached.
        environment = {"HF_HUB_OFFLINE": "1", orphans.STARTER: str(os.getpid())}
        if current_platform.is_cpu():
            cores = settings.cores or min(num_cores or machine.count_cores(), machine.count_cores())
            claim = machine.CoreClaim(cores, num_parts)
            choices = machine.cpu_arguments(settings, num_replicas, limits)
            variables = machine.cpu_environment(claim.cores, num_parts)
        else:
            choices, variables = machine.gpu_arguments(settings, limits), []
        environment |= {choice.name: choice.value for choice in variables}
        logs.show_if_asked()
        for choice in (*choices, *variables):
            log.info("%s=%s: %s", choice.name, choice.value, choice.reason)
        arguments = {choice.name: choice.value for choice in choices}
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="engine", daemon=True)
        engine = cls(loop, thread, claim, limits)
        thread.start()
        try:
            engine._start = partial(engine._load, model, adapters, settings, arguments)
            engine._environment = environment
            engine._start_processes()
        except BaseException as error:
            engine.close()
            if isinstance(error, EngineUnusable) or not isinstance(error, Exception):
                raise
            raise EngineUnusable(f"the engine didn't start: {_one_line(error)}") from error
        return engine

    def drain(self) -> None:
        def close_admission() -> None:
            if self._llm is not None:
                self._llm.admission.close()

        self.loop.call_soon_threadsafe(close_admission)

    def press(self, urgency: int) -> None:
        """Nothing: whose it is has it alone."""

    def restart(self) -> None:
        try:
            self._run(self._stop_processes())
            self._start_processes()
        except Exception as error:
            raise EngineUnusable(f"the engine died, and didn't start again: {_one_line(error)}") from error

    def _start_processes(self) -> None:
        with machine.environment(self._environment):
            self._run(self._start())

    async def _load(
        self, model: Model, adapters: Mapping[str, Adapter], settings: EngineSettings, arguments: dict[str, Any]
    ) -> None:
        from pipelines import handlers

        limits = self.limits
        self._llm = handlers.load(
            model.path,
            limits,
            {
                **arguments,
                **lora_arguments(adapters),
                "max_model_len": settings.max_model_len,
                "tensor_parallel_size": settings.tensor_parallel_size or 1,
                "seed": settings.seed,
            },
            settings.batch_share,
            _targets(settings),
        )
        _assert_limits(limits, self._llm.model_config)
        models = await handlers.serve_models(self._llm, model.path, limits, adapters)
        self._handlers = handlers.make_handlers(self._llm, models, limits)

    async def generate(
        self, request: Request, *, lane: Lane, priority: int | None = None, deadline: float | None = None
    ) -> AsyncIterator[Event]:
        said = jiter.from_json(request.body.encode())
        body = to_engine(said, request.endpoint, self.limits)
        answer = self._stream if body.get("stream") else self._answer
        async with contextlib.aclosing(answer(request, body, lane, priority, deadline)) as events:
            async for event in events:
                match event:
                    case Failed(failure):
                        yield Failed(in_words_of(failure, said, request.endpoint))
                    case _:
                        yield event

    async def _answer(
        self, request: Request, body: dict[str, Any], lane: Lane, priority: int | None, deadline: float | None
    ) -> AsyncGenerator[Event, None]:
        # The handler turns a cancelled await into a client's mistake, so a deadline is kept outside of it.
        until = _until(request, body, deadline)
        task = asyncio.ensure_future(self._complete(request, body, lane, priority))
        try:
            timeout = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
            done, _ = await asyncio.wait({task}, timeout=timeout)
        except asyncio.CancelledError:
            await _cancel(task)
            raise
        if done:
            yield task.result()
            return
        await _cancel(task)
        yield Failed(LATE)

    async def _stream(
        self, request: Request, body: dict[str, Any], lane: Lane, priority: int | None, deadline: float | None
    ) -> AsyncGenerator[Event, None]:
        started, first_ms = time.monotonic(), None
        until = _until(request, body, deadline)
        prepared, reply = None, reply_to(request.endpoint)
        try:
            async with asyncio.timeout_at(until):
                prepared = await self._prepare(request, body, lane, priority)
            async with contextlib.aclosing(prepared.result) as parts:
                while True:
                    # The time limit is not in force while whoever reads has the word.
                    async with asyncio.timeout_at(until):
                        part = await anext(parts, None)
                    if part is None:
                        break
                    if part == _DONE:
                        continue
                    first_ms = first_ms or (time.monotonic() - started) * 1000
                    if (data := _told(part, reply)) is not None:
                        yield Chunk(data)
        except TimeoutError:
            yield Failed(LATE)
        except _Refused as refused:
            yield Failed(refused.failure)
        except (asyncio.CancelledError, GeneratorExit, EngineUnusable, NotBegun):
            raise
        except BaseException as error:  # a panic of a Rust library is one
            yield Failed(self._failure_of(request, error))
        else:
            call = prepared.call
            timing = _timing(call.metrics, call.waited_s * 1000, (time.monotonic() - started) * 1000)
            timing = replace(timing, first_token_ms=first_ms)
            for event in reply.last(timing):
                yield Chunk(to_json(event))
            yield Streamed(call.usage.model_dump(mode="json", exclude_none=True), timing)

    def submit(self, request: Request, *, lane: Lane) -> "concurrent.futures.Future[Answered | Failed]":
        return asyncio.run_coroutine_threadsafe(self._last_event(request, lane), self.loop)

    async def _last_event(self, request: Request, lane: Lane) -> Answered | Failed:
        *_, last = [event async for event in self.generate(request, lane=lane)]
        assert isinstance(last, Answered | Failed), "a batch request doesn't stream"
        return last

    async def _complete(
        self, request: Request, body: dict[str, Any], lane: Lane, priority: int | None
    ) -> Answered | Failed:
        started = time.monotonic()
        try:
            prepared = await self._prepare(request, body, lane, priority)
        except _Refused as refused:
            return Failed(refused.failure)
        except (asyncio.CancelledError, EngineUnusable, NotBegun):
            raise
        except BaseException as error:  # a panic of a Rust library is one
            return Failed(self._failure_of(request, error))
        call, result, uses_beams = prepared.call, prepared.result, prepared.uses_beams
        metrics, result.metrics = result.metrics, None
        timing = _timing(metrics, call.waited_s * 1000, (time.monotonic() - started) * 1000)
        answer = result.model_dump(mode="json")
        answer.pop("metrics", None)
        if uses_beams:
            found = [hypothesis for index in sorted(call.found) for hypothesis in call.found[index]]
            for choice, hypothesis in zip(answer["choices"], found, strict=True):
                choice |= {"cumulative_logprob": hypothesis.beam.cumulative, "score": hypothesis.score}
            answer["usage"]["search_tokens"] = call.search_tokens
        told = reply_to(request.endpoint).answer(answer, timing)
        return Answered(told, timing, None if "usage" in told else answer)

    async def _prepare(self, request: Request, body: dict[str, Any], lane: Lane, priority: int | None) -> "_Prepared":
        """Hand a request to vLLM's handler. Raises _Refused with what it refuses, and whatever it raises."""
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        from pipelines.handlers import CALL, Call

        if not self._handlers:
            raise EngineUnusable("the engine is not up")
        request_class, handle = self._handlers[engine_endpoint(request.endpoint)]
        # vLLM keys its own state by this id; a caller may repeat his.
        body["request_id"] = f"{body.get('request_id') or request.id}-{uuid.uuid4().hex[:12]}"
        # vLLM's models refuse beside beams what our search honours; the contract's rules have had their say.
        uses_beams = body.pop("use_beam_search", False)
        asked = request_class.model_validate(body).model_copy(update={"use_beam_search": uses_beams})
        call = Call(lane, asked.priority if priority is None else priority, asked, request.share or RunShare(""))
        CALL.set(call)
        result = await handle(asked)
        if isinstance(result, ErrorResponse):
            raise _Refused(self._translated(translate_response(result)))
        return _Prepared(call, result, uses_beams)

    def _failure_of(self, request: Request, error: BaseException) -> Failure:
        """What an exception says of a request; raises EngineUnusable where it says it of the engine."""
        failure = self._translated(translate(error))
        if failure.reason == "engine_error":
            log.warning("%s failed in the engine", request.id, exc_info=error)
        return failure

    @property
    def state(self) -> EngineState:
        llm = self._llm
        if llm is None:
            return EngineState()
        admission = llm.admission
        return EngineState(
            admission.num_running,
            admission.num_waiting,
            llm.steps.kv_share,
            admission.num_batch,
            admission.batch_budget,
            llm.steps.num_left_out,
            admission.num_set_aside,
            llm.lost_tokens,
        )

    async def ask(self) -> EngineState:
        self._raise_if_dead()
        try:
            # A question that the engine's own process answers, between two of its steps.
            async with asyncio.timeout(_ANSWER_S):
                await self._llm.is_sleeping()
        except TimeoutError:
            raise EngineUnusable(f"the engine's process hasn't answered for {_ANSWER_S} s") from None
        except Exception as error:
            raise EngineUnusable(f"the engine's process doesn't answer: {_one_line(error)}") from error
        return self.state

    def _translated(self, told: Failure | EngineUnusable) -> Failure:
        """A failure of the request; raises EngineUnusable where it is the engine's, also by the state that it is in."""
        if isinstance(told, EngineUnusable):
            raise told
        self._raise_if_dead()
        return told

    def _raise_if_dead(self) -> None:
        if self._llm is None or self._llm.errored:
            raise EngineUnusable("the engine's process has died")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._shut_down())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()
            # vLLM's finalizers need modules that are gone when the interpreter ends: run them now.
            gc.collect()
        if self._claim is not None:
            self._claim.release()

    async def _shut_down(self) -> None:
        await self._stop_processes()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _stop_processes(self) -> None:
        llm, self._llm, self._handlers = self._llm, None, {}
        if llm is not None:
            llm.shutdown(_SHUTDOWN_S)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What vLLM's handler made of a request: an answer, or a generator of server-sent events."""

    call: Any
    result: Any
    uses_beams: bool


class _Refused(Exception):
    """vLLM's handler refused a request."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _targets(settings: EngineSettings) -> Targets | None:
    """What people are to have; None where nothing is said of it."""
    if settings.first_token_ms is None and settings.inter_token_ms is None:
        return None
    first, between = settings.first_token_ms or math.inf, settings.inter_token_ms or math.inf
    return Targets(first / 1000, between / 1000)


def _until(request: Request, body: Mapping[str, Any], deadline: float | None) -> float | None:
    """When to give a request up, by the running loop's clock."""
    seconds = [] if deadline is None else [deadline - time.time()]
    # A chat's field: a completion may hold anything under its name.
    own = body.get("timeout_sec") if engine_endpoint(request.endpoint) == "/v1/chat/completions" else None
    seconds += [] if own is None else [own]
    return asyncio.get_running_loop().time() + min(seconds) if seconds else None


def _told(event: str, reply: Reply) -> str | None:
    """The JSON of a server-sent event of vLLM's as it goes out: without its times, which ride on the last one, and in
    the words of the API that was asked. None: nothing goes out for it."""
    data = event.removeprefix("data: ").rstrip("\n")
    has_metrics, is_concerned = '"metrics":' in data, reply.concerns(data)
    if not has_metrics and not is_concerned:
        return data
    value = jiter.from_json(data.encode())
    value.pop("metrics", None)
    told = reply.chunk(value) if is_concerned else value
    return None if told is None else to_json(told)


def _assert_limits(limits: ModelLimits, model_config: Any) -> None:
    """Requests were judged by what the model's folder says; the engine must mean the same."""
    if model_config.max_model_len != limits.context_length:
        raise EngineUnusable(
            f"requests were checked against a context of {limits.context_length:,} tokens, and the engine has "
            f"{model_config.max_model_len:,}. Give --engine max_model_len={model_config.max_model_len}"
        )
    if model_config.get_vocab_size() != limits.vocab_size:
        raise EngineUnusable(
            f"requests were checked against a vocabulary of {limits.vocab_size:,} tokens, and the engine has "
            f"{model_config.get_vocab_size():,}. Is the model's config.json its own?"
        )


def _timing(metrics: Any, waited_ms: float, total_ms: float) -> Timing:
    """vLLM's times of a request begin when it enters the engine, and its first token's when it is scheduled."""
    queue_ms = metrics and metrics.queue_time_ms
    if queue_ms is None:
        return Timing(None, None, total_ms)
    first_ms = metrics.time_to_first_token_ms
    return Timing(
        waited_ms + queue_ms, None if first_ms is None else min(total_ms, waited_ms + queue_ms + first_ms), total_ms
    )


async def _cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
