"""Events between two loops: all arrive in order, and the end reaches back."""

import asyncio
import threading
import time

import pytest

from pipelines.relay import WINDOW, relay


@pytest.fixture
def other():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Source:
    """Counts up; notes the thread that it runs in, how far it came, and how it ended."""

    def __init__(self, number=None, error=None):
        self.number, self.error, self.made, self.ended, self.thread = number, error, 0, threading.Event(), None

    async def __call__(self):
        self.thread = threading.current_thread()
        try:
            while self.made != self.number:
                self.made += 1
                yield self.made
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            self.ended.set()


def test_all_arrive_in_order_from_the_other_loop(other):
    source = Source(100)

    async def read():
        return [event async for event in relay(other, source)]

    assert asyncio.run(read()) == list(range(1, 101))
    assert source.thread is not threading.current_thread()


def test_what_is_raised_there_is_raised_here(other):
    async def read():
        return [event async for event in relay(other, Source(3, ValueError("broken")))]

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read())


def test_a_source_waits_for_its_reader(other):
    source = Source()

    async def read():
        events = relay(other, source)
        await anext(events)
        time.sleep(0.2)
        assert source.made <= WINDOW + 2
        await events.aclose()

    asyncio.run(read())
    assert source.ended.wait(5)


def test_a_reader_that_is_cancelled_ends_its_source(other):
    async def forever():
        try:
            await asyncio.sleep(60)
            yield 1
        finally:
            ended.set()

    ended = threading.Event()

    async def read():
        task = asyncio.ensure_future(anext(relay(other, forever)))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(read())
    assert ended.wait(5)
