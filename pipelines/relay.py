"""Events from one event loop to another, with an end that reaches back: whoever stops reading stops what is read."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

T = TypeVar("T")

# Events that may be on their way; past them the source waits, and vLLM puts the tokens of what waits together.
WINDOW = 4


async def relay(
    loop: asyncio.AbstractEventLoop, make: Callable[[], AsyncGenerator[T, None]]
) -> AsyncGenerator[T, None]:
    """What a generator yields that lives on another loop. It is run by one task there, which is cancelled when this
    generator ends early; what it raises is raised here."""
    home = asyncio.get_running_loop()
    arrived: asyncio.Queue[T | None] = asyncio.Queue()
    room = asyncio.Semaphore(WINDOW)

    def tell(event: T | None) -> None:
        # A home that is gone has nobody to tell.
        with suppress(RuntimeError):
            home.call_soon_threadsafe(arrived.put_nowait, event)

    async def run() -> None:
        async with aclosing(make()) as events:
            async for event in events:
                await room.acquire()
                tell(event)

    running = asyncio.run_coroutine_threadsafe(run(), loop)
    running.add_done_callback(lambda _: tell(None))
    try:
        while (event := await arrived.get()) is not None:
            loop.call_soon_threadsafe(room.release)
            yield event
        running.result()
    finally:
        running.cancel()
