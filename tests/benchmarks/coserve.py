"""What a batch and people have of one engine: beside one another, and each alone.

An engine of 64 places; what is measured is measured one side after the other in one run, each from when its batch is in
full swing:

- (a) people alone: a stream of 48 tokens each, which arrive by chance (Poisson) at a third of the rate that would fill
  the engine; the same arrivals in all sides;
- (b) a batch alone, which has the whole engine; answers of 24 to 72 tokens, always more than there is room for;
- (c) both as an endpoint has them, for each of three targets: a first token within 2, 4 and 8 steps of (b), and tokens
  half of that apart. The targets are set when an engine starts: each has one of its own;
- (d) both with vLLM's own priorities alone: everything is in vLLM's queue, people first;
- (e) both with a fixed cap on the batch's sequences, several of them. For each target the cap is taken that gives most
  tokens of those that keep it, which is what somebody might find by hand.

Those answers end often enough that a place is soon free. So (c), for the middle target, and (d) are measured once more
beside rows that hold theirs: answers of 256 to 512 tokens, all begun together.

People's prompts and answers are as long as the batch's on average, or a token of theirs would be more work. Tokens are
those of answers that the engine says it has made, without those of answers that were given up. Then 64 people at once
come into a running batch of 256 rows: each is to be answered once, and as it is without them.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from pipelines.admission import Admission  # noqa: E402 - found below the root
from pipelines.model import resolve  # noqa: E402 - found below the root
from pipelines.pacing import Targets  # noqa: E402 - found below the root
from pipelines.vllm_engine import VllmEngine  # noqa: E402 - found below the root
from schemas.requests import Chunk, Failed, Request  # noqa: E402 - found below the root
from schemas.settings import EngineSettings  # noqa: E402 - found below the root
from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides.work import WORDS  # noqa: E402 - found below the root

_STREAM_TOKENS = 48
_ANSWERS, _LONG_ANSWERS = (24, 72), (256, 512)
PLACES = 64
# Of the engine's tokens: what people ask for.
_LOAD = 1 / 3
STEPS = (2, 4, 8)
CAPS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
_MIDDLE_STEPS = 4
_BURST, _BURST_BATCH = 64, 256
# A batch is in full swing after so long.
_WARM_S = 20


@dataclass
class Seen:
    """What one side gave: tokens a second, and seconds of people's first tokens and between their tokens."""

    tokens_per_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    num_set_aside: int = 0
    lost_share: float = 0.0

    def kept(self, targets: Targets) -> float:
        """The share of first tokens that came in time."""
        return sum(seconds <= targets.first_token_s for seconds in self.first_s) / len(self.first_s)

    def flowing(self, targets: Targets) -> float:
        """The share of further tokens that did."""
        return sum(seconds <= targets.inter_token_s for seconds in self.between_s) / len(self.between_s)

    def told(self) -> str:
        people = "".join(
            f", {name} p50 {_quantile(of, 50) * 1000:.0f} p99 {_quantile(of, 99) * 1000:.0f} ms"
            for name, of in (("first token", self.first_s), ("between tokens", self.between_s))
            if of
        )
        aside = f", {self.num_set_aside} set aside, {self.lost_share:.1%} lost" if self.num_set_aside else ""
        step = statistics.median(self.steps_s) * 1000
        return f"{self.tokens_per_s:.0f} tokens/s, step {step:.0f} ms{people}{aside}"


def _quantile(numbers: list[float], percent: int) -> float:
    return statistics.quantiles(numbers, n=100, method="inclusive")[percent - 1]


