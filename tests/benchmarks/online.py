"""The endpoint beside vLLM's own server: how long the first token takes, and how many tokens come, under few and many
streams; and what clients that go away leave behind.

Both servers are up at the same time with the same engine settings, and are asked in turn, round by round; who isn't
asked does nothing. A stream asks for 64 tokens after a prompt of its own of 64 words (`ignore_eos`, greedy); a client
sends its requests one after the other. Client, server and engine share this machine's cores on both sides.

- first token, at 1, 8 and 32 streams: the median of all requests of a round, in ms;
- tokens per second, at 1, 8 and 32 streams: of all streams together, from the first request to the last token;
- 500 clients, of which a third goes away at some point of its stream: sequences that are in the engine 2 s after the
  last one, and the resident memory of all server processes after them over that before them.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import psutil
import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides.work import WORDS  # noqa: E402 - found below the root
from tests.endpoint import free_port  # noqa: E402 - found below the root

STREAMS = (1, 8, 32)
NUM_CLIENTS, NUM_QUICK_CLIENTS = 500, 60
ENGINE = {"kv_cache_gib": 1.0}
MAX_TOKENS = 64
_START_S = 300
# What is to be had of the peer: at one stream so many ms more to the first token, in the others so many times.
_AIMS = {1: None, 8: 1.15, 32: 1.15}


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less work and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of both sides.")] = 3,
) -> None:
    """Time to the first token and tokens per second of the endpoint over those of vLLM's server."""
    first: dict[tuple[str, int], list[float]] = {}
    speed: dict[tuple[str, int], list[float]] = {}
    with our_server() as (ours, handle), peer_server() as peer:
        sides = {"ours": ours, "peer": peer}
        for url in sides.values():
            asyncio.run(measure(url, 2, 1))
        for turn in range(1 if quick else rounds):
            for streams in STREAMS:
                for side in sides if turn % 2 == 0 else reversed(sides):
                    told = asyncio.run(measure(sides[side], streams, 2 if quick else 4))
                    first.setdefault((side, streams), []).append(told[0])
                    speed.setdefault((side, streams), []).append(told[1])
                    print(f"{side}, {streams} streams: {told[0]:.0f} ms, {told[1]:.0f} tokens/s", file=sys.stderr)
        left, growth = leave(ours, handle, NUM_QUICK_CLIENTS if quick else NUM_CLIENTS)
    figures = [
        *(Figure(f"first token, {n} streams", first["ours", n], first["peer", n], _AIMS[n], "ms") for n in STREAMS),
        *(Figure(f"tokens, {n} streams", speed["ours", n], speed["peer", n], 0.95, "tokens/s") for n in STREAMS),
        Figure("sequences left by clients that went away", [float(left)], [], None, "sequences"),
        Figure("memory after them, of that before", [growth], [], None, ""),
    ]
    report(figures, json_file)


# --- sides ------------------------------------------------------------------------------------------------------------


@contextmanager
def our_server() -> Iterator[tuple[str, Any]]:
    """Our endpoint, and a handle that asks its engine."""
    from ray import serve

    from pipelines.cluster import connected
    from pipelines.serve import APP, prepare, serving
    from schemas.settings import EngineSettings, ServeSettings

    settings = ServeSettings(port=free_port(), engine=EngineSettings(batch_share=0.25, **ENGINE))
    prepare()
    with connected(False), serving(settings) as url:
        yield url, serve.get_deployment_handle("Engine", APP)


@contextmanager
def peer_server() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.sides.vllm_server", "tuned", str(port), json.dumps(ENGINE)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + _START_S
        while not is_up(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("vLLM's server didn't start")
            time.sleep(1)
        yield url
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=30)
        for child in alive:
            child.kill()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


# --- clients ----------------------------------------------------------------------------------------------------------


def make_body(name: str) -> dict[str, Any]:
    draw = random.Random(name)  # noqa: S311 - work to repeat, not a secret
    prompt = f"{name}: " + " ".join(draw.choices(WORDS.split(), k=64))
    return {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}


async def measure(url: str, num_streams: int, requests_each: int) -> tuple[float, float]:
    """The median time to the first token in ms, and tokens per second of all streams together."""
    times: list[float] = []
    # Prompts of its own each time: nothing is found in a cache.
    tag = f"{time.time_ns()}"

    async def client(number: int, http: httpx.AsyncClient) -> None:
        for turn in range(requests_each):
            sent = time.perf_counter()
            num_chunks = 0
            body = make_body(f"{tag} {number} {turn}")
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        num_chunks += 1
                        if num_chunks == 1:
                            times.append((time.perf_counter() - sent) * 1000)
            assert num_chunks > 0

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        started = time.perf_counter()
        await asyncio.gather(*(client(number, http) for number in range(num_streams)))
        seconds = time.perf_counter() - started
    return median(times), num_streams * requests_each * MAX_TOKENS / seconds


def leave(url: str, handle: Any, num_clients: int) -> tuple[int, float]:
    """Sequences left in the engine, and memory after over memory before, when a third of the clients went away."""
    asyncio.run(come_and_go(url, num_clients // 10))
    before = resident_bytes()
    asyncio.run(come_and_go(url, num_clients))
    time.sleep(2)
    return handle.ask.remote().result(timeout_s=60).num_running, resident_bytes() / before


async def come_and_go(url: str, num_clients: int) -> None:
    draw = random.Random(num_clients)  # noqa: S311 - work to repeat, not a secret
    limits = httpx.Limits(max_connections=None)

    async def client(number: int, http: httpx.AsyncClient, leaves_after: int | None) -> None:
        body = make_body(f"{time.time_ns()} {number}")
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            seen = 0
            async for line in response.aiter_lines():
                seen += line.startswith("data: {")
                if leaves_after is not None and seen >= leaves_after:
                    return

    async with httpx.AsyncClient(timeout=1200, limits=limits) as http:
        await asyncio.gather(
            *(
                client(number, http, draw.randint(0, MAX_TOKENS // 2) if number % 3 == 0 else None)
                for number in range(num_clients)
            )
        )


def resident_bytes() -> int:
    """Of the servers' processes: all below this one."""
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True) if child.is_running())


if __name__ == "__main__":
    typer.run(main)
