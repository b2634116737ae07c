"""`summary.json`: how the last command into a folder ended."""

import json

import pytest
from typer.testing import CliRunner

from jobs import score
from jobs.exits import ExitStatus
from jobs.interrupts import Terminated
from pipelines import batch
from schemas.failures import Busy, EngineUnusable, Interrupted, StorageFailed, TooManyErrors, UsageError
from tests.conftest import write_lines
from tests.published import answered, failed, publish


def command(tmp_path, *more, is_there=True):
    path = tmp_path / "a.jsonl"
    if is_there:
        write_lines(path, {"prompt": "a"})
    return CliRunner().invoke(score.app, ["--input", str(path), "--output", str(tmp_path / "out"), *more])


def told(tmp_path):
    return json.loads((tmp_path / "out" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UsageError("a is wrong"), ExitStatus.USAGE, "a is wrong"),
        (EngineUnusable("no GPU"), ExitStatus.FAILED, "no GPU. Run again with --verbose"),
        (StorageFailed("disk full"), ExitStatus.FAILED, "disk full; what is finished is kept"),
        (TooManyErrors("3 of 4"), ExitStatus.TOO_MANY_ERRORS, "3 of 4; what is finished is kept"),
        (Interrupted("2 are left"), ExitStatus.INTERRUPTED, "interrupted: 2 are left"),
        (KeyboardInterrupt(), ExitStatus.INTERRUPTED, "interrupted"),
        (Terminated(), ExitStatus.TERMINATED, "terminated"),
        (ZeroDivisionError("ours"), ExitStatus.FAILED, "ZeroDivisionError: ours"),
    ],
)
def test_however_it_ends_it_says_so(tmp_path, monkeypatch, error, status, words):
    status_file = {"run_id": "r1", "phase": "answering", "rows": {"total": 4}}

    def run(*_):
        (tmp_path / "out" / "_work" / "r1").mkdir(parents=True)
        (tmp_path / "out" / "_work" / "r1" / "status.json").write_text(json.dumps(status_file))
        raise error

    monkeypatch.setattr(batch, "run", run)
    assert command(tmp_path).exit_code == status
    end = told(tmp_path)
    assert end["exit_status"] == status and end["error"].startswith(words)
    # What was refused is no run; that of another command may lie there.
    assert end["run"] == (None if isinstance(error, UsageError) else status_file)


def test_a_path_that_isnt_there_is_told_as_well(tmp_path):
    assert command(tmp_path, is_there=False).exit_code == ExitStatus.USAGE
    assert told(tmp_path)["exit_status"] == ExitStatus.USAGE and "no such file" in told(tmp_path)["error"]


def test_of_a_run_that_is_published_it_tells_the_figures(tmp_path, monkeypatch):
    class Summary:
        is_repeat, run_id = True, "1"
        totals = type("Tally", (), {"num_failed": 1, "num_answered": 1})

    publish(tmp_path / "out", "1", [answered(1), failed(2)])
    monkeypatch.setattr(batch, "run", lambda *_: Summary)
    monkeypatch.setattr("jobs.reports.print_summary", lambda *_: None)
    assert command(tmp_path).exit_code == ExitStatus.ROW_ERRORS
    end = told(tmp_path)
    assert (end["exit_status"], end["error"], end["run"]["run_id"]) == (ExitStatus.ROW_ERRORS, None, "1")
    assert end["run"]["rows"]["input"] == 2


def test_a_folder_of_something_else_and_another_commands_are_left_alone(tmp_path, monkeypatch):
    def busy(*_):
        raise Busy("another run writes there", "process 1")

    monkeypatch.setattr(batch, "run", busy)
    assert command(tmp_path).exit_code == ExitStatus.USAGE and not (tmp_path / "out").exists()
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    assert command(tmp_path).exit_code == ExitStatus.USAGE
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    # Nor does what only looks write anything.
    (tmp_path / "out" / "thesis.tex").unlink()
    assert command(tmp_path, "--dry-run", "--limit", "0").exit_code == ExitStatus.USAGE
    assert list((tmp_path / "out").iterdir()) == []
