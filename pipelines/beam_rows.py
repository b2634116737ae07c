"""Beam search on vLLM: its sequences give the next-token log-probabilities that `pipelines/beam.py` searches in.

A sequence isn't a request of one token, as in vLLM's own beam search, which computes what doesn't fill a block of the
cache again at every step. It goes on by itself along its likeliest token and tells what it sees; the beam that takes
that token follows it at the cost of one token. Only a beam that takes another token needs a sequence of its own, and
a sequence that no beam follows is aborted. Ending tokens are masked in it (not in what it tells), so that it goes on.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from pipelines.beam import Beam, BeamRules, Hypothesis, Logprobs, search
from pipelines.translation import GivenUp

T = TypeVar("T")

# Penalties look at all of an answer's tokens, so that a sequence must tell more log-probabilities the longer it is.
PENALISED_AHEAD = 16


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search came to: vLLM's output, the scores of its choices, and what it cost."""

    output: RequestOutput
    hypotheses: list[Hypothesis]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SearchTask:
    """One prompt's search. `start`: starts a sequence in the engine, of a prompt, parameters and an id."""

    prompt: Any
    params: SamplingParams
    width: int
    length_penalty: float
    tokenizer: Any
    # Most log-probabilities that the engine tells: all of a vocabulary that is smaller than what is asked for.
    max_logprobs: int
    start: Callable[[Any, SamplingParams, str], AsyncGenerator[RequestOutput, None]]


async def run(task: SearchTask) -> Searched:
    """Search, and give the answers as vLLM gives those of sampling."""
    rules, params = make_rules(task), task.params
    rows = _Rows(task, rules)
    try:
        prompt_logprobs = await rows.score_prompt() if params.prompt_logprobs is not None else None
        hypotheses = await search(rules, rows)
    finally:
        await rows.close()
    outputs = [_to_output(index, found, task) for index, found in enumerate(hypotheses)]
    output = RequestOutput(
        request_id="",
        prompt=task.prompt.get("prompt"),
        prompt_token_ids=list(task.prompt["prompt_token_ids"]),
        prompt_logprobs=prompt_logprobs,
        outputs=outputs,
        finished=True,
        num_cached_tokens=rows.num_cached_tokens,
    )
    return Searched(output, hypotheses, rows.num_tokens)


def make_rules(task: SearchTask) -> BeamRules:
    """What the search keeps to, of vLLM's parameters; they know the model's ending tokens and its bad words."""
    params = task.params
    end_tokens = {*params.stop_token_ids, *([] if params.eos_token_id is None else [params.eos_token_id])}
    return BeamRules(
        width=task.width,
        max_tokens=params.max_tokens,
        prompt_length=len(task.prompt["prompt_token_ids"]),
        end_token_ids=frozenset(end_tokens),
        min_tokens=params.min_tokens,
        length_penalty=task.length_penalty,
        find_stop=_make_stop_finder(task) if params.stop else None,
        allowed_token_ids=None if params.allowed_token_ids is None else frozenset(params.allowed_token_ids),
        bad_words=tuple(tuple(word) for word in params.bad_words_token_ids or ()),
        logit_bias=params.logit_bias or {},
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )


class StopFinder:
    """Finds the stop string that an answer's text has come to with its last token, and not before."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = stops
        self._decode = decode
        self._last_characters = {stop[-1] for stop in stops}
        # Some tokenizers leave out a space before a token that stands alone.
        self._ends_in_space = any(character.isspace() for character in self._last_characters)

    def __call__(self, tokens: Sequence[int]) -> str | None:
        found = self.locate(tokens)
        return found and found[1]

    def locate(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Where in the text the stop string begins, and which it is: the one that ends first, or is named first."""
        if not self._may_end(self._decode(tokens[-1:])):
            return None
        text = self._decode(tokens)
        # What ended within a character before may read otherwise now.
        num_before = len(self._decode(tokens[:-1]).rstrip("\ufffd"))
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, num_before - len(stop) + 1))) >= 0
        ]
        return min(found, key=itemgetter(0))[1:] if found else None

    def _may_end(self, last: str) -> bool:
        """Whether a stop string can end in a token's text. Most can't; a part of a character reads as U+FFFD."""
        return self._ends_in_space or "\ufffd" in last or not self._last_characters.isdisjoint(last)


def _make_stop_finder(task: SearchTask) -> StopFinder:
    return StopFinder(task.params.stop, partial(_decode, task))


def _decode(task: SearchTask, tokens: Sequence[int]) -> str:
    text: str = task.tokenizer.decode(list(tokens), skip_special_tokens=task.params.skip_special_tokens)
    return text


def _to_output(index: int, found: Hypothesis, task: SearchTask) -> CompletionOutput:
    params, tokens = task.params, list(found.beam.tokens)
    stop = found.stop_reason
    is_kept = params.include_stop_str_in_output
    text = _decode(task, tokens if is_kept or not isinstance(stop, int) else tokens[:-1])
    if isinstance(stop, str) and (found_stop := _make_stop_finder(task).locate(tokens)) is not None:
        text = text[: found_stop[0] + len(stop) * is_kept]
    logprobs = None
    if params.logprobs is not None:
        logprobs = [
            _to_logprobs(token, step, params.logprobs) for token, step in zip(tokens, found.beam.steps(), strict=True)
        ]
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=tokens,
        cumulative_logprob=found.beam.cumulative,
        logprobs=logprobs,
        finish_reason=found.finish_reason,
        # As in vLLM, the model's own end needs no reason.
        stop_reason=None if stop == params.eos_token_id else stop,
    )