class Bench:
    """One engine, on whose loop all of this runs."""

    def __init__(self, engine: VllmEngine, seconds: float, warm_s: float) -> None:
        self.engine = engine
        self.seconds, self.warm_s = seconds, warm_s
        self._llm: Any = engine._llm
        self._config = self._llm.vllm_config
        self._tokens = 0
        self._steps: list[float] = []
        record = self._llm.steps.record

        ended = time.perf_counter()

        def count(scheduler_stats: Any, iteration_stats: Any = None, *more: Any, **others: Any) -> None:
            nonlocal ended
            now = time.perf_counter()
            self._steps.append(now - ended)
            ended = now
            if iteration_stats is not None:
                self._tokens += iteration_stats.num_generation_tokens
            record(scheduler_stats, iteration_stats, *more, **others)

        self._llm.steps.record = count

    @contextmanager
    def admitting(self, share: float = 1.0, is_open: bool = False) -> Iterator[None]:
        """Another admission for the time of the block. `is_open`: one that holds nothing back."""
        cache, scheduler = self._config.cache_config, self._config.scheduler_config
        size = cache.num_gpu_blocks * cache.block_size
        places = (10**9, 10**12) if is_open else (scheduler.max_num_seqs, size)
        kept = self._llm.admission
        self._llm.admission = Admission(*places, cache.block_size, share)
        try:
            yield
        finally:
            self._llm.admission = kept

    async def measure(self, rate: float, answers: tuple[int, int] | None) -> Seen:
        """`rate`: people a second. `answers`: the batch's least and most tokens of one, none without a batch."""
        seen = Seen()
        aside = self._llm.admission.num_set_aside
        arrivals = random.Random(11)  # noqa: S311 - work to repeat, not a secret
        people: list[asyncio.Task[None]] = []
        async with self._batch(answers) if answers else _nothing():
            await asyncio.sleep(self.warm_s if answers else 1)
            first, lost, began = self._tokens, self._llm.lost_tokens, time.perf_counter()
            self._steps.clear()
            if rate == 0:
                await asyncio.sleep(self.seconds)
            while rate and time.perf_counter() < began + self.seconds:
                await asyncio.sleep(arrivals.expovariate(rate))
                people.append(asyncio.create_task(self._person(len(people), seen)))
            seconds = time.perf_counter() - began
            made, given_up = self._tokens - first, self._llm.lost_tokens - lost
            seen.tokens_per_s = (made - given_up) / seconds
            seen.lost_share = given_up / made
            seen.steps_s = list(self._steps)
            await asyncio.gather(*people)
        seen.num_set_aside = self._llm.admission.num_set_aside - aside
        return seen

    async def _person(self, number: int, seen: Seen) -> None:
        draw = random.Random(f"person {number}")  # noqa: S311
        body = _body(draw, f"{time.time_ns()} {number}", _STREAM_TOKENS, 16, 64) | {"stream": True}
        last = time.perf_counter()
        is_first = True
        async for event in self.engine.generate(Request("p", "/v1/completions", json.dumps(body)), lane="online"):
            assert not isinstance(event, Failed), event
            if not isinstance(event, Chunk):
                continue
            now = time.perf_counter()
            (seen.first_s if is_first else seen.between_s).append(now - last)
            last, is_first = now, False

    @asynccontextmanager
    async def _batch(self, answers: tuple[int, int]) -> AsyncIterator[None]:
        """A batch that doesn't end: half more rows are asked for than there are places."""
        num_rows = self._config.scheduler_config.max_num_seqs * 3 // 2

        async def rows(number: int) -> None:
            draw = random.Random(f"row {number}")  # noqa: S311
            while True:
                await self.row(_body(draw, f"{time.time_ns()}", draw.randint(*answers), 16, 64))

        tasks = [asyncio.create_task(rows(number)) for number in range(num_rows)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.engine.loop).result()

    async def row(self, body: dict[str, Any]) -> str:
        request = Request("b", "/v1/completions", json.dumps(body | {"priority": 10}))
        *_, last = [event async for event in self.engine.generate(request, lane="batch")]
        assert not isinstance(last, Failed), last
        text: str = last.body["choices"][0]["text"]
        return text

    async def burst(self, num_people: int) -> tuple[Seen, list[str]]:
        """People who come at once in the middle of a batch, and the batch's answers in order."""
        draw = random.Random(5)  # noqa: S311
        bodies = [_body(draw, str(number), draw.randint(*_ANSWERS), 16, 64) for number in range(_BURST_BATCH)]
        aside = self._llm.admission.num_set_aside
        rows = [asyncio.create_task(self.row(body)) for body in bodies]
        await asyncio.sleep(self.warm_s / 2)
        seen = Seen(steps_s=[0.0])
        assert not all(row.done() for row in rows), "the batch was over before the burst came"
        await asyncio.gather(*(self._person(number, seen) for number in range(num_people)))
        answers = await asyncio.gather(*rows)
        seen.num_set_aside = self._llm.admission.num_set_aside - aside
        return seen, list(answers)


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def _body(draw: random.Random, name: str, max_tokens: int, fewest: int, most: int) -> dict[str, Any]:
    prompt = f"{name}: " + " ".join(draw.choices(WORDS.split(), k=draw.randint(fewest, most)))
    return {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}


