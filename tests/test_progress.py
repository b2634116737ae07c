"""Progress tells the truth: how far, how fast, how long still, and which rows a run waits for."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from jobs.console import describe as told_of
from jobs.reports import print_status
from pipelines import progress
from pipelines.open_work import OpenWork, Sent
from pipelines.progress import Progress, ReplicaReport, Scoreboard, StatusFile, Watch, describe
from pipelines.storage import Folder
from schemas.failures import UsageError
from schemas.plans import Totals
from schemas.requests import Tally
from schemas.settings import parse_deadline
from tests.conftest import Silence, write_lines


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves: `clock.now`."""

    class Clock:
        now = 1_000.0

        def monotonic(self):
            return self.now

        def time(self):
            return 1_700_000_000 + self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr("pipelines.open_work.time", clock)
    return clock


def watch(**totals):
    return Watch(Totals(**totals), None, lambda now: None)


def done(num_rows, *, work=0.0, tokens=0):
    return Tally(num_answered=num_rows, completion_tokens=tokens, work=work)


def test_the_time_to_go_follows_the_tokens_that_are_left_and_not_the_rows(clock):
    watching = watch(num_rows=100, work=10_000.0)
    assert watching.look({"a": ReplicaReport()}).remaining_s is None
    clock.now += 30
    # Half of the rows, but nine tenths of the tokens: the long answers went first.
    now = watching.look({"a": ReplicaReport({0: done(50, work=9_000.0)})})
    assert now.elapsed_s == 30 and now.remaining_s == pytest.approx(30 / 9)
    assert now.total_rows == 100 and now.done.num_done == 50


def test_there_is_no_time_to_go_until_enough_is_done_to_tell(clock):
    watching = watch(num_rows=1_000, work=1_000.0)
    watching.look({"a": ReplicaReport()})
    clock.now += 10
    assert watching.look({"a": ReplicaReport({0: done(19, work=19.0)})}).remaining_s is None
    assert watching.look({"a": ReplicaReport({0: done(20, work=20.0)})}).remaining_s == pytest.approx(490)


def test_time_before_the_first_replica_is_up_does_not_count(clock):
    watching = watch(num_rows=100, work=100.0)
    assert watching.look({}).elapsed_s == 0
    clock.now += 500
    assert watching.look({}).num_replicas_up == 0
    watching.look({"a": ReplicaReport()})
    clock.now += 10
    assert watching.look({"a": ReplicaReport({0: done(50, work=50.0)})}).remaining_s == pytest.approx(10)


def test_what_was_done_before_a_run_was_broken_off_took_none_of_this_time(clock):
    told = watch(num_rows=100, work=1_000.0)
    told.finished(0, done(90, work=900.0))
    told.look({})
    told.look({"a": ReplicaReport({})})
    clock.now += 10
    assert told.look({"a": ReplicaReport({1: done(5, work=50.0)})}).remaining_s == 10


def test_what_was_staged_of_a_chunk_before_took_none_of_this_time_either(clock):
    work = OpenWork()
    work.begin(0, done(90, work=900.0))
    told = watch(num_rows=100, work=1_000.0)
    told.look({"a": work.report()})
    clock.now += 10
    assert told.look({"a": work.report()}).remaining_s is None
    work.submitted("future", Sent([{"source_file": "f", "source_line": 1}], 0, clock.now))
    work.finished(0, "future", done(5, work=50.0))
    assert told.look({"a": work.report()}).remaining_s == 10


def test_a_chunk_that_a_replica_died_with_counts_once(clock):
    watching = watch(num_rows=30, work=30.0)
    reports = {"dead": ReplicaReport({0: done(7)}), "alive": ReplicaReport({0: done(5)})}
    assert watching.look(reports).done.num_done == 7


def test_replicas_that_say_nothing_any_more_are_gone(clock):
    board = Scoreboard()
    assert board.is_deserted()
    board.report("a", ReplicaReport())
    clock.now += progress.GONE_S - 1
    assert not board.is_deserted()
    clock.now += 1
    assert board.is_deserted()


