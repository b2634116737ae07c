"""What a second node is worth, and what it costs to lose one in mid-run.

Nodes are raylets on this machine, a core each. The same work goes to one node, to two, and to two of which the second
is killed when half of the rows are staged; nothing comes in its place. Rounds are interleaved. Measured, from the first
submitted to the last staged row:

- scaling: rows per second of two replicas of a core each, over those of one replica of a core;
- what a lost node costs: seconds that the run with the kill takes longer than the undisturbed one of two nodes; and
  longer than it needs at least, which is the rest of the work on one replica. In it, seconds in which the replica that
  lives has nothing to do: work that the dead one had taken isn't taken from it, but waits until it comes up again.

`--quick` is less work with the tests' deterministic engine, whose rows take a time that doesn't depend on the machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow.parquet as pq
import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides.watched import Silence, WatchedStart, read_watched  # noqa: E402 - found below the root
from tests.benchmarks.sides.work import make_requests, write_lines  # noqa: E402 - found below the root

Kind = Literal["real", "test"]
NUM_ROWS: dict[str, int] = {"real": 192, "test": 60}
# Gaps between answers that are longer than this are idle, in seconds.
_IDLE_S = 1.0


def write_work(path: Path, kind: Kind) -> None:
    if kind == "real":
        write_lines(path, make_requests(NUM_ROWS[kind]))
    else:
        write_lines(path, ({"prompt": f"slow:1 row {index}"} for index in range(NUM_ROWS[kind])))


def drive(kind: Kind, path: str, output: str, folder: str) -> None:
    """The run, on the cluster that the environment names; prints its seconds."""
    from pipelines import batch
    from pipelines.vllm_engine import EngineStart
    from schemas.settings import EngineSettings, RunSettings
    from tests.deterministic import Starts

    engine = EngineSettings(cores=1, kv_cache_gib=1, max_num_seqs=2 if kind == "test" else 32)
    start = WatchedStart(Starts() if kind == "test" else EngineStart(None, (), engine, 2, 1), folder)
    names = ("test",) if kind == "test" else ()
    settings = RunSettings(inputs=(path,), output=output, engine=engine, served_names=names)
    summary = batch.run(settings, Silence(), start)
    assert summary.totals.num_answered == NUM_ROWS[kind], summary.totals
    print(json.dumps(summary.infer_s))


def run(kind: Kind, num_nodes: int, is_killed: bool) -> dict[str, Any]:
    """Seconds of a run, when its node was killed, how many rows were done by then, and what each engine answered."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as scratch:
        path, output, folder = (Path(scratch) / name for name in ("requests.jsonl", "out", "watched"))
        folder.mkdir()
        write_work(path, kind)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        last = [cluster.add_node(num_cpus=1) for _ in range(num_nodes - 1)]
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        command = [sys.executable, __file__, "--drive", json.dumps([kind, *map(str, (path, output, folder))])]
        killed_at = None
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as driver:
            while driver.poll() is None:
                time.sleep(0.2)
                if is_killed and killed_at is None and num_staged(output) >= NUM_ROWS[kind] / 2:
                    killed_at = time.time()
                    cluster.remove_node(last[-1], allow_graceful=False)
            said = driver.communicate()[0]
        cluster.shutdown()
        assert driver.returncode == 0
        ids = [row["source_line"] for row in answers(output)]
        assert len(ids) == len(set(ids)) == NUM_ROWS[kind], "rows are missing, or there twice"
        seen = [[one for one in some if one["id"] != "check"] for some in read_watched(folder)]
    return {"seconds": json.loads(said.splitlines()[-1]), "killed_at": killed_at, "seen": seen}


def num_staged(output: Path) -> int:
    """Rows that are staged by now."""
    total = 0
    for part in output.glob("_work/*/staged/*/*.parquet"):
        try:
            total += pq.read_metadata(part).num_rows
        except (OSError, ValueError):  # it is superseded, or removed, at this moment
            continue
    return total


def answers(output: Path) -> list[dict[str, Any]]:
    manifest = json.loads((output / "manifest.json").read_text())
    folder = output / "runs" / manifest["run_id"] / "responses"
    return [row for part in sorted(folder.glob("*.parquet")) for row in pq.read_table(part).to_pylist()]


def idle_s(lost: dict[str, Any]) -> float:
    """Seconds after the kill, until the last answer of all, in which the engine that lived had no request."""
    end = max(one["gone"] for some in lost["seen"] for one in some)
    # The one that answered before the kill and after it.
    at = lost["killed_at"]
    alive = [some for some in lost["seen"] if min(o["came"] for o in some) < at < max(o["gone"] for o in some)]
    busy_until, idle = at, 0.0
    for one in sorted((one for some in alive for one in some if one["gone"] > at), key=lambda one: one["came"]):
        gap = one["came"] - busy_until
        idle += gap if gap > _IDLE_S else 0.0
        busy_until = max(busy_until, one["gone"])
    return idle + max(0.0, end - busy_until)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round, with the test engine.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of all sides.")] = 2,
    drive_: Annotated[str | None, typer.Option("--drive", hidden=True)] = None,
) -> None:
    """Rows per second of two nodes over those of one, and what a node that is lost costs."""
    if drive_ is not None:
        drive(*json.loads(drive_))
        return
    kind: Kind = "test" if quick else "real"
    sides = {"one": (1, False), "two": (2, False), "lost": (2, True)}
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(1 if quick else rounds):
        for name in sides if turn % 2 == 0 else reversed(list(sides)):
            told[name].append(run(kind, *sides[name]))
            print(f"{name}: {told[name][-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    one, two, lost = ([done["seconds"] for done in told[name]] for name in sides)
    speeds = [[NUM_ROWS[kind] / seconds for seconds in side] for side in (two, one)]
    # Half on two replicas, half on one.
    least = [pair / 2 + single / 2 for pair, single in zip(two, one, strict=True)]
    more = [[took - other for took, other in zip(lost, side, strict=True)] for side in (two, least)]
    report(
        [
            Figure("two replicas of a core / one replica of a core", *speeds, aim=1.9, unit="rows/s"),
            Figure("added by losing a node at half", more[0], [], aim=None, unit="s"),
            Figure("of it, more than the rest takes one replica", more[1], [], aim=None, unit="s"),
            Figure("idle time of the replica that lives", [idle_s(done) for done in told["lost"]], [], None, "s"),
        ],
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
