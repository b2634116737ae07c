"""vLLM's serving handlers, with what they lack put in: admission before the engine, and a beam search that honours
the request. Bodies, log-probabilities, tool calls and usage stay vLLM's. Imported once an engine starts."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.entrypoints.generate.base.serving import build_per_request_timing_metrics
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from pipelines import beam_rows
from pipelines.adapters import Adapter
from pipelines.admission import Admission
from pipelines.beam import Hypothesis
from pipelines.constraints import strict, tool_parser
from pipelines.pacing import Targets
from pipelines.scheduler import rank, to_arguments
from pipelines.translation import GivenUp
from pipelines.waiting import Ask, Place
from schemas.dialects import EngineEndpoint
from schemas.limits import ModelLimits
from schemas.requests import Lane, RunShare


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way through vLLM's handlers: what they don't pass on, and what they don't give back."""

    lane: Lane
    priority: int
    request: Any
    share: RunShare
    # Longest wait for room of its prompts, in seconds.
    waited_s: float = 0.0
    # By prompt: what a beam search found, and how many tokens it took.
    found: dict[int, list[Hypothesis]] = field(default_factory=dict)
    search_tokens: int = 0
    num_searches: int = 0
    # Of a stream that came to its end: its usage, and vLLM's times where they are those of one sequence.
    usage: Any = None
    metrics: Any = None


# The request that the running task works on.
CALL: ContextVar[Call] = ContextVar("call")


class Steps(StatLoggerBase):  # type: ignore[misc]  # vLLM's classes have no types here
    """What the engine says after each step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        # Of the KV cache, in use.
        self.kv_share = 0.0
        # Sequences in the engine that the last step left out.
        self.num_left_out = 0

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.kv_share = scheduler_stats.kv_cache_usage
            self.num_left_out = scheduler_stats.num_skipped_waiting_reqs

    def log_engine_initialized(self) -> None:
        pass


class AdmittedLLM(AsyncLLM):  # type: ignore[misc]  # vLLM's classes have no types here
    """vLLM's engine client, entered through an admission."""

    admission: Admission
    steps: Steps
    # Whether batch requests give way to people.
    paced: bool
    # Answers' tokens that were computed for nothing, since their requests were set aside.
    lost_tokens: int = 0

    def __del__(self) -> None:
        """Nothing. Whoever started it shuts it down; vLLM's own finalizer does so again at exit, when the modules that
        it needs are gone."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **others: Any
    ) -> AsyncGenerator[Any, None]:
        call = CALL.get()
        others["priority"] = rank(call.lane, call.priority)
        kind = _kind(sampling_params.logprob_token_ids, sampling_params.logprobs)
        lora = others.get("lora_request")
        if call.lane == "batch" and self.paced:
            yield await self._compute(call, prompt, sampling_params, request_id, kind, others)
            return
        async with self.room(call, prompt, sampling_params, sampling_params.n, kind, lora) as place:
            output = None
            async with aclosing(super().generate(prompt, sampling_params, request_id, **others)) as outputs:
                async for output in outputs:
                    yield output
            for choice in output.outputs if output is not None else ():
                place.observe(len(choice.token_ids))

    async def _compute(
        self, call: Call, prompt: Any, params: SamplingParams, request_id: str, kind: str | None, others: dict[str, Any]
    ) -> Any:
        """The last output of a batch request, which may be set aside any number of times before. It doesn't stream:
        nobody has seen anything of an answer that is given up and begun anew."""
        again: Place | None = None
        for attempt in itertools.count():
            name = f"{request_id}-{attempt}" if attempt else request_id
            async with self.room(
                call, prompt, params, params.n, kind, others.get("lora_request"), can_leave=True, again=again
            ) as place:
                async with aclosing(super().generate(prompt, params, name, **others)) as outputs:
                    output, num_lost = await _last(outputs, place.set_aside, partial(self._num_done, name))
                if output is not None:
                    for choice in output.outputs:
                        place.observe(len(choice.token_ids))
                    return output
            self.lost_tokens += num_lost
            again = place

    def _states(self, request_id: str) -> list[Any]:
        """vLLM's states of a request's choices, for as long as they are in the engine."""
        processor = self.output_processor
        names = processor.external_req_ids.get(request_id, ())
        return [state for name in names if (state := processor.request_states.get(name)) is not None]

    def _num_done(self, request_id: str) -> int:
        """Tokens that are computed of a request's answers."""
        return sum(state.detokenizer.num_output_tokens() for state in self._states(request_id) if state.detokenizer)

    def sequence(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **others: Any
    ) -> AsyncGenerator[Any, None]:
        """One sequence of a request that has its room already."""
        made = super().generate(prompt, sampling_params, request_id, **others)
        return made  # type: ignore[no-any-return]  # vLLM's classes have no types here

    @asynccontextmanager
    async def room(
        self,
        call: Call,
        prompt: Any,
        params: SamplingParams,
        num_sequences: int,
        kind: str | None,
        lora_request: Any,
        can_leave: bool = False,
        again: Place | None = None,
    ) -> AsyncIterator[Place]:
        """Wait for room for one prompt's answers, and hold it."""
        ask = Ask(
            call.lane,
            call.priority - call.share.urgency,
            num_sequences,
            prompt.get("prompt_token_ids") or (),
            params.max_tokens or 0,
            kind,
            # An adapter's KV cache is its own.
            salt=f"{lora_request.lora_name if lora_request else ''}\0{prompt.get('cache_salt') or ''}",
            run=call.share.run,
            due=call.share.due,
        )
        asked = monotonic()
        async with self.admission.room(ask, can_leave, again) as place:
            call.waited_s = max(call.waited_s, monotonic() - asked)
            yield place