def side(bench: Bench, rate: float, answers: tuple[int, int] | None, name: str, **admission: Any) -> Seen:
    with bench.admitting(**admission) if admission else nullcontext():
        seen = bench.run(bench.measure(rate, answers))
    print(f"{name}: {seen.told()}", file=sys.stderr, flush=True)
    return seen


@contextmanager
def started(seconds: float, targets: Targets | None = None) -> Iterator[Bench]:
    """An engine of its own for some of the sides; `targets`: one of an endpoint."""
    milliseconds = {}
    if targets is not None:
        milliseconds["first_token_ms"] = round(targets.first_token_s * 1000)
        milliseconds["inter_token_ms"] = round(targets.inter_token_s * 1000)
    engine = VllmEngine.start(resolve(None), (), EngineSettings(max_num_seqs=PLACES, **milliseconds))
    try:
        yield Bench(engine, seconds, _WARM_S)
    finally:
        engine.close()


def round_of(seconds: float, steps: tuple[int, ...] = STEPS, caps: tuple[float, ...] = CAPS) -> dict[str, Any]:
    """All sides once."""
    with started(seconds) as bench:
        batch = side(bench, 0, _ANSWERS, "(b) batch alone")
        rate = batch.tokens_per_s * _LOAD / _STREAM_TOKENS
        step = statistics.median(batch.steps_s)
        print(f"people: {rate:.1f} a second; a step of (b): {step * 1000:.0f} ms", file=sys.stderr)
        people = side(bench, rate, None, "(a) people alone")
        plain = side(bench, rate, _ANSWERS, "(d) both, vLLM's priorities", is_open=True)
        plain_held = side(bench, rate, _LONG_ANSWERS, "(d) beside long rows", is_open=True)
        capped = {cap: side(bench, rate, _ANSWERS, f"(e) both, cap {cap:.3f}", share=cap) for cap in caps}
    ours, ours_held, burst = {}, None, None
    for number in steps:
        targets = Targets(number * step, number * step / 2)
        with started(seconds, targets) as bench:
            seen = side(bench, rate, _ANSWERS, f"(c) both, {number} steps")
            ours[number] = (targets, seen)
            print(f"  in time: {seen.kept(targets):.4f}, {seen.flowing(targets):.4f}", file=sys.stderr)
            if number == _MIDDLE_STEPS:
                ours_held = side(bench, rate, _LONG_ANSWERS, "(c) beside long rows")
                burst = burst_of(bench)
    held = {"ours_held": ours_held, "plain_held": plain_held}
    return {"people": people, "batch": batch, "ours": ours, "plain": plain, "capped": capped, "burst": burst, **held}


def burst_of(bench: Bench) -> tuple[Seen, int]:
    """The burst, and how many of the batch's answers are those that it has without."""
    people, texts = bench.run(bench.burst(_BURST))
    print(f"burst of {_BURST}: {people.told()}", file=sys.stderr)
    _, alone = bench.run(bench.burst(0))
    return people, sum(one == other for one, other in zip(texts, alone, strict=True))


def _best(capped: dict[float, Seen], targets: Targets) -> Seen:
    keep = [seen for seen in capped.values() if seen.kept(targets) >= 0.99]
    if not keep:
        return max(capped.values(), key=lambda seen: seen.kept(targets))
    return max(keep, key=lambda seen: seen.tokens_per_s)