def test_a_run_that_would_be_late_grows_more_urgent_and_one_with_time_to_spare_less(clock):
    said = []

    class Board:
        class press:
            remote = said.append

    watching = Watch(Totals(num_rows=100, work=100.0), Board, lambda now: None, due=clock.time() + 100)
    watching.look({"a": ReplicaReport()})

    def work(seconds, rows):
        clock.now += seconds
        now = watching.look({"a": ReplicaReport({0: done(rows, work=float(rows))})})
        watching._press(now)
        return now

    assert work(5, 1).late_s is None and not said
    # 190 s would be left, and 85 are.
    assert work(10, 15).late_s == pytest.approx(0, abs=1) and said == [1]
    late = work(30, 20)
    assert late.late_s == pytest.approx(45 / 20 * 80 - 55) and said == [1, 2]
    assert describe(late)["late_s"] == 125.0 and "late by 2:05" in told_of(late)
    # Often enough, but not with each look.
    work(1, 20)
    assert said == [1, 2]
    for rows in (90, 92):
        ahead = work(10, rows)
    assert ahead.late_s < 0 and said == [1, 2, 1, 0] and "in time by 0:" in told_of(ahead)
    work(10, 95)
    assert said == [1, 2, 1, 0]


NOW = datetime(2026, 1, 31, 22, 30).timestamp()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("06:00", datetime(2026, 2, 1, 6)),
        ("23:15", datetime(2026, 1, 31, 23, 15)),
        ("22:30", datetime(2026, 2, 1, 22, 30)),
        ("2026-02-03T04:05", datetime(2026, 2, 3, 4, 5)),
        ("2026-02-03 04:05:06", datetime(2026, 2, 3, 4, 5, 6)),
        ("2026-02-03T04:05+02:00", datetime(2026, 2, 3, 2, 5, tzinfo=UTC)),
    ],
)
def test_a_deadline_is_the_next_such_time_or_a_date_with_one(text, moment):
    assert parse_deadline(text, NOW) == moment.timestamp()


@pytest.mark.parametrize(
    "text", ["", "6", "6:00", "25:00", "soon", "2026-02-03", "2026-01-31T22:00", "9999-99-99T00:00"]
)
def test_what_is_no_deadline_is_refused(text):
    with pytest.raises(UsageError, match=r"^--deadline .*(expected|Give) a time"):
        parse_deadline(text, NOW)


def test_a_run_that_is_due_never_tells_neither(clock):
    now = watch(num_rows=10, work=10.0).look({"a": ReplicaReport({0: done(10, work=10.0)})})
    assert now.late_s is None and "late" not in told_of(now)


def test_replicas_hear_how_urgent_their_run_is():
    board = Scoreboard()
    board.press(3)
    assert board.report("a", ReplicaReport()).urgency == 3


def test_tokens_per_second_are_those_of_the_last_minute(clock):
    watching = watch(num_rows=1_000, work=1.0)
    tokens = 0
    rates = []
    for second in range(200):
        tokens += 100 if second < 100 else 10
        rates.append(watching.look({"a": ReplicaReport({0: done(1, tokens=tokens)})}).tokens_per_s)
        clock.now += 1
    assert rates[99] == pytest.approx(100) and rates[-1] == pytest.approx(10)
    assert rates[130] == pytest.approx((29 * 100 + 31 * 10) / 60)


def test_answers_of_equal_requests_are_no_tokens_of_the_engine(clock):
    watching = watch(num_rows=100, work=1.0)
    watching.look({"a": ReplicaReport()})
    clock.now += 10
    tally = Tally(num_answered=10, completion_tokens=1_000, num_deduplicated=9, deduplicated_tokens=900)
    assert watching.look({"a": ReplicaReport({0: tally})}).tokens_per_s == pytest.approx(10)


def test_a_finished_chunk_counts_once_whoever_still_reports_it(clock):
    watching = watch(num_rows=30, work=30.0)
    watching.look({"a": ReplicaReport({0: done(10), 1: done(5)}, num_in_flight=12)})
    watching.finished(0, done(10))
    now = watching.look({"a": ReplicaReport({0: done(10), 1: done(6)}, 12), "b": ReplicaReport({0: done(4)}, 9)})
    assert now.done.num_done == 16
    # A report may be older than the end of a chunk: no more can be in flight than is left.
    assert now.num_in_flight == 14


