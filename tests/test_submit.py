"""Runs as jobs of a cluster that `ray start --head` has started, by Ray's own command and by `overnight submit`."""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.exits import ExitStatus
from pipelines import submission
from schemas.failures import JobLost
from tests.conftest import DEMO, ROOT, overnight, read_published, write_lines
from tests.head import Head, started_head

GOOD = [{"prompt": f"row {n}"} for n in range(5)]
BAD = [{"prompt": f"fail {n}"} for n in range(5)]
# By name: lines, more options, what the job finds in its environment, and its exit status.
RUNS = {
    "row errors": ([*GOOD, BAD[0]], (), {}, ExitStatus.ROW_ERRORS),
    "all good": (GOOD, (), {}, ExitStatus.OK),
    "row errors that are allowed": ([*GOOD, BAD[0]], ("--allow-errors",), {}, ExitStatus.OK),
    "all rows failed": (BAD, ("--allow-errors",), {}, ExitStatus.ROW_ERRORS),
    "more errors than allowed": (BAD, ("--max-errors", "0"), {}, ExitStatus.TOO_MANY_ERRORS),
    "no such input": (None, (), {}, ExitStatus.USAGE),
    "no engine": (GOOD, (), {"TEST_ENGINE_ERROR": "no GPU is there"}, ExitStatus.FAILED),
}


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with started_head() as started:
        yield started


def job_of(text: str) -> str:
    return re.search(r"raysubmit_\w+", text)[0]


def told(output: Path) -> str:
    """What the run's own file says of its end."""
    if (output / "manifest.json").exists():
        return "published"
    return json.loads(next(output.glob("_work/*/status.json")).read_text())["error"]