async def _last(
    outputs: AsyncGenerator[Any, None], set_aside: asyncio.Event, count: Callable[[], int]
) -> tuple[Any, int]:
    """The last of a request's outputs; None where it was set aside before, and has left the engine, and what had been
    counted until then."""

    async def read() -> Any:
        output = None
        async for latest in outputs:
            output = latest
        return output

    reading, leaving = asyncio.ensure_future(read()), asyncio.ensure_future(set_aside.wait())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return (reading.result(), 0) if reading.done() else (None, count())
    finally:
        leaving.cancel()
        # vLLM takes a request out of the engine when whoever waits for it goes away.
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _kind(logprob_token_ids: Any, num_logprobs: int | None) -> str | None:
    """Log-probabilities of given tokens or of the likeliest: vLLM computes one of the two for all of a step, and the
    other kind's would be lost."""
    return "ids" if logprob_token_ids else None if num_logprobs is None else "top"


class _Beams:
    """Takes the place of vLLM's own beam search in a handler."""

    def beam_search(
        self, prompt: Any, request_id: str, params: Any, lora_request: Any = None, **others: Any
    ) -> AsyncGenerator[Any, None]:
        call = CALL.get()
        index, call.num_searches = call.num_searches, call.num_searches + 1
        return self._search(call, index, prompt, params, lora_request)

    async def _search(
        self, call: Call, index: int, prompt: Any, params: Any, lora_request: Any
    ) -> AsyncGenerator[Any, None]:
        llm: AdmittedLLM = self.engine_client  # type: ignore[attr-defined]  # vLLM's handler comes after this class
        tokenizer = llm.renderer.get_tokenizer()
        wanted = call.request.model_copy(update={"n": 1, "use_beam_search": False, "temperature": 0.0})
        sampling = wanted.to_sampling_params(params.max_tokens, {})
        sampling.update_from_generation_config(llm.input_processor.generation_config_fields, tokenizer.eos_token_id)
        sampling.update_from_tokenizer(tokenizer)

        place_in_line = rank(call.lane, call.priority)

        def start(sequence: Any, of: SamplingParams, request_id: str) -> AsyncGenerator[Any, None]:
            return llm.sequence(sequence, of, request_id, priority=place_in_line, lora_request=lora_request)

        task = beam_rows.SearchTask(
            prompt, sampling, params.beam_width, params.length_penalty, tokenizer, llm.model_config.max_logprobs, start
        )
        kind = _kind(sampling.allowed_token_ids, 0)
        async with llm.room(call, prompt, sampling, params.beam_width, kind, lora_request) as place:
            searched = await beam_rows.run(task)
            for hypothesis in searched.hypotheses:
                place.observe(len(hypothesis.beam.tokens))
        call.found[index] = searched.hypotheses
        call.search_tokens += searched.num_tokens
        yield searched.output


