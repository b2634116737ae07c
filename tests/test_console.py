"""What a person reads: true words, whatever the paths and numbers."""

import io
import re

import pytest
from rich.console import Console

from jobs import console
from pipelines.batch import Summary
from pipelines.progress import Progress
from schemas.requests import Tally


def summary(**changes):
    tables = {name: f"out[nightly]/runs/1/{name}/*.parquet" for name in ("responses", "usage", "errors")}
    return Summary("1", "out[nightly]/runs/1", tables, **changes)


def test_paths_are_shown_as_they_are(capsys):
    console.print_summary(summary(totals=Tally(num_answered=1), num_rows=1))
    out = capsys.readouterr().out
    assert "files   out[nightly]/runs/1" in out
    assert "duckdb -c \"FROM 'out[nightly]/runs/1/responses/*.parquet'" in out
    assert "errors" not in out and "cut at 16" not in out


def test_failures_are_told_by_reason_most_frequent_first(capsys):
    totals = Tally(num_answered=1, num_failed=5, reasons={"schema": 1, "invalid_json": 4}, num_cut_by_default=1)
    console.print_summary(summary(totals=totals, num_rows=6))
    out = capsys.readouterr().out
    assert re.search(r"6: 1 answered, 5 failed\s+4 invalid_json\s+1 schema", out)
    assert "1 answer was cut at 16 tokens" in out and "errors/*.parquet" in out


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Progress(100), "0 in flight, 0 tokens/s"),
        (
            Progress(100, Tally(num_answered=40, num_failed=10, completion_tokens=900), 7, elapsed_s=30),
            "10 failed, 7 in flight, 30 tokens/s, 0:30 left",
        ),
        (Progress(10**6, Tally(num_answered=20_000), elapsed_s=100), "0 in flight, 0 tokens/s, 1:21:40 left"),
    ],
)
def test_progress_in_words(now, words):
    assert console.describe(now) == words


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(monkeypatch, capsys):
    view = console.RunView()
    with view:
        view.phase("checking 1 file")
        view.progress(Progress(10, Tally(num_answered=5), 5, num_replicas_up=1, elapsed_s=1))
    assert "checking 1 file" in capsys.readouterr().err
    screen = io.StringIO()
    monkeypatch.setattr(console, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    with console.RunView() as view:
        view.progress(Progress(10, Tally(num_answered=5), 5, num_replicas_up=1, elapsed_s=1))
    assert "5/10" in screen.getvalue() and "━" in screen.getvalue()
