"""Every night, over Ray with the deterministic engine: only what is new or changed is asked, missed nights are caught
up, and one dataset's trouble is its own."""

import json
import os
import time
from datetime import date, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from jobs import nightly
from jobs.datasets import read_nightly
from pipelines import nightly as nights
from pipelines import retention
from pipelines.lease import Lease
from pipelines.storage import Folder
from schemas.failures import InputMissing, Interrupted
from schemas.nightly import Keep
from tests.conftest import Silence, overnight, read_published, read_table, write_lines
from tests.deterministic import Starts

DAY = date(2026, 10, 1)
NONE = Starts(error="must not start")


def rows(*numbers, **more):
    return [{"prompt": f"row {n}", "request_id": f"{n}", **more} for n in numbers]


def day(number):
    return DAY + timedelta(days=number)


@pytest.fixture
def night(tmp_path, ray_cluster):
    """Carries a night out, by its number; its exit status, and what nightly.json says of each dataset."""

    def carry_out(number=0, start=None, datasets=({"name": "a"},), **more):
        config = tmp_path / "nightly.yaml"
        entries = [
            {"input": f"{tmp_path}/{one['name']}/{{date}}.jsonl", "output": f"{tmp_path}/out/{one['name']}", **one}
            for one in datasets
        ]
        defaults = {"served-name": "test", **more.pop("defaults", {})}
        told = {"state": f"{tmp_path}/state", "defaults": defaults, "datasets": entries, **more}
        config.write_text(yaml.safe_dump(told))
        status = nightly.run(read_nightly(config), day(number), start or Starts())
        summary = json.loads((tmp_path / "state" / "nightly.json").read_text())
        assert summary["status"] == status and summary["ended"] is not None
        return status, summary["datasets"]

    return carry_out


@pytest.fixture
def put(tmp_path):
    def write(number, *lines, name="a"):
        (tmp_path / name).mkdir(exist_ok=True)
        return write_lines(tmp_path / name / f"{day(number)}.jsonl", *lines)

    return write


def told_of(records):
    return [(one["dataset"], one["night"], one["outcome"]) for one in records]


def test_each_night_pays_for_what_is_new_or_changed_alone(tmp_path, night, put, capsys):
    put(0, *rows(*range(100)))
    status, (first,) = night(0)
    assert status == 0 and first["outcome"] == "scored" and first["changes"] is None
    assert first["rows"] == {"input": 100, "answered": 100, "failed": 0, "carried": 0, "asked": 100}

    # Five are edited and five new; the others are as they were, though their file is another one.
    edited = [{"prompt": f"edited {n}", "request_id": f"{n}"} for n in range(5)]
    put(1, *edited, *rows(*range(5, 105)))
    status, (second,) = night(1)
    assert status == 0 and second["rows"] == {"input": 105, "answered": 105, "failed": 0, "carried": 95, "asked": 10}
    assert second["changes"] == {
        "against": first["run_id"],
        "new": 5,
        "changed": 5,
        "gone": 0,
        "changed_answer": 0,
        "unchanged": 95,
    }
    usage = read_table(tmp_path / "out" / "a", "usage")
    paid = [row["total_tokens"] for row in usage.to_pylist() if not row["is_carried"]]
    assert len(paid) == 10 and second["computed_tokens"] == sum(paid) // 2
    assert read_published(tmp_path / "out" / "a")["settings"]["labels"] == {"dataset": "a", "night": "2026-10-02"}

    # Thirty are gone, and what is left is asked of nobody; the night before wasn't missed.
    put(2, *edited, *rows(*range(5, 75)))
    status, (third,) = night(2, NONE)
    assert status == 0 and third["rows"]["asked"] == 0 and third["rows"]["carried"] == 75
    assert third["changes"]["gone"] == 30 and third["changes"]["unchanged"] == 75
    gone = read_table(tmp_path / "out" / "a", "changes").to_pylist()
    assert [(row["kind"], row["id"], row["old_text"]) for row in gone] == [
        ("gone", f"{n}", [f"{n} row"]) for n in range(75, 105)
    ]

    # The night's page tells of them, beside the nights before.
    page = (tmp_path / "out" / "a" / "runs" / third["run_id"] / "report.html").read_text()
    assert "30 gone, 75 unchanged" in page
    assert all(one["run_id"] in page for one in (first, second, third))

    # The same night again is none.
    capsys.readouterr()
    status, (again,) = night(2, NONE)
    assert status == 0 and again["outcome"] == "unchanged" and again["run_id"] == third["run_id"]
    assert again["changes"] is None and again["rows"]["asked"] == 0
    assert "a  2026-10-03  unchanged  75 rows: 0 asked, 0 carried over, 0 failed; 0:" in capsys.readouterr().out
    assert json.loads((tmp_path / "state" / "nights" / "a.json").read_text())["done"] == "2026-10-03"


