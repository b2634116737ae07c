"""A dry run and `overnight status`: what a run is going to do, and how far it is."""

import json
import time

import pytest
from typer.testing import CliRunner

from jobs import reports
from jobs.cli import app
from pipelines import progress
from pipelines.forecast import forecast
from pipelines.storage import Folder
from schemas.settings import Prices, RunSettings
from tests.conftest import Silence, overnight, write_lines

LINES = [{"prompt": "a b", "temperature": 0, "max_tokens": 4}] * 3 + [{"prompt": "c", "max_tokens": 9}, "broken"]


@pytest.fixture
def look(tmp_path, ray_cluster):
    def run(*lines, **settings):
        path = write_lines(tmp_path / "in.jsonl", *lines)
        settings = {"served_names": ("test",), **settings}
        return forecast(RunSettings(inputs=(str(path),), output=str(tmp_path / "out"), **settings), Silence())

    return run


def test_a_dry_run_tells_the_plan_and_leaves_nothing(tmp_path, look, capsys):
    told = look(*LINES, prices=Prices(completion=1_000_000))
    assert (told.num_rows, told.totals.num_rows, told.totals.num_repeated) == (5, 4, 2)
    assert told.validated.reasons == {"invalid_json": 1}
    assert (told.totals.output_tokens, told.estimate.completion_tokens, told.estimate.cost) == (21, 13, 13.0)
    assert told.experience is None and told.estimate.seconds is None
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    reports.print_forecast(told)
    out = capsys.readouterr().out
    assert "2 for the engine, 2 answered by an equal one's answer" in out
    assert "at most 13 tokens to compute" in out and "at most 13.00" in out and "unknown: no run" in out


def test_after_a_run_the_next_one_is_estimated_by_it(tmp_path, look, score, capsys):
    score(write_lines(tmp_path / "first.jsonl", *({"prompt": f"slow:0.2 row {n}"} for n in range(8))))
    told = look(*({"prompt": f"slow:0.2 row {n}"} for n in range(80)))
    # The first run's answers had three of at most 16 tokens each; this engine counts a prompt's tokens in its own way.
    assert told.experience is not None and told.estimate.completion_tokens == pytest.approx(240, rel=0.05)
    assert told.estimate.seconds > 0
    reports.print_forecast(told)
    assert f"about {told.estimate.completion_tokens} tokens to compute" in capsys.readouterr().out


def test_a_dry_run_from_the_command_line_starts_no_engine(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", *LINES[:-1])
    told = overnight(
        "score", "--input", str(path), "--output", str(tmp_path / "out"), "--dry-run", "--price", "prompt=1"
    )
    assert told.status == 0, told.err
    assert "engine" not in told.err and "2 for the engine" in told.out


def status(output, *arguments):
    return CliRunner().invoke(app, ["status", "--output", str(output), *arguments])


def test_status_of_a_folder_without_a_run_is_wrong_usage(tmp_path):
    told = status(tmp_path)
    assert told.exit_code == 2 and "holds no run, neither under way nor finished" in told.output


def test_status_of_a_finished_run_is_what_it_came_to(tmp_path, score):
    run = score(write_lines(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "fail"}))
    told = status(run.output)
    assert told.exit_code == 0 and run.summary.run_id in told.output and "2: 1 answered, 1 failed" in told.output
    assert json.loads(status(run.output, "--json").output)["run_id"] == run.summary.run_id


def test_status_of_a_run_under_way(tmp_path, score, monkeypatch, capsys):
    monkeypatch.setattr(progress, "STATUS_S", 0.5)
    seen = []

    class Looking(Silence):
        def progress(self, now):
            seen.append(progress.read_status(Folder.at(str(tmp_path / "out"))))

    monkeypatch.setattr("tests.conftest.Silence", Looking)
    score(write_lines(tmp_path / "a.jsonl", *({"prompt": f"slow:3 row {n}"} for n in range(40)), {"prompt": "a"}))
    (said, *_) = [one for one in seen if one.get("rows", {}).get("answered") == 1]
    assert said["rows"] == {"total": 41, "answered": 1, "failed": 0, "in_flight": 40, "deduplicated": 0}
    assert said["expected"]["num_rows"] == 41 and said["replicas"] == 1 and said["stalled"] == []
    assert len(said["oldest_in_flight"]) == 3 and said["oldest_in_flight"][0]["row"].startswith(f"{tmp_path}/a.jsonl:")
    reports.print_status(said)
    assert "1 of 41 answered, 40 in flight" in capsys.readouterr().out


def test_status_of_a_run_that_has_gone_says_so(tmp_path, capsys):
    rows = {"total": 10, "answered": 5, "failed": 1, "in_flight": 4, "deduplicated": 0}
    said = {"run_id": "r1", "phase": "answering", "began": time.time() - 700, "written": time.time() - 600}
    said |= {"rows": rows, "errors_by_reason": {"x": 1}, "tokens_per_s": 12.0, "remaining_s": 30.0}
    reports.print_status({**said, "oldest_in_flight": [{"row": "a:3", "age_s": 61.0}], "stalled": []})
    out = capsys.readouterr().out
    assert "5 of 10 answered, 1 failed, 4 in flight" in out and "a:3, for 1:01" in out
    assert "It says nothing any more" in out