def test_a_replica_that_finishes_nothing_is_named_with_the_rows_that_it_has_longest(clock):
    watching = watch(num_rows=100, work=1.0)
    busy = ReplicaReport({}, 3, idle_s=59, oldest=[("a:1", 300.0)])
    stuck = ReplicaReport({}, 5, idle_s=61, oldest=[("a:7", 61.0), ("a:8", 61.5), ("a:9", 62.0)])
    now = watching.look({"a": busy, "b": stuck})
    assert now.stalled == [("a:9", 62.0), ("a:8", 61.5), ("a:7", 61.0)]
    assert now.oldest == [("a:1", 300.0), ("a:9", 62.0), ("a:8", 61.5)]
    assert watching.look({"a": busy, "b": replace(stuck, idle_s=0.5)}).stalled == []


def test_a_replica_that_says_nothing_any_more_grows_idle_all_the_same(clock):
    board = Scoreboard()
    board.report("a", ReplicaReport({0: done(3)}, 2, idle_s=1.0, oldest=[("a:1", 5.0)]))
    board.report("b", ReplicaReport({}))
    clock.now += 90
    read = board.read()
    assert read["a"].idle_s == 91 and read["a"].oldest == [("a:1", 95.0)]
    assert read["b"].idle_s == 0 and read["b"].oldest == []
    assert watch(num_rows=9).look(read).stalled == [("a:1", 95.0)]


def test_a_replica_knows_its_oldest_rows_and_since_when_it_finished_none(clock):
    work = OpenWork()
    work.begin(0, Tally())
    assert (work.report().idle_s, work.report().oldest) == (0.0, [])
    sent = {}
    for line in range(1, 6):
        clock.now += 1
        sent[line] = f"future {line}"
        work.submitted(sent[line], Sent([{"source_file": "f", "source_line": line}], 0, clock.now))
    clock.now += 10
    assert work.report().oldest == [("f:1", 14.0), ("f:2", 13.0), ("f:3", 12.0)]
    assert work.report().idle_s == 14 and work.report().num_in_flight == 5
    work.finished(0, sent[1], done(1))
    clock.now += 2
    report = work.report()
    assert report.oldest == [("f:2", 15.0), ("f:3", 14.0), ("f:4", 13.0)] and report.idle_s == 2
    assert report.chunks == {0: done(1)} and work.end(0) == done(1)


def test_replicas_are_told_to_flush_until_all_that_are_alive_have(clock):
    board = Scoreboard()
    assert board.report("gone", ReplicaReport()) == progress.Orders()
    clock.now += 10
    for replica in ("a", "b"):
        assert board.report(replica, ReplicaReport()) == progress.Orders()
    assert not board.flush()
    assert board.report("a", ReplicaReport()) == progress.Orders(is_flushing=True)
    board.flushed("a")
    assert not board.flush()
    board.flushed("b")
    assert board.flush()
    board.drain()
    assert board.report("b", ReplicaReport()) == progress.Orders(is_draining=True, is_flushing=True)


# --- the status file ------------------------------------------------------------------------------------------------

SOMEWHERE = Progress(
    Totals(num_rows=100, work=1_000.0, output_tokens=900),
    Tally(num_answered=40, num_failed=10, prompt_tokens=7, completion_tokens=800, work=500.0, reasons={"ü": 10}),
    num_in_flight=8,
    oldest=[("in/ü.jsonl:17", 12.34)],
    stalled=[("in/ü.jsonl:17", 12.34)],
    num_replicas_up=2,
    elapsed_s=10.0,
    tokens_per_s=80.0,
)


def test_the_status_file_holds_what_is_known_as_json(tmp_path, clock):
    show = Silence()
    status = StatusFile(show, Folder.at(str(tmp_path / "work")), "run-1")

    def read():
        return json.loads((tmp_path / "work" / "status.json").read_text())

    status.phase("checking 1 file")
    assert read() == {
        "run_id": "run-1",
        "phase": "checking 1 file",
        "began": clock.time(),
        "written": clock.time(),
    }
    clock.now += progress.STATUS_S
    status.checked(5_000)
    assert read()["lines_checked"] == 5_000
    clock.now += progress.STATUS_S
    status.progress(SOMEWHERE)
    told = read()
    assert told["phase"] == "answering" and told["written"] - told["began"] == 2 * progress.STATUS_S
    assert told["rows"] == {"total": 100, "answered": 40, "failed": 10, "in_flight": 8, "deduplicated": 0}
    assert told["tokens"] == {"prompt": 7, "completion": 800} and told["errors_by_reason"] == {"ü": 10}
    assert told["expected"]["num_rows"] == 100 and told["expected"]["output_tokens"] == 900
    assert (told["tokens_per_s"], told["elapsed_s"], told["remaining_s"]) == (80.0, 10.0, 10.0)
    assert told["replicas"] == 2
    assert told["oldest_in_flight"] == told["stalled"] == [{"row": "in/ü.jsonl:17", "age_s": 12.3}]
    assert show.phases == ["checking 1 file"] and show.seen == [SOMEWHERE]