@pytest.fixture
def done(tmp_path):
    """Says that a night is done, without having done it."""

    def write(number, name="a"):
        nights.State(Folder.at(str(tmp_path / "state"))).finish(name, day(number))

    return write


@pytest.mark.slow
def test_nights_that_were_missed_are_caught_up_in_order(night, put, done):
    for number in range(1, 5):
        put(number, *rows(*range(number + 1)))
    done(0)
    status, records = night(4, defaults={"catch_up": 1})
    assert status == 5 and told_of(records) == [
        ("a", "2026-10-02", "left out"),
        ("a", "2026-10-04", "scored"),
        ("a", "2026-10-05", "scored"),
    ]
    assert "nights from 2026-10-02 to 2026-10-03 were missed, and catch_up allows 1" in records[0]["message"]
    assert [one["rows"]["asked"] for one in records[1:]] == [4, 1]
    assert records[2]["changes"]["new"] == 1 and records[2]["changes"]["against"] == records[1]["run_id"]


@pytest.mark.slow
def test_a_night_without_its_input_waits_for_it_or_is_skipped(night, put, done):
    put(2, "broken")
    done(0)
    status, records = night(2, NONE)
    assert status == 2 and told_of(records) == [("a", "2026-10-02", "refused"), ("a", "2026-10-03", "not begun")]
    assert "2026-10-02.jsonl: no such file" in records[0]["message"]
    assert records[1]["message"] == "the night of 2026-10-02 comes first, and isn't done"
    status, records = night(2, NONE, defaults={"missing": "skip", "allow_errors": True})
    assert status == 3 and told_of(records) == [("a", "2026-10-02", "skipped"), ("a", "2026-10-03", "scored")]


@pytest.mark.slow
def test_a_dataset_that_fails_stops_itself_alone_and_the_worst_status_is_told(tmp_path, night, put, capsys):
    for name in "abcde":
        put(0, name=name)
    put(0, "broken", name="b")
    put(0, "broken", "broken", *rows(0), name="d")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "c").write_text("a file")
    datasets = [
        {"name": "e", "priority": 1, "input": str(tmp_path / "e" / f"{DAY}.jsonl")},
        {"name": "a", "input": str(tmp_path / "nowhere")},
        {"name": "b"},
        {"name": "c"},
        {"name": "d", "priority": -1, "max_errors": 1},
    ]
    status, records = night(0, NONE, datasets)
    assert [(one["dataset"], one["outcome"], one["status"]) for one in records] == [
        ("d", "too many errors", 4),
        ("a", "refused", 2),
        ("b", "scored", 3),
        ("c", "refused", 2),
        ("e", "scored", 0),
    ]
    assert status == 2
    assert "a, night of 2026-10-01: " in capsys.readouterr().out
    assert [nights.State(Folder.at(str(tmp_path / "state"))).done(name) for name in "de"] == [day(-1), day(0)]
    # What was done is done; what failed is tried again.
    put(0, *rows(0), "broken", name="d")
    status, records = night(0, datasets=[{**datasets[4], "allow_errors": True}, datasets[2], datasets[0]])
    told = [(one["dataset"], one["outcome"], one["status"]) for one in records]
    assert told == [("d", "scored", 0), ("b", "unchanged", 3), ("e", "unchanged", 0)] and status == 3


def test_an_engine_that_does_not_start_fails_its_dataset_with_its_words(night, put):
    put(0, *rows(0))
    put(0, name="b")
    status, records = night(0, Starts(error="no such device"), [{"name": "a"}, {"name": "b"}])
    assert status == 1 and [one["outcome"] for one in records] == ["failed", "scored"]
    assert "no such device" in records[0]["message"]


