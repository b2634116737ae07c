"""Ctrl-C in the middle of a run on the real engine: what is inside is finished, and the same command goes on.

And a kill while an engine starts: nothing is left of it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from jobs.exits import ExitStatus
from tests.conftest import ROOT, read_table, write_lines

pytestmark = pytest.mark.engine

NUM_ROWS = 160


@pytest.fixture
def claims():
    """A folder for a process's own claims of cores; of a short path, since Ray puts its sockets there."""
    with tempfile.TemporaryDirectory(prefix="o", ignore_cleanup_errors=True) as folder:
        yield folder


def staged_rows(output):
    return sum(pq.read_metadata(part).num_rows for part in output.glob("_work/*/staged/*/*.parquet"))


@pytest.mark.slow
def test_the_first_ctrl_c_keeps_what_is_done_and_the_same_command_finishes(tmp_path, claims):
    rows = [
        {"prompt": f"Count from {n}:", "max_tokens": 40 + n % 60, "ignore_eos": True, "temperature": 0}
        for n in range(NUM_ROWS)
    ]
    lines, output = write_lines(tmp_path / "a.jsonl", *rows), tmp_path / "out"
    command = [Path(sys.executable).parent / "overnight", "score", "--input", lines, "--output", output]
    command += ["--engine", "kv_cache_gib=0.5", "--engine", "max_num_seqs=8", "--no-dedup"]
    told = {"cwd": ROOT, "env": {**os.environ, "TMPDIR": claims}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, start_new_session=True, **told)
    try:
        until = time.monotonic() + 400
        while not staged_rows(output) and time.monotonic() < until and process.poll() is None:
            time.sleep(0.2)
        below = psutil.Process(process.pid).children(recursive=True)
        # What a terminal does: the whole group gets it.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == ExitStatus.INTERRUPTED, errors
    assert "interrupted" in errors.splitlines()[-1] and "Traceback" not in errors
    _, alive = psutil.wait_procs(below, timeout=20)
    assert not alive
    kept = staged_rows(output)
    assert 0 < kept < NUM_ROWS
    done = subprocess.run(command, text=True, check=False, **told)
    assert done.returncode == ExitStatus.OK, done.stderr
    assert read_table(output, "responses")["source_line"].to_pylist() == list(range(1, NUM_ROWS + 1))


STARTS = """
from pipelines.vllm_engine import EngineStart
from schemas.settings import EngineSettings
if __name__ == "__main__":
    EngineStart(None, (), EngineSettings(kv_cache_gib=0.5, cores=1), 1, 1)()
"""


@pytest.mark.slow
def test_an_engine_that_is_starting_ends_with_the_process_that_started_it(tmp_path, claims):
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    environment = {**os.environ, "TMPDIR": claims, "PYTHONPATH": str(ROOT)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, script], env=environment, **quiet)
    try:
        names, until = [], time.monotonic() + 300
        while not any("Worker" in name for name in names) and time.monotonic() < until:
            time.sleep(0.1)
            below = psutil.Process(process.pid).children(recursive=True)
            names = [one.name() for one in below]
    finally:
        process.kill()
        process.wait()
    assert any("Worker" in name for name in names)
    _, alive = psutil.wait_procs(below, timeout=10)
    for one in alive:
        one.kill()
    assert not alive
