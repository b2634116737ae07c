"""How long two replicas take over answers of very different lengths, against the least that they could.

Work: requests of which most get 16 to 48 tokens and one in twenty 256 to 512 (`ignore_eos`: lengths are exact), the
long ones last in the file. Two replicas of a core each, the real engine, `batch.run` as a person starts it.

- makespan: from the first submitted request of the run to its last staged row (`timings_s.infer` of the manifest);
- floor: the larger of two times, both measured in the same round on the same machine:
  * all the run's tokens at the best rate of the two replicas together. The rate is that of a second run with the same
    prompts and as many tokens, but all answers of one length, so that both replicas are full until they end: the sum
    over the replicas of tokens by the time from its first request to its last;
  * the longest answer alone: the longest request by itself in such a replica, with the other core idle.

No order reaches the floor where the two are near each other, which is why there are many requests: a step takes some
time however few sequences it computes, and some for each of them. A run can't take fewer steps than its longest answer
has tokens; where that is more than its tokens over the places of the engines, steps are emptier than those that the
rate is measured in.

Also told: seconds between the starts, and between the ends, of the two replicas (first and last request), and the
makespan over the floor counted from when the later replica was up.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides.watched import Silence, WatchedStart, read_watched  # noqa: E402 - found below the root

WORDS = "the river wind stone letter garden night bread paper market winter door road voice light water"
NUM_REQUESTS, NUM_QUICK = 2_000, 200
SHORT, LONG = (16, 48), (256, 512)
LONG_EVERY = 20


def make_lengths(number: int) -> list[int]:
    """Tokens of each answer, the long ones last; the longest is as long as any may be."""
    draw = random.Random(number)  # noqa: S311 - work to repeat, not a secret
    num_long = max(1, number // LONG_EVERY)
    short = [draw.randint(*SHORT) for _ in range(number - num_long)]
    return short + [draw.randint(*LONG) for _ in range(num_long - 1)] + [LONG[1]]


def write_requests(path: Path, lengths: list[int]) -> None:
    draw = random.Random(1)  # noqa: S311 - work to repeat, not a secret
    with path.open("w") as stream:
        for index, length in enumerate(lengths):
            prompt = f"{index}: " + " ".join(draw.choices(WORDS.split(), k=draw.randint(8, 24)))
            body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0}
            stream.write(json.dumps(body) + "\n")


def run(lengths: list[int], num_replicas: int) -> dict[str, Any]:
    """A whole run: its makespan in seconds, and for each replica when it was first asked, when it last answered, and
    how many tokens it generated."""
    from pipelines import batch
    from pipelines.vllm_engine import EngineStart
    from schemas.settings import EngineSettings, RunSettings

    with tempfile.TemporaryDirectory() as scratch:
        path, folder = Path(scratch) / "requests.jsonl", Path(scratch) / "watched"
        folder.mkdir()
        write_requests(path, lengths)
        engine = EngineSettings(cores=1)
        settings = RunSettings(
            inputs=(str(path),), output=str(Path(scratch) / "out"), engine=engine, replicas=num_replicas
        )
        start = WatchedStart(EngineStart(None, (), engine, num_replicas, 1), str(folder))
        summary = batch.run(settings, Silence(), start)
        assert summary.totals.completion_tokens == sum(lengths)
        replicas = [
            {
                "began": min(one["came"] for one in seen),
                "ended": max(one["gone"] for one in seen),
                "tokens": sum(one["tokens"] for one in seen),
                "rows": len(seen),
                "long": sum(one["tokens"] >= LONG[0] for one in seen),
            }
            # One has nothing where the other was done before it was up.
            for seen in read_watched(folder)
        ]
    return {"makespan": summary.infer_s, "replicas": replicas}


def measure(kind: str, number: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--kind", kind, "--requests", str(number)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    told = json.loads(done.stdout.splitlines()[-1])
    print(kind, json.dumps(told), file=sys.stderr)
    return told


def run_kind(kind: str, number: int) -> dict[str, Any]:
    lengths = make_lengths(number)
    if kind == "alone":
        return run([max(lengths)], 1)
    if kind == "even":
        # As many tokens, to one or so.
        mean, more = divmod(sum(lengths), number)
        lengths = [mean + (index < more) for index in range(number)]
    return run(lengths, 2)


def gap(told: dict[str, Any], what: str) -> float:
    times = [replica[what] for replica in told["replicas"]]
    return max(times) - min(times)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the requests and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of all sides.")] = 2,
    requests: Annotated[int, typer.Option(help="How many requests.")] = NUM_REQUESTS,
    kind: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Makespan of two replicas over the least that they could take."""
    if kind is not None:
        print(json.dumps(run_kind(kind, requests)))
        return
    number = NUM_QUICK if quick else requests
    told: dict[str, list[dict[str, Any]]] = {"mixed": [], "even": [], "alone": []}
    for turn in range(1 if quick else rounds):
        for name in told if turn % 2 == 0 else reversed(list(told)):
            told[name].append(measure(name, number))
    total = sum(make_lengths(number))
    rates = [sum(r["tokens"] / (r["ended"] - r["began"]) for r in one["replicas"]) for one in told["even"]]
    by_rate = [total / rate for rate in rates]
    alone = [one["makespan"] for one in told["alone"]]
    floors = [max(pair) for pair in zip(by_rate, alone, strict=True)]
    mixed = told["mixed"]
    makespans = [one["makespan"] for one in mixed]
    since_both = [one["makespan"] - gap(one, "began") for one in mixed]
    report(
        [
            Figure("makespan / floor", makespans, floors, aim=1.05, unit="s"),
            Figure("from when both replicas were up / floor", since_both, floors, aim=None, unit="s"),
            Figure("all tokens at the rate of full replicas", by_rate, [], aim=None, unit="s"),
            Figure("the longest answer alone", alone, [], aim=None, unit="s"),
            Figure("between the replicas' starts", [gap(one, "began") for one in mixed], [], aim=None, unit="s"),
            Figure("between the replicas' ends", [gap(one, "ended") for one in mixed], [], aim=None, unit="s"),
        ],
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