class _Raising:
    """vLLM's streams tell an error as one more chunk; these raise it, so that it is told in one place."""

    def create_streaming_error_response(self, error: Exception, *_: Any, **__: Any) -> str:
        raise error

    def _convert_generation_error_to_streaming_response(self, error: Exception) -> str:
        raise error

    def _raise_if_error(self, finish_reason: str | None, request_id: str) -> None:
        if finish_reason == "abort":
            raise GivenUp
        super()._raise_if_error(finish_reason, request_id)  # type: ignore[misc]  # vLLM's handler comes after this class


class Completions(_Beams, _Raising, OpenAIServingCompletion):  # type: ignore[misc]  # vLLM's classes have no types here
    """vLLM's completion handler, with our beam search."""

    async def completion_stream_generator(
        self, request: Any, engine_inputs: Any, outputs: Any, *others: Any, request_metadata: Any, **more: Any
    ) -> AsyncGenerator[str, None]:
        call, last = CALL.get(), None

        async def noted() -> AsyncGenerator[Any, None]:
            nonlocal last
            async with aclosing(outputs):
                async for index, last in outputs:
                    if request.max_tokens == 0:
                        for choice in last.outputs:
                            choice.token_ids = []
                    yield index, last

        parts = super().completion_stream_generator(
            request, engine_inputs, noted(), *others, request_metadata=request_metadata, **more
        )
        async with aclosing(parts):
            async for part in parts:
                yield part
        call.usage = request_metadata.final_usage_info
        if last is not None and len(engine_inputs) == 1 and request.n == 1:
            call.metrics = build_per_request_timing_metrics(last.metrics, call.usage.completion_tokens)

    def request_output_to_completion_response(self, outputs: Any, request: Any, *others: Any) -> Any:
        if request.max_tokens == 0:
            # The engine can't but generate a token; nobody asked for it.
            for choice in (choice for output in outputs for choice in output.outputs):
                choice.token_ids = []
        return super().request_output_to_completion_response(outputs, request, *others)


class Chats(_Beams, _Raising, OpenAIServingChat):  # type: ignore[misc]  # vLLM's classes have no types here
    """vLLM's chat handler, with our beam search."""

    async def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *others: Any, **more: Any
    ) -> AsyncGenerator[str, None]:
        call, last = CALL.get(), None
        # The last of the others is what the usage is told to.
        request_metadata = others[-1]

        async def noted() -> AsyncGenerator[Any, None]:
            nonlocal last
            async with aclosing(result_generator):
                async for last in result_generator:
                    yield last

        parts = super().chat_completion_stream_generator(request, noted(), *others, **more)
        async with aclosing(parts):
            async for part in parts:
                yield part
        call.usage = request_metadata.final_usage_info
        if last is not None and (request.n or 1) == 1:
            call.metrics = build_per_request_timing_metrics(last.metrics, call.usage.completion_tokens)


