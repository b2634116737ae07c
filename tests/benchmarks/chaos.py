"""What a run is worth that is killed again and again: rows lost, rows twice, answers that differ, and work done again.

A Ray cluster of two nodes on this machine, a core each; a job over both. At random moments (a printed seed) something
is killed: the process of an engine, a replica's process, the second node's raylet (a new node joins), or the job
itself, which is then run again, until it is done. Each finished run is compared with one that nobody disturbed, row by
row, but for times, attempts and what was found in a cache. Requests are greedy and the engine computes in float32, so
that equal requests have equal answers. There are as many runs as it takes for all kills, which come at any time,
also while a run starts, plans and publishes.

`--engine test` is the tests' deterministic engine, which has no process of its own to be killed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from schemas.settings import EngineSettings  # noqa: E402 - found below the root
from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides.watched import Silence, WatchedStart, read_watched  # noqa: E402 - found below the root

Kind = Literal["real", "test"]
# How long something is left alone, in seconds, and how many rows a run has.
PAUSES: dict[str, tuple[float, float]] = {"real": (5.0, 45.0), "test": (0.5, 12.0)}
NUM_ROWS: dict[str, int] = {"real": 400, "test": 2_000}
REPLICA, ENGINE = "ray::MapWorker(MapBatches(Replica))", ("VLLM::EngineCor", "VLLM::Worker")
SETTINGS = EngineSettings(cores=1, dtype="float32", kv_cache_gib=1)
# What differs from run to run though nothing is wrong.
PASSING = {"created", "queue_ms", "first_token_ms", "total_ms", "replica", "attempt", "attempts", "cached_tokens"}


def write_requests(path: Path, kind: Kind) -> None:
    with path.open("w") as stream:
        for index in range(NUM_ROWS[kind]):
            if kind == "test":
                body: dict[str, Any] = {"prompt": f"slow:{0.2 + index % 40 / 20} row {index}"}
            else:
                body = {"prompt": f"{index} is a number, and", "max_tokens": 8 + index % 25, "temperature": 0}
            stream.write(json.dumps(body | {"request_id": str(index)}) + "\n")
            if index % 50 == 0:
                stream.write("no request\n")


def make_start(kind: Kind, folder: str) -> WatchedStart:
    from pipelines.vllm_engine import EngineStart
    from tests.deterministic import Starts

    return WatchedStart(Starts() if kind == "test" else EngineStart(None, (), SETTINGS, 2, 1), folder)


def drive(kind: Kind, path: str, output: str, folder: str) -> None:
    """The job: what is run again until it is done."""
    from pipelines import batch
    from schemas.settings import RunSettings

    batch.run(RunSettings(inputs=(path,), output=output, engine=SETTINGS), Silence(), make_start(kind, folder))


def find(names: tuple[str, ...]) -> list[psutil.Process]:
    """The processes below this one whose names, or command lines, begin so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith(names) or " ".join(process.cmdline()).startswith(names):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


class Chaos:
    """Two nodes, a job, and who kills them."""

    def __init__(self, kind: Kind, num_kills: int, seed: int) -> None:
        from ray.cluster_utils import Cluster

        self.kind, self.left, self.draw = kind, num_kills, random.Random(seed)  # noqa: S311 - to be repeated
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        self.node = self.cluster.add_node(num_cpus=1)
        self.kills: Counter[str] = Counter()
        self.again: list[int] = []

    def kill_one(self, driver: "subprocess.Popen[bytes]") -> str | None:
        """Kill something that is there; what it was."""
        victims = ["driver", "node", "replica", *(["engine"] if self.kind == "real" else [])]
        victim = self.draw.choice(victims)
        if victim == "driver":
            os.killpg(driver.pid, signal.SIGKILL)
        elif victim == "node":
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.node = self.cluster.add_node(num_cpus=1)
        else:
            alive = find((REPLICA,) if victim == "replica" else ENGINE)
            if not alive:
                return None
            self.draw.choice(alive).kill()
        return victim

    def run(self, path: Path, output: Path, folder: Path) -> int:
        """Run the job until it is done; how often it was begun."""
        for number in range(1, 1_000):
            command = [
                sys.executable,
                __file__,
                "--drive",
                json.dumps([self.kind, str(path), str(output), str(folder)]),
            ]
            environment = {**os.environ, "RAY_ADDRESS": self.cluster.address, "VLLM_LOGGING_LEVEL": "ERROR"}
            driver = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
            while driver.poll() is None:
                try:
                    driver.wait(self.draw.uniform(*PAUSES[self.kind]))
                except subprocess.TimeoutExpired:
                    if not self.left:
                        continue
                    if (victim := self.kill_one(driver)) is not None:
                        self.left -= 1
                        self.kills[victim] += 1
                        print(f"{time.strftime('%H:%M:%S')} killed: {victim} ({phase(output)})", file=sys.stderr)
            if driver.returncode == 0:
                return number
        raise RuntimeError("the job doesn't come to its end")