def test_the_status_file_is_written_every_few_seconds_and_not_each_second(tmp_path, clock):
    status = StatusFile(Silence(), Folder.at(str(tmp_path)), "run-1")
    status.phase("starting 1 engine")
    clock.now += progress.STATUS_S / 2
    status.progress(SOMEWHERE)
    assert json.loads((tmp_path / "status.json").read_text())["phase"] == "starting 1 engine"


def test_of_a_run_that_is_published_its_manifest_tells(tmp_path, clock):
    with StatusFile(Silence(), Folder.at(str(tmp_path / "_work" / "run-1")), "run-1") as status:
        status.phase("publishing")
        assert progress.read_status(Folder.at(str(tmp_path)))["phase"] == "publishing"
    assert progress.read_status(Folder.at(str(tmp_path))) is None


def test_a_run_that_ends_early_says_why_and_how_far_it_came(tmp_path, clock, capsys):
    with pytest.raises(UsageError), StatusFile(Silence(), Folder.at(str(tmp_path)), "run-1") as status:
        status.phase("starting 1 engine")
        clock.now += 10
        status.progress(SOMEWHERE)
        raise UsageError("the disk\nis full")
    said = json.loads((tmp_path / "status.json").read_text())
    assert said["error"] == "the disk is full" and said["phase"] == "answering" and said["rows"]["total"]
    print_status(said)
    out = capsys.readouterr().out
    assert "the disk is full" in out and "The same command goes on from there." in out


def test_a_store_that_takes_no_status_costs_the_run_nothing(tmp_path, clock):
    (tmp_path / "file").touch()
    show = Silence()
    status = StatusFile(show, Folder.at(str(tmp_path / "file" / "work")), "run-1")
    status.phase("checking")
    clock.now += progress.STATUS_S
    status.checked(1)
    clock.now += progress.STATUS_S
    status.progress(SOMEWHERE)
    assert show.phases == ["checking"] and show.seen == [SOMEWHERE]


# --- a whole run ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_very_slow_row_and_a_killed_replica_leave_no_row_behind(tmp_path, score, monkeypatch):
    """Case P03: 2,000 rows, one that takes very long, and a replica's process that dies at 97 %."""
    monkeypatch.setattr(progress, "REPORT_S", 0.1)
    monkeypatch.setattr(progress, "STALL_S", 1.0)
    num_rows, slow, deadly = 2_000, 1_990, 1_940
    died = tmp_path / "died"
    lines = [{"prompt": f"row {line}"} for line in range(1, num_rows + 1)]
    lines[slow - 1]["prompt"] += f" until:{died} slow:4"
    # Its answer is the longest, so it is of the first chunk, whose other rows are staged by the time that it kills.
    staged = tmp_path / "out/_work/*/staged/00000000/*.parquet"
    lines[deadly - 1] = {"prompt": f"until:{staged} exit:{died}", "max_tokens": 17}
    run = score(write_lines(tmp_path / "a.jsonl", *lines), replicas=2)
    assert died.exists()
    assert run.table("responses")["source_line"].to_pylist() == list(range(1, num_rows + 1))
    assert run.table("errors").num_rows == 0
    attempts = run.table("usage")["attempt"].to_pylist()
    # What the dead process had staged isn't asked again.
    assert attempts[deadly - 1] == 2 and attempts.count(2) <= num_rows // 10

    seen = run.show.seen
    assert {now.total_rows for now in seen} == {num_rows}
    assert max(now.done.num_done for now in seen) == seen[-1].done.num_done == num_rows
    place = f"{tmp_path}/a.jsonl:{slow}"
    assert any(place in dict(now.oldest) for now in seen)
    assert any(place in dict(now.stalled) for now in seen)
    # The end of the rows is not the end of the run: only what is published is done.
    assert run.show.phases[-1] == "publishing" and run.manifest["rows"]["responses"] == num_rows