def load(
    model_path: str,
    limits: ModelLimits,
    arguments: dict[str, Any],
    batch_share: float,
    targets: Targets | None,
) -> AdmittedLLM:
    """Start vLLM's engine process and wait until the model is loaded. To be called on the loop that it will live on.

    `targets`: what people are to have, and batch requests give way for; None: they don't.
    """
    made: list[Steps] = []

    def make_logger(vllm_config: Any, engine_index: int = 0) -> Steps:
        made.append(Steps(vllm_config, engine_index))
        return made[-1]

    llm: AdmittedLLM = AdmittedLLM.from_engine_args(
        AsyncEngineArgs(
            model=model_path,
            served_model_name=list(limits.served_names),
            max_logprobs=limits.engine_logprobs,
            enable_prompt_embeds="prompt_embeds" in limits.allowed,
            # Of several, vLLM takes the one that the first request needs, for all that follow.
            structured_outputs_config={"backend": "xgrammar", "reasoning_parser": limits.reasoning_parser or ""},
            enable_prefix_caching=True,
            scheduling_policy="priority",
            enable_log_requests=False,
            **({} if targets is None else to_arguments(targets)),
            **arguments,
        ),
        stat_loggers=[make_logger],
    )
    cache, scheduler = llm.vllm_config.cache_config, llm.vllm_config.scheduler_config
    # A few wait in the engine itself, so that a slot that falls free is taken by the next step.
    num_ahead = max(1, scheduler.max_num_seqs // 16) if batch_share == 1 and targets is None else 0
    llm.admission = Admission(
        scheduler.max_num_seqs + num_ahead,
        cache.num_gpu_blocks * cache.block_size,
        cache.block_size,
        batch_share,
        gives_way=targets is not None,
    )
    llm.paced = targets is not None
    llm.steps = made[0]
    return llm


async def serve_models(
    llm: AdmittedLLM, model_path: str, limits: ModelLimits, adapters: Mapping[str, Adapter]
) -> OpenAIServingModels:
    """The names that requests may ask for, with the adapters loaded. Raises ValueError where one doesn't load."""
    models = OpenAIServingModels(
        llm,
        [BaseModelPath(name=name, model_path=model_path) for name in limits.served_names],
        lora_modules=[LoRAModulePath(name=name, path=adapter.path) for name, adapter in adapters.items()],
    )
    try:
        await models.init_static_loras()
    except ValueError as error:
        failed = next(name for name in adapters if name not in models.lora_requests)
        raise ValueError(f"the adapter {failed} can't be loaded: {error}") from error
    return models


def make_handlers(
    llm: AdmittedLLM, models: OpenAIServingModels, limits: ModelLimits
) -> dict[EngineEndpoint, tuple[Any, Any]]:
    """By endpoint: the class of vLLM's request, and what answers one."""
    # The model's own template; one that a request brings only where the operator allows it.
    template: dict[str, Any] = {
        "chat_template": None,
        "chat_template_content_format": "auto",
        "trust_request_chat_template": "chat_template" in limits.allowed,
        # Without it vLLM has no parser at all; the rules refuse a free choice where no way of its own is known.
        "enable_auto_tools": True,
        "tool_parser": tool_parser(limits.tool_parser),
        "reasoning_parser": limits.reasoning_parser or "",
    }
    renderer = OnlineRenderer(llm.model_config, llm.renderer, request_logger=None, **template)
    renderer.parser = strict(renderer.parser)
    shared: dict[str, Any] = {
        "online_renderer": renderer,
        "request_logger": None,
        "enable_prompt_tokens_details": True,
        "enable_per_request_metrics": True,
    }
    made: dict[EngineEndpoint, tuple[Any, Any]] = {
        "/v1/completions": (CompletionRequest, Completions(llm, models, **shared).create_completion),
        "/v1/chat/completions": (
            ChatCompletionRequest,
            Chats(llm, models, "assistant", **shared, **template).create_chat_completion,
        ),
    }
    # vLLM keeps this frame, and what it holds would outlive the engine.
    del llm, models, shared, renderer
    return made