def phase(output: Path) -> str:
    """What the run says that it does."""
    for path in output.glob("_work/*/status.json"):
        try:
            return str(json.loads(path.read_text())["phase"])
        except (OSError, ValueError):
            continue
    return "no work folder"


def read(output: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """All rows of a run's three tables by place, without what passes."""
    manifest = json.loads((output / "manifest.json").read_text())
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file in manifest["files"]:
        table: pa.Table = pq.read_table(output / "runs" / manifest["run_id"] / file["path"])
        name = file["path"].partition("/")[0]
        for row in table.to_pylist():
            told = {key: value for key, value in row.items() if key not in PASSING}
            if name == "responses":
                told["response"] = {
                    key: value
                    for key, value in json.loads(row["response"]).items()
                    if key not in ("id", "created", "usage")
                }
            place = (name, row["source_file"], row["source_line"])
            assert place not in rows, f"{place} is there twice"
            rows[place] = told
    return rows


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Six kills, with the test engine.")] = False,
    kills: Annotated[int, typer.Option(help="How many kills.")] = 50,
    engine: Annotated[str, typer.Option(help="real, or test.")] = "real",
    seed: Annotated[int | None, typer.Option(help="What decides the moments and the victims.")] = None,
    drive_: Annotated[str | None, typer.Option("--drive", hidden=True)] = None,
) -> None:
    """Rows lost, doubled or changed by kills at random moments, and rows computed again."""
    if drive_ is not None:
        drive(*json.loads(drive_))
        return
    kind: Kind = "test" if quick or engine == "test" else "real"
    seed = int(time.time()) if seed is None else seed
    print(f"seed {seed}", file=sys.stderr)
    chaos = Chaos(kind, 0, seed)
    wrong, again, begun, num_runs = 0, 0, 0, 0
    try:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "requests.jsonl"
            write_requests(path, kind)

            def run(name: str) -> tuple[dict[tuple[Any, ...], dict[str, Any]], int, int]:
                output, folder = Path(scratch) / name, Path(scratch) / f"{name}-watched"
                folder.mkdir()
                num_begun = chaos.run(path, output, folder)
                # Not what is asked to see whether an engine lives.
                asked = [one["id"] for seen in read_watched(folder) for one in seen if one["id"] != "check"]
                return read(output), num_begun, len(asked) - len(set(asked))

            expected, _, _ = run("undisturbed")
            chaos.left = 6 if quick else kills
            while chaos.left:
                num_runs += 1
                rows, num_begun, repeated = run(f"run-{num_runs}")
                wrong += sum(rows.get(place) != row for place, row in expected.items()) + len(rows.keys() - expected)
                begun, again = begun + num_begun, again + repeated
                print(f"run {num_runs}: begun {num_begun} times, {repeated} rows again", file=sys.stderr)
    finally:
        chaos.cluster.shutdown()
    told = sum(chaos.kills.values())
    victims = ", ".join(f"{number} {name}" for name, number in sorted(chaos.kills.items()))
    report(
        [
            Figure(
                f"rows lost, doubled or changed by {told} kills ({victims})", [float(wrong)], [], aim=0, unit="rows"
            ),
            Figure("rows computed again for each kill", [again / max(1, told)], [], aim=None, unit="rows"),
            Figure("how often a job was begun", [float(begun)], [float(num_runs)], aim=None, unit="times"),
        ],
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
