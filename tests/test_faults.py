"""Faults from without: a full disk, a replica that is killed while it stages. Nodes that go away are those of
`test_nodes.py`; a long random set is `benchmarks/chaos.py`."""

import subprocess
import threading
import time

import psutil
import pyarrow.parquet as pq
import pytest

from schemas.failures import StorageFailed
from tests.conftest import write_lines
from tests.deterministic import Starts

NUM_ROWS = 300


@pytest.fixture
def lines(tmp_path):
    rows = [{"prompt": f"slow:{0.1 + n / 50} row {n}", "request_id": f"{n}"} for n in range(NUM_ROWS)]
    return write_lines(tmp_path / "a.jsonl", *rows)


def assert_whole(run):
    assert run.table("responses")["id"].to_pylist() == [f"{n}" for n in range(NUM_ROWS)]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of half a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a small disk here")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_that_fills_up_ends_the_run_and_with_more_room_it_goes_on(tmp_path, small_disk, score):
    # Answers that are as long, and hardly compressible.
    text = [f"{n} " + " ".join(str(hash((n, word))) for word in range(100)) for n in range(200)]
    path = write_lines(tmp_path / "a.jsonl", *({"prompt": one, "request_id": f"{n}"} for n, one in enumerate(text)))
    with pytest.raises(StorageFailed, match=r"disk/out/\S+: can't be written \(no space left on device\)"):
        score(path, output=small_disk / "out")
    subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
    run = score(path, output=small_disk / "out")
    assert run.table("responses").num_rows == 200
    assert not list((small_disk / "out").rglob("*.tmp"))


def replicas():
    return [one for one in psutil.Process().children(recursive=True) if one.name().startswith("ray::MapWorker")]


def test_a_replica_that_is_killed_after_it_staged_answers_the_rest_alone(tmp_path, lines, score):
    staged_at_kill = []

    def kill_when_staged():
        until = time.monotonic() + 120
        while time.monotonic() < until:
            parts = list((tmp_path / "out").glob("_work/*/staged/*/*.parquet"))
            if parts and (alive := replicas()):
                staged_at_kill.append(sum(pq.read_metadata(part).num_rows for part in parts))
                for one in alive:
                    one.kill()
                return
            time.sleep(0.05)

    killer = threading.Thread(target=kill_when_staged)
    killer.start()
    run = score(lines, start=Starts())
    killer.join()
    assert_whole(run)
    attempts = run.table("usage")["attempt"].to_pylist()
    # What was staged before is kept; the rest was begun once more.
    assert staged_at_kill and attempts.count(1) >= staged_at_kill[0] and attempts.count(2) > 0
