"""What a person reads: true words, whatever the paths and numbers."""

import io
import re
import signal
import threading

import pytest
from rich.console import Console

from jobs import console, reports
from pipelines.manifest import Summary
from pipelines.progress import Progress
from schemas.plans import Totals
from schemas.requests import Tally


def summary(**changes):
    tables = {name: f"out[nightly]/runs/1/{name}/*.parquet" for name in ("responses", "usage", "errors")}
    return Summary("1", "out[nightly]/runs/1", tables, **changes)


def test_paths_are_shown_as_they_are(capsys):
    reports.print_summary(summary(totals=Tally(num_answered=1), num_rows=1))
    out = capsys.readouterr().out
    assert "files   out[nightly]/runs/1" in out
    assert "duckdb -c \"FROM 'out[nightly]/runs/1/responses/*.parquet'" in out
    assert "errors" not in out and "cut at 16" not in out


def test_failures_are_told_by_reason_most_frequent_first(capsys):
    totals = Tally(num_answered=1, num_failed=5, reasons={"schema": 1, "invalid_json": 4}, num_cut_by_default=1)
    reports.print_summary(summary(totals=totals, num_rows=6))
    out = capsys.readouterr().out
    assert re.search(r"6: 1 answered, 5 failed\s+4 invalid_json\s+1 schema", out)
    assert "1 answer was cut at 16 tokens" in out and "errors/*.parquet" in out


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Progress(Totals(100)), "0 in flight, 0 tokens/s"),
        (
            Progress(
                Totals(100, work=2_000),
                Tally(num_answered=40, num_failed=10, work=1_000),
                num_in_flight=7,
                elapsed_s=30,
                tokens_per_s=30,
            ),
            "10 failed, 7 in flight, 30 tokens/s, 0:30 left",
        ),
        (
            Progress(Totals(10**6, work=10**6), Tally(num_answered=20_000, work=20_000), elapsed_s=100),
            "0 in flight, 0 tokens/s, 1:21:40 left",
        ),
        (Progress(Totals(9), num_in_flight=1, oldest=[("a:1", 75.0)]), "1 in flight, 0 tokens/s, oldest 1:15"),
    ],
)
def test_progress_in_words(now, words):
    assert console.describe(now) == words


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(monkeypatch, capsys):
    view = console.RunView()
    with view:
        view.phase("checking 1 file")
        view.progress(Progress(Totals(10), Tally(num_answered=5), 5, num_replicas_up=1, elapsed_s=1))
    assert "checking 1 file" in capsys.readouterr().err
    screen = io.StringIO()
    monkeypatch.setattr(console, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    with console.RunView() as view:
        view.progress(Progress(Totals(10), Tally(num_answered=5), 5, num_replicas_up=1, elapsed_s=1))
    assert "5/10" in screen.getvalue() and "━" in screen.getvalue()


def test_a_stall_is_told_with_the_rows_that_wait_and_not_every_second(capsys):
    stalled = Progress(Totals(10), num_replicas_up=1, stalled=[("in.jsonl:7", 80.0), ("in.jsonl:9", 70.0)])
    with console.RunView() as view:
        view.progress(stalled)
        view.progress(stalled)
    told = [line for line in capsys.readouterr().err.splitlines() if "stalled" in line]
    assert len(told) == 1 and "in.jsonl:7 (1:20), in.jsonl:9 (1:10)" in told[0]


def test_the_first_ctrl_c_drains_once_an_engine_is_up_and_the_second_stops(capsys):
    up = Progress(Totals(10), num_replicas_up=1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with console.RunView() as view:
        draining = threading.Event()
        with pytest.raises(KeyboardInterrupt), view.drains(draining):
            signal.raise_signal(signal.SIGINT)
        assert not draining.is_set()
        view.progress(up)
        with pytest.raises(KeyboardInterrupt), view.drains(draining):
            signal.raise_signal(signal.SIGINT)
            assert draining.is_set() and "Ctrl-C again stops at once" in capsys.readouterr().err
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # As `nohup` and shells have it for what runs in the background.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with view.drains(draining):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, before)


def test_a_summary_tells_what_the_plan_saved_and_what_it_cost(capsys):
    totals = Tally(
        num_answered=9, num_deduplicated=3, prompt_tokens=120, deduplicated_prompt_tokens=20, cached_tokens=50
    )
    reports.print_summary(summary(totals=totals, num_rows=9, cost=1234.5))
    out = capsys.readouterr().out
    assert "3 rows answered by an equal one's answer" in out and "50% of the prompts' tokens" in out
    assert "cost    1,234.50" in out