@pytest.mark.parametrize(
    "name", [name if name == "row errors" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_job_ends_with_the_status_of_its_run_and_the_cluster_says_the_same(tmp_path, head, name):
    lines, options, environment, status = RUNS[name]
    path, output = tmp_path / "a.jsonl", tmp_path / "out"
    if lines is not None:
        write_lines(path, *lines)
    (tmp_path / "env.yaml").write_text(json.dumps({"env_vars": environment}))
    arguments = ["--working-dir", ".", "--runtime-env", str(tmp_path / "env.yaml")]
    arguments += ["score", "--input", str(path), "--output", str(output), *options]
    done = head.run("overnight", "submit", *arguments)
    assert done.returncode == status, done.stdout
    assert "Traceback" not in done.stdout
    assert json.loads((output / "summary.json").read_text())["exit_status"] == status
    info = head.job(job_of(done.stdout))
    assert (info["status"], info["driver_exit_code"]) == ("FAILED" if status else "SUCCEEDED", status)
    if lines is None:
        assert "a.jsonl: no such file or folder" in done.stdout
    elif status == ExitStatus.FAILED:
        assert told(output) == "no GPU is there"
    elif status == ExitStatus.TOO_MANY_ERRORS:
        assert "--max-errors allows 0" in told(output)
    else:
        assert told(output) == "published" and re.search(r"^\d\d:\d\d:\d\d publishing$", done.stdout, re.M)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the command is, to run in: the README's lines write below it."""
    for name in ("jobs", "pipelines", "schemas", "tests"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "checkout"


@pytest.mark.slow
def test_the_readmes_lines_do_the_same(head, checkout):
    readme = (ROOT / "README.md").read_text()
    start, *lines = re.findall(r"^\$ (.+)$", readme[readme.index("## Submit to a cluster") :], re.M)[:3]
    assert start == "ray start --head" and [line.split()[0] for line in lines] == ["ray", "overnight"]
    for line, folder in zip(lines, ("demo", "demo-2"), strict=True):
        done = head.run("bash", "-c", line, cwd=checkout, RAY_AUTH_MODE="token")
        assert done.returncode == 0, done.stdout
        rows = read_published(checkout / "out" / folder)["rows"]
        assert rows["input"] == len(DEMO.read_text().splitlines()) and rows["responses"] > 0


def started(head: Head, tmp_path: Path, *more: str) -> tuple[subprocess.Popen, Path, str]:
    """A job that has answered twenty rows and waits for one, and its output folder and id."""
    has_begun = tmp_path / "begun"
    rows = [{"prompt": f"row {n}"} for n in range(20)] + [{"prompt": f"late:{has_begun}"}, {"prompt": "slow:120 rest"}]
    path, output = write_lines(tmp_path / "a.jsonl", *rows), tmp_path / "out"
    command = [*["overnight", "submit", "--working-dir", ".", "score", "--input"], path, "--output", output, *more]
    process = subprocess.Popen(
        command, cwd=ROOT, env=head.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    job = job_of(process.stdout.readline())
    until = time.monotonic() + 120
    while not has_begun.exists():
        assert process.poll() is None and time.monotonic() < until, process.stdout.read()
        time.sleep(0.05)
    # They are answered by now, and not yet due to be staged.
    time.sleep(1)
    return process, output, job


def num_staged(output: Path) -> int:
    return sum(pq.read_metadata(part).num_rows for part in output.glob("_work/*/staged/*/*.parquet"))


@pytest.mark.slow
def test_a_job_that_is_stopped_keeps_what_it_has_finished(tmp_path, head):
    process, output, job = started(head, tmp_path)
    assert num_staged(output) == 0
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == ExitStatus.TERMINATED and "is stopped; what it has finished is kept" in said
    assert head.wait_until_ended(job)["status"] == "STOPPED"
    assert num_staged(output) == 21
    followed = head.run("overnight", "submit", "--follow", job)
    assert followed.returncode == ExitStatus.TERMINATED
    assert "was stopped; what it had finished is kept" in followed.stdout


@pytest.mark.slow
def test_ctrl_c_lets_go_of_a_job_and_it_goes_on(tmp_path, head):
    process, _, job = started(head, tmp_path)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == ExitStatus.INTERRUPTED and f"job {job} goes on" in said and "Traceback" not in said
    assert head.job(job)["status"] == "RUNNING"
    stopped = head.run("ray", "job", "stop", job, RAY_AUTH_MODE="token")
    assert stopped.returncode == 0 and head.job(job)["status"] == "STOPPED"


@pytest.mark.slow
def test_a_run_that_is_terminated_keeps_what_it_has_finished(tmp_path, head):
    """As `ray job stop` does it, but on a Ray of its own."""
    has_begun = tmp_path / "begun"
    rows = [{"prompt": f"row {n}"} for n in range(20)] + [{"prompt": f"late:{has_begun}"}, {"prompt": "slow:120 rest"}]
    path, output = write_lines(tmp_path / "a.jsonl", *rows), tmp_path / "out"
    environment = {name: value for name, value in head.environment.items() if name != "RAY_API_SERVER_ADDRESS"}
    with subprocess.Popen(
        ["overnight", "score", "--input", path, "--output", output],
        cwd=ROOT,
        env={**environment, "RAY_ADDRESS": head.address, "RAY_AUTH_MODE": "token"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until = time.monotonic() + 120
        while not has_begun.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1)
        assert num_staged(output) == 0
        process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        while num_staged(output) < 21 and time.monotonic() < sent + 3:
            time.sleep(0.05)
        assert num_staged(output) == 21, "within the three seconds that a job has"
        said = process.communicate(timeout=60)[1]
    assert process.returncode == ExitStatus.TERMINATED and "terminated; what is finished is kept" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "submit: found nothing, expected a verb and its options: check, export, nightly, report, score"),
        (("--", "python", "jobs/score.py"), "submit: found python, expected a verb"),
        (("score", "--output", "out"), "--output out: the cluster removes the folder that a job runs in"),
        (("score", "--output=out"), "--output out: the cluster removes the folder"),
        (("--follow", "raysubmit_1", "score"), "--follow: found a verb, too"),
        (("--runtime-env", "nowhere.yaml", "score"), "--runtime-env nowhere.yaml: "),
        (("--address", "http://127.0.0.1:1", "score"), "--address http://127.0.0.1:1: no Ray cluster answers there"),
        (("--address", "anywhere", "score"), "--address anywhere: expected that of the cluster's dashboard"),
    ],
)
def test_wrong_usage_is_one_line_and_submits_nothing(arguments, words):
    done = overnight("submit", *arguments)
    assert done.status == ExitStatus.USAGE and done.out == ""
    assert len(done.err.splitlines()) == 1 and words in done.err


def test_what_a_cluster_refuses_is_one_line(head, tmp_path):
    unknown = head.run("overnight", "submit", "--follow", "raysubmit_1")
    nowhere = head.run("overnight", "submit", "--working-dir", "nowhere", "score")
    with_wrong_token = head.run("overnight", "submit", "score", RAY_AUTH_TOKEN="wrong" * 8)
    for done, words in (
        (unknown, "raysubmit_1: the cluster knows no such job"),
        (nowhere, "--working-dir nowhere: no such folder"),
        (with_wrong_token, "the cluster wants its token"),
    ):
        assert done.returncode == ExitStatus.USAGE and words in done.stdout.splitlines()[-1]
        assert "Traceback" not in done.stdout


def test_what_makes_a_folder_too_large_is_named(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / ".venv").mkdir()
    for name, mib in (("data/a", 3), ("data/b", 2), ("weights", 4), (".venv/lib", 9), ("small", 0)):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(mib * 2**20)
    assert submission._largest(tmp_path) == "data (5 MiB), weights (4 MiB), small (0 MiB)"


class Broken:
    """A client whose connection breaks off in the middle of a log, now and then; after its end all is there."""

    def __init__(self, log: str, breaks_at: list[int], code: int | None) -> None:
        self._log, self._breaks_at, self._code = log, breaks_at, code

    async def tail_job_logs(self, job):
        end = self._breaks_at.pop(0) if self._breaks_at else None
        for place in range(0, len(self._log[:end]), 5):
            yield self._log[:end][place : place + 5]
        if end is not None:
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def get_job_info(self, job):
        from ray.job_submission import JobDetails, JobStatus, JobType

        status = JobStatus.RUNNING if self._breaks_at else JobStatus.FAILED
        return JobDetails(
            type=JobType.SUBMISSION, entrypoint="", status=status, driver_exit_code=self._code, message="it\nfailed"
        )


@pytest.fixture
def jobs(monkeypatch):
    """The jobs of a cluster behind a client."""

    def made(client):
        one = object.__new__(submission.Cluster)
        one.address, one._client = "http://nowhere", client
        return one

    monkeypatch.setattr(submission, "_LOOK_S", 0.01)
    monkeypatch.setattr(submission, "_LOST_S", 0.1)
    return made


@pytest.mark.parametrize(("code", "status"), [(3, 3), (-9, 137), (None, None)])
def test_a_log_is_shown_once_though_its_connection_breaks(jobs, code, status):
    shown = []
    log = "".join(f"line {n}\n" for n in range(20))
    ended = jobs(Broken(log, [42, 17, 60], code)).follow("raysubmit_1", shown.append)
    assert "".join(shown) == log
    assert ended == submission.Ended("FAILED", status, "it failed")


def test_a_cluster_that_does_not_answer_any_more_is_told(jobs):
    class Gone(Broken):
        num_asked = 0

        def get_job_info(self, job):
            self.num_asked += 1
            if self.num_asked > 1:
                raise ConnectionError("refused")
            return super().get_job_info(job)

    with pytest.raises(JobLost, match="the cluster can't tell any more what becomes of it"):
        jobs(Gone("log", [1, 1, 1], None)).follow("raysubmit_1", lambda text: None)
