"""Streams of the real engine: whole characters, one end for each choice, and nothing left when somebody goes away."""

import asyncio
import json
import time

import pytest

from schemas.failures import EngineUnusable
from schemas.requests import Answered, Chunk, Failed, Request, Streamed
from tests.conftest import engine_processes
from tests.test_engine import on_loop, wait_until_idle

pytestmark = pytest.mark.engine


def stream(engine, *, deadline=None, **body):
    """All events of one streamed completion."""

    async def events():
        request = Request("test", "/v1/completions", json.dumps({"stream": True, **body}))
        return [event async for event in engine.generate(request, lane="online", deadline=deadline)]

    return on_loop(engine, events())


def chunks(events):
    *parts, end = events
    assert isinstance(end, Streamed), end
    return [json.loads(part.data) for part in parts]


def texts(parts):
    """By choice, what its chunks add up to; each has one end, and nothing comes after it."""
    told, ended = {}, {}
    for part in parts:
        for choice in part["choices"]:
            index = choice["index"]
            assert index not in ended
            told[index] = told.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                ended[index] = choice["finish_reason"]
    assert told.keys() == ended.keys()
    return [told[index] for index in sorted(told)]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "The capital of France is", "max_tokens": 24},
        {"prompt": ["One, two,", "a b c"], "max_tokens": 9},
        {"prompt": "Once upon", "n": 3, "temperature": 1, "seed": 5, "max_tokens": 9},
        {"prompt": "Count: one, two, three,", "stop": [" six"], "max_tokens": 32},
        {"prompt": "Once upon a time", "echo": True, "max_tokens": 5},
        {"prompt": "Once upon a time", "echo": True, "max_tokens": 0},
        {"prompt": "Yes or no?", "structured_outputs": {"choice": ["yes", "no"]}},
        {"prompt": "Repeat: \U0001fae0 龜 ďábelské \U0001f468‍\U0001f469‍\U0001f467", "max_tokens": 64},
        *({"prompt": "Write \U0001fae0 龜 again: \U0001fae0", "max_tokens": number} for number in range(1, 7)),
    ],
)
def test_a_stream_adds_up_to_the_answer(engine, complete, body):
    body = {"temperature": 0, **body}
    whole = complete(**body)
    assert isinstance(whole, Answered), whole
    parts = chunks(stream(engine, **body))
    assert texts(parts) == [choice["text"] for choice in whole.body["choices"]]
    ends = {choice["index"]: choice["finish_reason"] for part in parts for choice in part["choices"]}
    assert list(ends.values()) == [choice["finish_reason"] for choice in whole.body["choices"]]
    for part in parts:
        assert "\ufffd" not in "".join(choice["text"] for choice in part["choices"] if not choice["finish_reason"])


def test_usage_comes_last_once_and_only_when_asked_for(engine):
    body = {"prompt": "Once", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    assert all("usage" not in part for part in chunks(stream(engine, **body)))
    events = stream(engine, **body, stream_options={"include_usage": True})
    *parts, last = chunks(events)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6 and "metrics" not in last
    assert all(part["choices"] and part.get("usage") is None for part in parts)
    assert events[-1].usage["completion_tokens"] == 6
    assert events[-1].timing.total_ms >= events[-1].timing.first_token_ms > 0 <= events[-1].timing.queue_ms
    *parts, last = chunks(
        stream(engine, **body, stream_options={"include_usage": True, "continuous_usage_stats": True})
    )
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 3, 4, 5, 6]


def test_nobody_pays_for_the_token_that_scoring_takes(engine):
    body = {"prompt": "Once upon a time", "echo": True, "max_tokens": 0, "logprobs": 1}
    *parts, last = chunks(stream(engine, **body, stream_options={"include_usage": True}))
    assert last["usage"]["completion_tokens"] == 0
    assert [len(part["choices"][0]["logprobs"]["tokens"]) for part in parts] == [4]


def test_chunks_come_every_so_many_tokens(engine):
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream_interval": 4}
    assert len(chunks(stream(engine, **body))) <= 5


