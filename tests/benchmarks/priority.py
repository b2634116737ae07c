"""How long an urgent request waits while a batch fills the engine.

Two engines (on a CPU: 256 places), one after the other: one whose steps are held to what people are to have, as an
endpoint's are, here a first token within 2.7 times of what an idle engine needs; and one without. Work: 300 batch
requests of 64 to 128 tokens at priority 10, given at once; urgent ones of lane "online" at priority 0 arrive one every
0.75 s while the batch runs. Measured, in rounds of both:

- an urgent request's time to its first token (the whole way through the engine's seam, with `max_tokens` 1), idle and
  under the batch: median and 95th percentile. Above 1 is how many times longer it is under load;
- the batch's tokens per second with urgent requests beside it, over those without;
- the same of the engine without targets, where vLLM's own priorities do what they can, and how much faster its batch
  is.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root

WORDS = "the river wind stone letter garden night bread paper market winter door road voice light water"
EVERY_S, NUM_BATCH, NUM_IDLE = 0.75, 300, 24
# Of an idle engine's first token.
TARGET = 2.7


def _body(draw: random.Random, **fields: Any) -> str:
    prompt = f"{draw.random()}: " + " ".join(draw.choices(WORDS.split(), k=draw.randint(16, 64)))
    return json.dumps({"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields})


class Load:
    """One engine and what is sent to it. `first_token_ms`: within which urgent requests are to have theirs."""

    def __init__(self, first_token_ms: int | None = None) -> None:
        from pipelines.model import resolve
        from pipelines.vllm_engine import VllmEngine
        from schemas.settings import EngineSettings

        self.engine = VllmEngine.start(resolve(None), (), EngineSettings(first_token_ms=first_token_ms))
        self.draw = random.Random(7)  # noqa: S311 - work to repeat, not a secret

    def urgent(self) -> float:
        """Milliseconds to the first token of one urgent request."""
        from schemas.requests import Request

        started = time.perf_counter()
        body = _body(self.draw, max_tokens=1, priority=0)
        self.engine.submit(Request("u", "/v1/completions", body), lane="online").result()
        return (time.perf_counter() - started) * 1000

    def idle(self) -> list[float]:
        return [self.urgent() for _ in range(NUM_IDLE)]

    def batch(self, number: int, *, with_urgent: bool) -> tuple[list[float], float]:
        """Milliseconds of the urgent requests, and the batch's tokens per second."""
        from schemas.requests import Request

        bodies = [_body(self.draw, max_tokens=self.draw.randint(64, 128), priority=10) for _ in range(number)]
        sent = [self.engine.submit(Request("b", "/v1/completions", body), lane="batch") for body in bodies]
        waits = []
        while with_urgent and not all(future.done() for future in sent):
            arrived = time.perf_counter()
            waits.append(self.urgent())
            time.sleep(max(0.0, EVERY_S - (time.perf_counter() - arrived)))
        tokens = sum(future.result().body["usage"]["completion_tokens"] for future in sent)
        return waits, tokens / (max(future.result().timing.total_ms for future in sent) / 1000)


def p95(numbers: list[float]) -> float:
    return statistics.quantiles(numbers, n=20)[-1]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the work and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of all sides.")] = 2,
) -> None:
    """Time to the first token of urgent requests under a batch over that of an idle engine."""
    number = NUM_BATCH // 3 if quick else NUM_BATCH
    idle: list[list[float]] = []
    # By whether the engine has a target, and by whether urgent ones are there.
    loaded: dict[bool, list[list[float]]] = {True: [], False: []}
    speed: dict[tuple[bool, bool], list[float]] = {(one, other): [] for one in loaded for other in loaded}
    for turn in range(1 if quick else rounds):
        for has_target in (False, True):
            load = Load(round(TARGET * statistics.median(idle[-1])) if has_target else None)
            load.idle()  # what the first requests warm up isn't measured
            if not has_target:
                idle.append(load.idle())
            for with_urgent in (True, False) if turn % 2 == 0 else (False, True):
                waits, rate = load.batch(number, with_urgent=with_urgent)
                speed[has_target, with_urgent].append(rate)
                if with_urgent:
                    loaded[has_target].append(waits)
            load.engine.close()

    def wait(name: str, has_target: bool, of: Any, aim: float | None) -> Figure:
        return Figure(f"{name}, under load / idle", list(map(of, loaded[has_target])), list(map(of, idle)), aim, "ms")

    def batch(name: str, has_target: bool, aim: float | None) -> Figure:
        return Figure(
            f"{name}, with urgent ones / without",
            *(speed[has_target, is_with] for is_with in (True, False)),
            aim,
            "tokens/s",
        )

    report(
        [
            wait("first token, median", True, statistics.median, 3.0),
            wait("first token, p95", True, p95, 3.5),
            batch("batch", True, 0.95),
            wait("without a target: first token, median", False, statistics.median, None),
            wait("without a target: first token, p95", False, p95, None),
            batch("without a target: batch", False, None),
            Figure("batch alone, with a target / without", speed[True, False], speed[False, False], None, "tokens/s"),
        ],
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