def _to_logprobs(token: int, step: Logprobs, num_logprobs: int) -> dict[int, Logprob]:
    """The log-probability of a token and of the likeliest ones at its place, in vLLM's order: the token first."""
    ranked = list(step.items())
    ranks = {other: rank for rank, (other, _) in enumerate(ranked, 1)}
    best = dict(ranked[: len(ranked) if num_logprobs == -1 else num_logprobs])
    return {
        other: Logprob(logprob=logprob, rank=ranks[other], decoded_token=None)
        for other, logprob in {token: step[token], **best}.items()
    }


class _Row:
    """One sequence in the engine: the tokens that it takes by itself, and what it sees at each place."""

    def __init__(self, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        self._outputs = outputs
        self._places: deque[tuple[int, Logprobs]] = deque()
        self._is_finished = False
        self.next_token: int | None = None
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None

    @property
    def goes_on(self) -> bool:
        return bool(self._places) or not self._is_finished

    async def advance(self) -> Logprobs:
        """What the model says of the token after those told before; sets `next_token` to the one that it takes."""
        while not self._places:
            output = await anext(self._outputs, None)
            if output is None:
                raise GivenUp
            (told,) = output.outputs
            self._is_finished = output.finished
            if self.num_cached_tokens is None:
                self.num_cached_tokens = output.num_cached_tokens
            for token, place in zip(told.token_ids, told.logprobs or (), strict=True):
                self._places.append((token, {other: logprob.logprob for other, logprob in place.items()}))
            self.num_tokens += len(told.token_ids)
            if not self._places and output.finished:
                raise GivenUp
        self.next_token, told_of = self._places.popleft()
        return told_of

    async def close(self) -> None:
        await self._outputs.aclose()


class _Rows:
    """The sequences of one search; `NextTokens` for `pipelines.beam.search`."""

    def __init__(self, task: SearchTask, rules: BeamRules) -> None:
        self._task = task
        self._rules = rules
        self._rows: dict[Beam, _Row] = {}
        # All that run, also those that no beam follows any more.
        self._open: set[_Row] = set()
        # Tokens that the engine generated for this search.
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None

    async def next_tokens(self, beams: Sequence[Beam]) -> list[Logprobs]:
        before, self._rows = self._rows, {}
        for beam in beams:
            parent = beam.parent
            row = before.get(parent) if parent is not None else None
            follows = row is not None and row.goes_on and row.next_token == beam.tokens[-1]
            self._rows[beam] = row if row is not None and follows else self._start(beam.tokens)
        for row in self._open - set(self._rows.values()):
            await self._end(row)
        told = await _together([row.advance() for row in self._rows.values()])
        if self.num_cached_tokens is None:
            self.num_cached_tokens = next(iter(self._rows.values())).num_cached_tokens
        return [_ranked(step) for step in told]

    async def score_prompt(self) -> Any:
        """Log-probabilities of the prompt's own tokens."""
        wanted = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=self._task.params.prompt_logprobs, detokenize=False
        )
        self.num_tokens += 1
        outputs = [output async for output in self._task.start(self._task.prompt, wanted, uuid.uuid4().hex)]
        if not outputs or outputs[-1].outputs[0].finish_reason not in {"length", "stop"}:
            raise GivenUp
        return outputs[-1].prompt_logprobs

    async def close(self) -> None:
        """Abort what still runs. Nothing awaits a sequence by now."""
        for row in list(self._open):
            await self._end(row)

    async def _end(self, row: _Row) -> None:
        await row.close()
        self._open.discard(row)
        self.num_tokens += row.num_tokens

    def _start(self, tokens: tuple[int, ...]) -> _Row:
        rules, params = self._rules, self._task.params
        most = rules.max_tokens - len(tokens)
        if rules.presence_penalty or rules.frequency_penalty:
            most = min(most, PENALISED_AHEAD)
        allowed = params.allowed_token_ids
        # What is looked at, and what the caller wants to see.
        num_logprobs = max(
            rules.num_logprobs(len(tokens)), rules.num_logprobs(len(tokens) + most), params.logprobs or 0
        )
        if params.logprobs == -1 or num_logprobs > self._task.max_logprobs:
            num_logprobs = self._task.max_logprobs
        wanted = SamplingParams(
            temperature=0,
            max_tokens=most,
            # Masks whatever ends an answer, all along.
            min_tokens=most,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            logit_bias=params.logit_bias,
            allowed_token_ids=allowed,
            logprobs=num_logprobs if allowed is None else None,
            logprob_token_ids=allowed,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {**self._task.prompt, "prompt_token_ids": [*self._task.prompt["prompt_token_ids"], *tokens]}
        row = _Row(self._task.start(prompt, wanted, uuid.uuid4().hex))
        self._open.add(row)
        return row


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; when one fails or the caller leaves, the others have ended before this does."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


def _ranked(step: Logprobs) -> Logprobs:
    """Likeliest first: the engine puts the token that it took before the others."""
    return dict(sorted(step.items(), key=lambda pair: -pair[1]))