def test_past_the_deadline_a_run_is_drained_no_other_begins_and_the_next_night_goes_on(
    tmp_path, night, put, monkeypatch
):
    lines = [{"prompt": f"slow:1 row {n}", "request_id": f"{n}"} for n in range(100)]
    put(0, *lines)
    put(1, *lines, *rows(1000))
    put(0, *rows(0), name="b")
    deadline = {}

    def progress(self, now):
        """The deadline is when the first rows are done."""
        if now.done.num_done and not deadline:
            deadline["at"] = time.time()

    monkeypatch.setattr("jobs.console.RunView.progress", progress)
    monkeypatch.setattr(nights, "_is_past", lambda at: bool(deadline))
    few = {"replicas": 1, "engine": {"max_num_seqs": 8}}
    status, records = night(0, datasets=[{"name": "a"}, {"name": "b", "priority": 1}], defaults=few)
    assert status == 5 and [one["outcome"] for one in records] == ["unfinished", "not begun"]
    assert "of 100 rows are left" in records[0]["message"]
    num_staged = sum(
        pq.read_metadata(part).num_rows for part in (tmp_path / "out" / "a").glob("_work/*/staged/*/*.parquet")
    )
    assert 0 < num_staged < 100
    monkeypatch.setattr(nights, "_is_past", lambda at: False)
    status, records = night(1, defaults=few)
    # First what was cut off, of which nothing is asked twice; then this night.
    assert status == 0 and told_of(records) == [("a", "2026-10-01", "scored"), ("a", "2026-10-02", "scored")]
    assert [one["rows"]["asked"] for one in records] == [100 - num_staged, 1]


def test_a_night_that_waits_for_an_engine_ends_at_its_deadline(tmp_path, night, put, monkeypatch):
    """Nobody is up who could be told to drain."""
    put(0, *rows(0))
    (tmp_path / "meeting").mkdir()
    seen = []
    monkeypatch.setattr(nights, "_is_past", lambda at: seen.append(at) or len(seen) > 3)
    began = time.monotonic()
    status, (record,) = night(0, Starts(meeting=(str(tmp_path / "meeting"), 9)), deadline="06:00", time_zone="UTC")
    for number in range(9):
        (tmp_path / "meeting" / f"{number}").touch()
    assert status == 5 and record["outcome"] == "unfinished" and "while no engine was up" in record["message"]
    assert time.monotonic() - began < 60


def test_past_the_deadline_no_engine_starts(night, put, monkeypatch):
    put(0, *rows(0))
    seen = []
    monkeypatch.setattr(nights, "_is_past", lambda at: seen.append(at) or len(seen) > 1)
    status, (record,) = night(0, NONE, deadline="06:00", time_zone="UTC")
    assert status == 5 and record["outcome"] == "unfinished" and "before an engine was started" in record["message"]


@pytest.mark.slow
def test_ctrl_c_ends_the_night_with_its_own_status(tmp_path, night, put, monkeypatch):
    lines = [{"prompt": f"slow:0.2 row {n}", "request_id": f"{n}"} for n in range(100)]
    put(0, *lines)

    class View(Silence):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("jobs.console.RunView", lambda: View(drain_at=1))
    few = {"replicas": 1, "engine": {"max_num_seqs": 8}}
    with pytest.raises(Interrupted, match="of 100 rows are left"):
        night(0, datasets=[{"name": "a"}, {"name": "b"}], defaults=few)
    summary = json.loads((tmp_path / "state" / "nightly.json").read_text())
    assert summary["status"] == 130 and [one["outcome"] for one in summary["datasets"]] == ["interrupted"]


def test_a_second_one_ends_at_once_with_a_status_of_its_own(tmp_path, night, put, capsys):
    put(0)
    night(0, NONE)
    before = (tmp_path / "state" / "nightly.json").read_text()
    with Lease(Folder.at(str(tmp_path / "state"))):
        status = nightly.run(read_nightly(tmp_path / "nightly.yaml"), day(0), NONE)
    assert status == 6
    assert f"a nightly run is under way there (process {os.getpid()} on " in capsys.readouterr().err
    assert (tmp_path / "state" / "nightly.json").read_text() == before


@pytest.mark.slow
def test_old_runs_go_and_the_current_one_stays(tmp_path, night, put):
    runs, ids = tmp_path / "out" / "a" / "runs", [f"202001{n:02}T000000Z-abcdef" for n in range(1, 5)]
    for name in [*ids, "mine"]:
        (runs / name / "responses").mkdir(parents=True)
        (runs / name / "_SUCCESS").touch()
    put(0, "broken")
    _, (record,) = night(0, NONE, defaults={"keep": {"runs": 2}})
    assert record["runs_removed"] == ids[:3]
    assert {path.name for path in runs.iterdir()} == {ids[3], record["run_id"], "mine"}
    # The current one stays, however many are newer.
    (runs / "20990101T000000Z-abcdef").mkdir()
    assert retention.prune(Folder.at(str(tmp_path / "out" / "a")), Keep(runs=1)) == ids[3:]
    assert retention.prune(Folder.at(str(tmp_path / "out" / "a")), Keep()) == []