def test_log_probabilities_of_a_stream_are_those_of_the_answer(engine, complete):
    body = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = complete(**body).body["choices"][0]["logprobs"]
    parts = [part["choices"][0]["logprobs"] for part in chunks(stream(engine, **body))]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    told = [one for part in parts for one in part["token_logprobs"]]
    assert told == pytest.approx(whole["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "a", "model": "nobody"}, 404),
        ({"prompt": "a " * 9_000}, 400),
        ({"prompt": "a", "use_beam_search": True, "n": 2}, 400),
    ],
)
def test_what_is_refused_is_so_before_the_first_chunk(engine, body, status):
    (event,) = stream(engine, **body)
    assert isinstance(event, Failed) and event.failure.status_code == status


@pytest.mark.parametrize("more", [{}, {"n": 4, "temperature": 1}, {"prompt": ["a", "b"]}])
def test_a_reader_that_goes_away_frees_the_engine(engine, more):
    body = {"prompt": "Once", "max_tokens": 4_000, "ignore_eos": True, "stream": True} | more

    async def read_some():
        request = Request("gone", "/v1/completions", json.dumps(body))
        events = engine.generate(request, lane="online")
        seen = [await anext(events) for _ in range(5)]
        await events.aclose()
        return seen

    assert all(isinstance(event, Chunk) for event in on_loop(engine, read_some()))
    wait_until_idle(engine, 2)


def test_a_reader_that_is_cancelled_while_it_waits_frees_the_engine(engine):
    body = {"prompt": "Once", "max_tokens": 4_000, "ignore_eos": True, "stream": True, "n": 3, "temperature": 1}

    async def read():
        request = Request("gone", "/v1/completions", json.dumps(body))
        async for _ in engine.generate(request, lane="online"):
            pass

    future = asyncio.run_coroutine_threadsafe(read(), engine.loop)
    time.sleep(1)
    assert future.cancel()
    wait_until_idle(engine, 2)


def test_a_beam_search_whose_caller_goes_away_frees_the_engine(engine):
    body = {"prompt": "Once", "max_tokens": 2_000, "ignore_eos": True, "use_beam_search": True, "n": 4}
    future = engine.submit(Request("gone", "/v1/completions", json.dumps(body)), lane="online")
    time.sleep(1)
    assert future.cancel()
    wait_until_idle(engine, 2)


def test_a_stream_past_its_deadline_ends_with_a_failure(engine):
    *parts, last = stream(engine, prompt="Once", max_tokens=4_000, ignore_eos=True, deadline=time.time() + 1)
    assert parts and all(isinstance(part, Chunk) for part in parts)
    assert isinstance(last, Failed) and (last.failure.status_code, last.failure.reason) == (504, "deadline_exceeded")
    wait_until_idle(engine, 2)


def test_an_engine_says_what_it_has_to_do(engine):
    body = {"prompt": "Once", "max_tokens": 4_000, "ignore_eos": True, "stream": True}

    async def ask_meanwhile():
        events = engine.generate(Request("r", "/v1/completions", json.dumps(body)), lane="online")
        for _ in range(5):
            await anext(events)
        state = await engine.ask()
        await events.aclose()
        return state

    busy = on_loop(engine, ask_meanwhile())
    assert busy.num_running == 1 and busy.num_waiting == 0 and busy.kv_share > 0
    assert on_loop(engine, engine.ask()).num_running == 0


@pytest.mark.slow
def test_an_engine_that_dies_in_a_stream_is_told_as_the_engines_fault(engine):
    body = {"prompt": "Once", "max_tokens": 4_000, "ignore_eos": True, "stream": True}
    seen = []

    async def read():
        async for event in engine.generate(Request("r", "/v1/completions", json.dumps(body)), lane="online"):
            seen.append(event)

    future = asyncio.run_coroutine_threadsafe(read(), engine.loop)
    while len(seen) < 5:
        time.sleep(0.05)
    (core,) = [process for process in engine_processes() if "EngineCore" in process.name()]
    core.kill()
    with pytest.raises(EngineUnusable, match="died"):
        future.result(timeout=10)
    with pytest.raises(EngineUnusable):
        on_loop(engine, engine.ask())
    engine.restart()
    assert texts(chunks(stream(engine, prompt="The capital of France is", max_tokens=1, temperature=0))) == [" Paris"]
