"""Batch requests and people in one engine, the real one: who is set aside, and that nothing is lost by it."""

import asyncio
import json
import tempfile

import pytest

from pipelines.model import resolve
from pipelines.vllm_engine import VllmEngine
from schemas.requests import Answered, Chunk, Request, Streamed
from schemas.settings import EngineSettings

SLOTS, NUM_ROWS = 4, 10


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    settings = EngineSettings(
        max_num_seqs=SLOTS, first_token_ms=20_000, inter_token_ms=10_000, kv_cache_gib=0.5, dtype="float32"
    )
    with pytest.MonkeyPatch.context() as patch:
        # Core claims of its own: the shared engine holds all cores.
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("claims")))
        engine = VllmEngine.start(resolve(None), (), settings)
    yield engine
    engine.close()


def _row(number: int, **fields) -> Request:
    body = {"prompt": f"Row {number}. The river runs past", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    return Request(f"row {number}", "/v1/completions", json.dumps(body | fields))


async def _ask(engine: VllmEngine, request: Request, lane: str) -> list:
    return [event async for event in engine.generate(request, lane=lane)]


def _on(engine: VllmEngine, work):
    return asyncio.run_coroutine_threadsafe(work, engine.loop).result(300)


async def _rows(engine: VllmEngine) -> list[Answered]:
    several = {"n": 2, "temperature": 0.7, "seed": 5}
    rows = [
        asyncio.create_task(_ask(engine, _row(number, **(several if number % 2 else {})), "batch"))
        for number in range(NUM_ROWS)
    ]
    return [(await row)[-1] for row in rows]


def test_people_push_batch_requests_out_which_are_answered_later_as_ever(engine):
    before = _on(engine, _rows(engine))

    async def beside_people() -> tuple[list[Answered], list[list]]:
        rows = asyncio.create_task(_rows(engine))
        while (await engine.ask()).num_batch < SLOTS:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1)
        people = [_row(100 + number, stream=True, max_tokens=8) for number in range(SLOTS)]
        told = await asyncio.gather(*(_ask(engine, person, "online") for person in people))
        # People had their answers while the batch wasn't done by far.
        assert not rows.done() and engine.state.num_batch + engine.state.num_waiting > 0
        return await rows, told

    after, told = _on(engine, beside_people())
    for events in told:
        assert sum(isinstance(event, Chunk) for event in events) == 8 and isinstance(events[-1], Streamed)
    # Once each, none without an answer, and each the one that it has without people.
    assert all(isinstance(row, Answered) for row in after)
    texts, again = ([[choice["text"] for choice in row.body["choices"]] for row in side] for side in (before, after))
    assert again == texts
    assert all(row.body["usage"]["completion_tokens"] in (60, 120) for row in after)
    state = engine.state
    assert state.num_set_aside >= 2 and state.num_lost_tokens > 0
    assert (state.num_running, state.num_waiting) == (0, 0)


def test_a_row_that_is_given_up_while_it_is_aside_leaves_nothing_behind(engine):
    async def give_up() -> None:
        rows = [asyncio.create_task(_ask(engine, _row(number), "batch")) for number in range(SLOTS + 2)]
        await asyncio.sleep(1)
        person = asyncio.create_task(_ask(engine, _row(200, n=SLOTS, temperature=1), "online"))
        await asyncio.sleep(0.5)
        for row in rows:
            row.cancel()
        assert all(
            isinstance(row, asyncio.CancelledError) for row in await asyncio.gather(*rows, return_exceptions=True)
        )
        assert isinstance((await person)[-1], Answered)

    _on(engine, give_up())
    state = engine.state
    assert (state.num_running, state.num_waiting, state.num_batch) == (0, 0, 0)