def test_a_state_that_says_nothing_is_named(tmp_path, night, put):
    put(0, *rows(0))
    (tmp_path / "state" / "nights").mkdir(parents=True)
    (tmp_path / "state" / "nights" / "a.json").write_text("{}")
    with pytest.raises(nights.UsageError, match=r"nights/a\.json: found no date that is done\. Remove"):
        night(0)


@pytest.mark.slow
def test_a_state_and_datasets_may_stand_in_a_store(tmp_path, night, s3_server):
    import s3fs

    fs = s3fs.S3FileSystem(client_kwargs={"endpoint_url": s3_server.url})
    fs.mkdir("nightly")
    for number in (0, 1):
        fs.pipe(f"nightly/in/{day(number):%Y/%m/%d}/a.jsonl", b'{"prompt": "a b"}\n' * (number + 1))
    datasets = [{"name": "a", "input": "s3://nightly/in/{date:%Y/%m/%d}/*.jsonl", "output": "s3://nightly/out"}]
    for number in (0, 1):
        config = {"state": "s3://nightly/state", "defaults": {"served-name": "test"}, "datasets": datasets}
        (tmp_path / "n.yaml").write_text(yaml.safe_dump(config))
        assert nightly.run(read_nightly(tmp_path / "n.yaml"), day(number), Starts()) == 0
    (record,) = json.loads(fs.cat("nightly/state/nightly.json"))["datasets"]
    assert record["rows"]["carried"] == 2 and record["changes"]["new"] == 1


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--date", "tomorrow"], "overnight: --date tomorrow: expected a date as YYYY-MM-DD"),
        (["--dataset", "b"], "overnight: --dataset b: no such dataset. There are: a"),
    ],
)
def test_wrong_usage_is_one_line_with_status_2(tmp_path, arguments, words):
    config = tmp_path / "n.yaml"
    config.write_text(f"state: {tmp_path}/s\ndatasets: [{{name: a, input: a, output: {tmp_path}/out}}]")
    command = overnight("nightly", "--config", str(config), *arguments)
    assert command.status == 2 and words in command.err and "Traceback" not in command.err


@pytest.mark.parametrize(("missing", "status"), [("skip", 0), ("fail", 2)])
def test_a_dry_run_skips_what_the_night_would(tmp_path, monkeypatch, missing, status):
    def forecast(settings):
        raise InputMissing("x: no such file or folder. Check --input")

    monkeypatch.setattr("jobs.score.forecast", forecast)
    config = tmp_path / "n.yaml"
    dataset = {"name": "a", "input": "x", "output": f"{tmp_path}/out", "missing": missing}
    config.write_text(yaml.safe_dump({"state": f"{tmp_path}/s", "datasets": [dataset]}))
    assert nightly.forecast(read_nightly(config), day(0)) == status


@pytest.mark.slow
def test_a_night_without_requests_needs_no_engine_and_a_dry_run_changes_nothing(tmp_path):
    """From the command line: three nights of lines that are refused, and so cost nothing."""
    config = Path(tmp_path / "n.yaml")
    told = {"state": f"{tmp_path}/s", "datasets": [{"name": "a", "input": f"{tmp_path}/{{date}}.jsonl"}]}
    told["datasets"][0]["output"] = f"{tmp_path}/out"
    config.write_text(yaml.safe_dump(told))
    write_lines(tmp_path / "2026-10-01.jsonl", "broken")
    dry = overnight("nightly", "--config", str(config), "--date", "2026-10-01", "--dry-run")
    assert dry.status == 3, dry.err
    assert f"a, night of 2026-10-01: {tmp_path}/2026-10-01.jsonl into {tmp_path}/out" in dry.out
    assert not (tmp_path / "s").exists() and not (tmp_path / "out" / "runs").exists()
    wet = overnight("nightly", "--config", str(config), "--date", "2026-10-01")
    assert wet.status == 3 and "scored" in wet.out, wet.err
    assert json.loads((tmp_path / "s" / "nightly.json").read_text())["status"] == 3