def figures_of(rounds: list[dict[str, Any]]) -> list[Figure]:
    figures = []
    for number in rounds[0]["ours"]:
        mine = [one["ours"][number] for one in rounds]
        speed = [seen.tokens_per_s for _, seen in mine]
        best = [_best(one["capped"], targets) for one, (targets, _) in zip(rounds, mine, strict=True)]
        alone = [(one["people"], targets) for one, (targets, _) in zip(rounds, mine, strict=True)]
        kept_by_cap = [seen.kept(targets) for seen, (targets, _) in zip(best, mine, strict=True)]
        name = f"target of {number} steps"
        figures += [
            Figure(f"{name}: tokens, (c)/(b)", speed, [one["batch"].tokens_per_s for one in rounds], 0.92, "tokens/s"),
            Figure(f"{name}: tokens, (c)/(e)", speed, [seen.tokens_per_s for seen in best], 0.97, "tokens/s"),
            Figure(f"{name}: first tokens in time", [seen.kept(targets) for targets, seen in mine], [], 0.99, ""),
            Figure(f"{name}: tokens in time", [seen.flowing(targets) for targets, seen in mine], [], 0.99, ""),
            Figure(f"{name}: first tokens in time, (a)", [one.kept(t) for one, t in alone], [], None, ""),
            Figure(f"{name}: tokens in time, (a)", [one.flowing(t) for one, t in alone], [], None, ""),
            Figure(f"{name}: first tokens in time, (e)", kept_by_cap, [], None, ""),
            Figure(
                f"{name}: first token p99, (d)/(c)",
                [_quantile(one["plain"].first_s, 99) for one in rounds],
                [_quantile(seen.first_s, 99) for _, seen in mine],
                None,
                "s",
            ),
        ]
        for what, of in (("first token", "first_s"), ("between tokens", "between_s")):
            for percent in (50, 99):
                beside = [_quantile(getattr(seen, of), percent) for _, seen in mine]
                theirs = [_quantile(getattr(seen, of), percent) for seen, _ in alone]
                figures.append(Figure(f"{name}: {what} p{percent}, (c)/(a)", beside, theirs, None, "s"))
    ours, plain = [one["ours_held"] for one in rounds], [one["plain_held"] for one in rounds]
    bursts = [one["burst"] for one in rounds]
    waits = [[_quantile(seen.first_s, 99) for seen in of] for of in (plain, ours)]
    speed = [[seen.tokens_per_s for seen in of] for of in (ours, plain)]
    figures += [
        Figure("beside long rows: first token p99, (d)/(c)", *waits, 10, "s"),
        Figure("beside long rows: tokens, (c)/(d)", *speed, None, "tokens/s"),
        Figure("burst: rows set aside", [float(people.num_set_aside) for people, _ in bursts], [], None, "rows"),
        Figure("burst: first token p99", [_quantile(people.first_s, 99) for people, _ in bursts], [], None, "s"),
        Figure("burst: rows answered as without it", [float(same) for _, same in bursts], [], _BURST_BATCH, "rows"),
    ]
    return figures


def draw(rounds: list[dict[str, Any]], path: Path) -> None:
    """Chart first tokens, times between tokens and tokens a second of every side; `path` ends with .png or .svg."""
    from matplotlib.figure import Figure as Chart

    last = rounds[-1]
    sides = {"(a) people alone": last["people"], "(b) batch alone": last["batch"]}
    sides |= {f"(c) ours, {number} steps": seen for number, (_, seen) in last["ours"].items()}
    sides |= {"(d) vLLM's priorities": last["plain"]}
    sides |= {f"(e) cap {cap:.0%}": seen for cap, seen in last["capped"].items()}
    chart = Chart(figsize=(13, 4.6), layout="constrained")
    first, between, speed = chart.subplots(1, 3, sharey=True)
    places, names = range(len(sides)), list(sides)
    for axes, of, title in ((first, "first_s", "first token"), (between, "between_s", "between tokens")):
        for percent, color in ((99, "#9ecae9"), (50, "#4c78a8")):
            values = [_quantile(times, percent) if (times := getattr(seen, of)) else 0 for seen in sides.values()]
            axes.barh(places, values, color=color, label=f"p{percent}")
        axes.set_title(f"{title}, s")
        axes.legend()
    # Seconds beside hundredths of one.
    first.set_xscale("log")
    first.xaxis.set_major_formatter("{x:g}")
    bars = speed.barh(places, [seen.tokens_per_s for seen in sides.values()], color="#72b7b2")
    speed.bar_label(bars, fmt="{:.0f}", padding=3)
    speed.margins(x=0.15)
    speed.set_title("tokens/s of both")
    first.set_yticks(places, names)
    first.invert_yaxis()
    chart.savefig(path)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Where to draw, as .png or .svg.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less time for each side and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of all sides.")] = 2,
    seconds: Annotated[float, typer.Option(help="How long each side is measured.")] = 60,
) -> None:
    """Times of people and tokens of a batch in one engine, by our admission, by vLLM's priorities and by fixed caps."""
    seen = [round_of(20 if quick else seconds) for _ in range(1 if quick else rounds)]
    figures = figures_of(seen)
    report(figures, json_file)
    if chart is not None:
        draw(seen, chart)


if __name__ == "__main__":
    typer.run(main)
