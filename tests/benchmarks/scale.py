"""Whether a million rows cost ten times what a hundred thousand do, and the driver no more memory.

Both sizes run whole, over two replicas of one core each, with the deterministic test engine, which answers at once:
what is measured is all that is ours, and nothing of a model. Each size is a process of its own, in interleaved rounds.
Measured:

- rows per second, large / small: of checking and planning (from the first look at the files to the plan), of infer
  (from the first submitted to the last staged row), of publishing (from there to the last part of a table), and in all
  (from the start of `batch.run` to its end, with Ray's and the replicas' own start and end, which the small size feels
  more). Each is also there without what both sizes pay once: the rows and seconds that the large has more than the
  small;
- the driver process's peak of resident memory from the start of the run on, large / small: all, and without the shared
  pages, which are those of Ray's object store and of libraries.

Work: short prompts of up to eight words, each its own: nothing is deduplicated.
"""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides.watched import Silence  # noqa: E402 - found below the root

WORDS = "the river wind stone letter garden night bread paper market winter door road voice light water"
SMALL, LARGE = 100_000, 1_000_000
QUICK_SMALL, QUICK_LARGE = 5_000, 50_000
PHASES = ("check and plan", "infer", "publish", "in all")
_SAMPLE_S = 0.05


def write_requests(path: Path, number: int) -> None:
    draw = random.Random(number)  # noqa: S311 - work to repeat, not a secret
    with path.open("w") as stream:
        for index in range(number):
            words = " ".join(draw.choices(WORDS.split(), k=draw.randint(1, 8)))
            stream.write(json.dumps({"prompt": f"{index} {words}", "max_tokens": draw.randint(8, 32)}) + "\n")


class Clock(Silence):
    """Keeps when each phase began."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}

    def phase(self, text: str) -> None:
        self.began[text.partition(" ")[0]] = time.time()


class Memory:
    """This process's peaks of memory in bytes while the block lasts: all that is resident, and without shared pages."""

    def __init__(self) -> None:
        self.resident = self.own = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(_SAMPLE_S):
            memory = process.memory_info()
            self.resident = max(self.resident, memory.rss)
            self.own = max(self.own, memory.rss - memory.shared)


def run(number: int) -> dict[str, float]:
    """Seconds by phase, and peaks of memory in MiB, of a run over so many rows."""
    from pipelines import batch
    from schemas.settings import EngineSettings, RunSettings
    from tests.deterministic import Starts

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "requests.jsonl"
        write_requests(path, number)
        settings = RunSettings(
            inputs=(str(path),),
            output=str(Path(scratch) / "out"),
            served_names=("test",),
            engine=EngineSettings(cores=1),
            replicas=2,
        )
        clock = Clock()
        with Memory() as memory:
            summary = batch.run(settings, clock, Starts())
        assert summary.totals.num_answered == number, summary.totals
        published = max(path.stat().st_mtime for path in Path(scratch).glob("out/runs/*/*/part-*.parquet"))
    began = clock.began
    return {
        "check and plan": began["starting"] - began["checking"],
        "infer": summary.infer_s,
        "publish": published - began["publishing"],
        "in all": summary.total_s,
        "resident": memory.resident / 2**20,
        "own": memory.own / 2**20,
    }


def measure(number: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--rows", str(number)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A twentieth of the rows and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of both sizes.")] = 2,
    small: Annotated[int, typer.Option(help="Rows of the small size.")] = SMALL,
    large: Annotated[int, typer.Option(help="Rows of the large size.")] = LARGE,
    rows: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Rows per second and driver memory of a large run over those of a small one."""
    if rows is not None:
        print(json.dumps(run(rows)))
        return
    if quick:
        small, large, rounds = QUICK_SMALL, QUICK_LARGE, 1
    told: dict[int, list[dict[str, float]]] = {small: [], large: []}
    for turn in range(rounds):
        for number in (small, large) if turn % 2 == 0 else (large, small):
            told[number].append(measure(number))
    ours, theirs = told[large], told[small]

    def rates(name: str) -> Figure:
        sides = [[number / one[name] for one in told[number]] for number in (large, small)]
        return Figure(f"{name}, {large:,} rows / {small:,}", *sides, aim=0.9, unit="rows/s")

    def further(name: str) -> Figure:
        more = [(large - small) / (one[name] - other[name]) for one, other in zip(ours, theirs, strict=True)]
        return Figure(f"{name}, each further row / {small:,}", more, rates(name).peer, aim=None, unit="rows/s")

    def memory(name: str, words: str) -> Figure:
        sides = [[one[name] for one in side] for side in (ours, theirs)]
        return Figure(f"driver's memory, {words}, {large:,} rows / {small:,}", *sides, aim=1, unit="MiB")

    report(
        [
            *map(rates, PHASES),
            *map(further, PHASES),
            memory("resident", "resident"),
            memory("own", "without shared pages"),
        ],
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
