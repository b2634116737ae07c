"""Publishing, and going on with what is done, against what the bytes alone would take.

Work: outcomes of a run as replicas stage them, in many small parts, in the order of a plan rather than of the input.

- publish: the staged parts sorted into input order and written as the three tables, by Ray Data, and the driver's peak
  of memory while it does so. The peer writes the same rows with `pyarrow.parquet.write_table`, in as large row groups,
  with the same compression, from tables that stand in memory sorted already. In rows per second;
- look: what a run that was broken off spends on learning which of its chunks are done, when all are.
"""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root

NUM_ROWS, NUM_QUICK = 1_000_000, 50_000
ROWS_A_PART = 250
WORDS = [
    "the",
    "river",
    "wind",
    "stone",
    "letter",
    "garden",
    "night",
    "bread",
    "paper",
    "market",
    "winter",
    "door",
    "road",
    "voice",
    "light",
    "water",
]


def stage(work: Path, number: int) -> None:
    """Write outcomes of `number` rows, one in a hundred failed, as a run's staged parts."""
    from pipelines.staged import Stager
    from pipelines.storage import Folder
    from schemas import tables

    draw = random.Random(number)  # noqa: S311 - work to repeat, not a secret
    stager = Stager(Folder.at(str(work)))
    lines = list(range(1, number + 1))
    draw.shuffle(lines)
    now = datetime.now(UTC)
    for chunk, start in enumerate(range(0, number, ROWS_A_PART)):
        rows = []
        for line in lines[start : start + ROWS_A_PART]:
            text = " ".join(draw.choices(WORDS, k=24))
            row: dict[str, Any] = {
                "source_index": 0,
                "id": f"a.jsonl:{line}",
                "source_file": "a.jsonl",
                "source_line": line,
                "source_offset": line * 200,
                "endpoint": "/v1/completions",
                "request": f'{{"prompt": "{text}", "max_tokens": 32}}',
                "fingerprint": f"{line:032x}",
                "num_prompt_tokens": 24,
                "num_output_tokens": 32,
                "is_deduplicated": False,
                "is_carried": False,
            }
            if line % 100 == 0:
                row |= {"stage": "infer", "status_code": 400, "type": "BadRequestError", "reason": "asked_to_fail"}
                row |= {"message": "no", "raw": b"{}", "attempts": 1}
            else:
                row |= {"model": "test", "prompt": text, "text": [text], "finish_reason": ["stop"], "created": now}
                row |= {"response": f'{{"choices": [{{"text": "{text}"}}]}}', "prompt_tokens": 24, "attempt": 1}
                row |= {"completion_tokens": 32, "total_tokens": 56, "total_ms": 1.0, "replica": "a"}
            rows.append(row)
        stager.put(chunk, 1, 0, pa.Table.from_pylist(rows, schema=tables.OUTCOMES))


def publish(work: Path, number: int) -> dict[str, float]:
    """Publish what is staged; seconds of looking and of publishing, and bytes of memory that publishing added."""
    from pipelines import infer, staged, write
    from pipelines.batch import StagedReader
    from pipelines.cluster import connected
    from pipelines.storage import Folder

    folder = Folder.at(str(work))
    stager = staged.Stager(folder)
    with connected(False):
        started = time.perf_counter()
        chunks = [{"number": chunk, "num_rows": min(ROWS_A_PART, number)} for chunk in sorted(stager.chunks())]
        done = infer.look_at_staged(chunks, StagedReader(stager), False)
        look_s = time.perf_counter() - started
        assert len(done) == len(chunks)
        with watched() as peak:
            started = time.perf_counter()
            parts = [part for chunk in done for part in chunk.parts]
            write.publish_tables(folder.join("published"), staged.sorted_outcomes(folder, parts), number)
            publish_s = time.perf_counter() - started
    return {"look_s": look_s, "publish_s": publish_s, "mib": peak[0] / 2**20}


@contextmanager
def watched() -> Iterator[list[int]]:
    """Bytes by which this process's memory grows in the block at most, without what it shares with others: pages of
    Ray's object store stay with whoever has read them."""
    process, stop = psutil.Process(), threading.Event()

    def own() -> int:
        memory = process.memory_info()
        return memory.rss - memory.shared

    before, peak = own(), [0]

    def sample() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], own() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def bare(work: Path) -> float:
    """Seconds to write the published tables once more, from memory."""
    read = {path.parent.name: [] for path in (work / "published").glob("*/*.parquet")}
    for path in sorted((work / "published").glob("*/*.parquet")):
        read[path.parent.name].append(pq.read_table(path))
    tables = {name: pa.concat_tables(parts) for name, parts in read.items()}
    rows_each = {name: max(1, table.num_rows * (32 << 20) // max(1, table.nbytes)) for name, table in tables.items()}
    started = time.perf_counter()
    for name, table in tables.items():
        pq.write_table(table, work / f"{name}.parquet", compression="zstd", row_group_size=rows_each[name])
    return time.perf_counter() - started


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A twentieth of the rows.")] = False,
    rows: Annotated[int, typer.Option(help="How many rows.")] = NUM_ROWS,
    side: Annotated[str | None, typer.Option(hidden=True)] = None,
    work: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Rows published a second over those of a bare writer; memory; seconds to go on with what is done."""
    number = NUM_QUICK if quick else rows
    if side is not None and work is not None:
        print(json.dumps(publish(work, number) if side == "publish" else {"bare_s": bare(work)}))
        return
    with tempfile.TemporaryDirectory() as scratch:
        stage(Path(scratch), number)
        told: dict[str, float] = {}
        for name in ("publish", "bare"):
            command = [sys.executable, __file__, "--side", name, "--work", scratch, "--rows", str(number)]
            done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            told |= json.loads(done.stdout.splitlines()[-1])
    ours, peer = number / told["publish_s"], number / told["bare_s"]
    report(
        [
            Figure("rows published a second / bare write", [ours], [peer], 0.5, "rows/s"),
            Figure("memory that publishing adds to the driver", [told["mib"]], [], None, "MiB"),
            Figure("to see that all chunks are done", [told["look_s"]], [], None, "s"),
        ],
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
