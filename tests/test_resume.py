"""The same command again: goes on where a run was broken off, does nothing where it is finished, refuses other rows."""

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from pipelines import batch, lease, runs, write
from pipelines.lease import EXPIRES_S, Lease
from pipelines.storage import Folder
from schemas import tables
from schemas.failures import EngineUnusable, Interrupted, UsageError
from schemas.settings import EngineSettings
from tests.conftest import ROOT, write_lines
from tests.deterministic import Starts

NONE = Starts(error="must not start")


def rows(number, **more):
    return [{"prompt": f"row {n}", "request_id": f"{n}", **more} for n in range(number)]


def assert_whole(run, number):
    """Each row once, in order."""
    assert run.table("responses")["id"].to_pylist() == [f"{n}" for n in range(number)]
    assert run.table("errors").num_rows == 0 and run.manifest["rows"]["input"] == number


def test_a_run_that_was_broken_off_goes_on_with_what_is_missing(tmp_path, score):
    path = write_lines(tmp_path / "a.jsonl", *rows(200))
    with pytest.raises(EngineUnusable):
        score(path, start=Starts(dies_after=90))
    (work,) = (tmp_path / "out" / "_work").glob("*/plan.json")
    run = score(path)
    assert_whole(run, 200)
    assert run.summary.run_id == work.parent.name
    assert 110 <= run.manifest["computed"]["rows"] < 200
    assert set(run.table("usage")["attempt"].to_pylist()) == {1, 2}
    assert run.manifest["usage"]["completion_tokens"] == sum(run.table("usage")["completion_tokens"].to_pylist())
    assert run.show.seen[0].done.num_done >= 0 and run.show.seen[-1].done.num_done == 200
    assert list((tmp_path / "out" / "_work").iterdir()) == []


@pytest.mark.slow
def test_equal_rows_of_which_one_is_done_are_asked_once_more(tmp_path, score):
    lines = rows(1) + [{"prompt": "same", "temperature": 0, "request_id": f"{n}"} for n in range(1, 6)]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    with pytest.raises(EngineUnusable):
        score(path, start=Starts(dies_after=1))
    assert_whole(run := score(path), 6)
    assert run.table("usage")["is_deduplicated"].to_pylist().count(True) == 4


@pytest.mark.slow
def test_a_run_that_was_broken_off_while_it_published_needs_no_engine(tmp_path, score, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", *rows(100), "broken")
    with monkeypatch.context() as patch:
        patch.setattr(write, "publish_manifest", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            score(path)
    run = score(path, start=NONE)
    assert run.table("responses").num_rows == 100 and run.table("errors").num_rows == 1
    assert run.manifest["computed"]["rows"] == 0


def test_nothing_is_left_of_a_run_that_was_broken_off_while_it_published_when_another_takes_its_place(
    tmp_path, score, monkeypatch
):
    path = write_lines(tmp_path / "a.jsonl", *rows(3))
    first = score(path)
    with monkeypatch.context() as patch:
        patch.setattr(write, "publish_manifest", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            score(path, restart=True)
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2
    second = score(path, restart=True)
    ids = {first.summary.run_id, second.summary.run_id}
    assert {run.name for run in (tmp_path / "out" / "runs").iterdir()} == ids


def test_a_finished_run_is_left_as_it_is(tmp_path, score, capsys):
    from jobs.reports import print_summary

    path = write_lines(tmp_path / "a.jsonl", *rows(5), {"prompt": "fail"})
    first = score(path)
    again = score(path, start=NONE)
    assert again.summary.run_id == first.summary.run_id and again.summary.is_repeat
    assert (again.summary.totals.num_answered, again.summary.totals.reasons) == (5, {"asked_to_fail": 1})
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 1
    print_summary(again.summary)
    assert "finished before, and nothing has changed: --restart runs it anew" in capsys.readouterr().out


@pytest.mark.parametrize("is_finished", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_other_rows_are_refused_and_the_difference_is_named(tmp_path, score, is_finished):
    path = write_lines(tmp_path / "a.jsonl", *rows(8))
    if is_finished:
        score(path)
    else:
        with pytest.raises(EngineUnusable):
            score(path, start=Starts(dies_after=2))
    write_lines(path, *rows(9))
    with pytest.raises(UsageError, match=r"a\.jsonl has changed.*--restart"):
        score(path, start=NONE)
    assert_whole(score(path, restart=True), 9)
    assert list((tmp_path / "out" / "_work").iterdir()) == []


@pytest.mark.slow
def test_a_folder_of_an_older_version_is_named(tmp_path, score):
    path = write_lines(tmp_path / "a.jsonl", *rows(3))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text('{"version": "1", "run_id": "20250101T000000Z-abcdef"}')
    with pytest.raises(UsageError, match=r"an older version made it.*--restart"):
        score(path, start=NONE)
    assert_whole(score(path, restart=True), 3)


RECIPE = {
    "version": tables.VERSION,
    "inputs": {"a": "1 x", "b": "2 y"},
    "model": {"": "m", "formal": "m+f"},
    "settings": {"endpoint": None, "fill": {}, "strict": False, "limit": None, "sample": None, "dedup": True},
    "limits": {"max_choices": 8},
}


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("inputs", {"a": "1 x", "b": "3 z"}, ["b has changed"]),
        ("inputs", {"a": "1 x", "c": "2 y"}, ["b is gone", "c is new"]),
        ("inputs", {"b": "2 y", "a": "1 x"}, ["the inputs are in another order"]),
        ("model", {"": "n"}, ["the model, or an engine setting that reaches its answers, is another"]),
        ("model", {"": "m"}, ["the adapters are others"]),
        ("settings", RECIPE["settings"] | {"fill": {"n": 2}, "limit": 3}, ["--set is another", "--limit is another"]),
        ("limits", {"max_choices": 9}, ["max_choices of requests is judged otherwise"]),
    ],
)
def test_differences_are_told_in_words(part, value, words):
    assert runs.differences(RECIPE, RECIPE) == []
    assert runs.differences(RECIPE, {**RECIPE, part: value}) == words


def test_rows_that_failed_in_the_engine_are_tried_again_on_demand(tmp_path, score):
    lines = [{"prompt": f"late:{tmp_path / 'once'}", "request_id": "0"}, *rows(6)[1:]]
    path = write_lines(tmp_path / "a.jsonl", *lines, "broken")
    first = score(path)
    assert first.table("errors")["reason"].to_pylist() == ["deadline_exceeded", "invalid_json"]
    assert score(path, start=NONE).summary.is_repeat
    second = score(path, retry_errors=True)
    assert second.summary.run_id != first.summary.run_id
    assert second.table("responses")["id"].to_pylist() == [f"{n}" for n in range(6)]
    assert second.table("usage")["attempt"].to_pylist() == [2, 1, 1, 1, 1, 1]
    assert second.table("errors")["reason"].to_pylist() == ["invalid_json"]
    # The first run's tables stand as they were.
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2
    assert score(path, start=NONE, retry_errors=True).summary.is_repeat


@pytest.mark.slow
def test_a_new_run_beside_a_finished_one_is_gone_on_with_when_it_was_broken_off(tmp_path, score):
    path = write_lines(tmp_path / "a.jsonl", *rows(3))
    first = score(path)
    write_lines(path, *rows(100))
    with pytest.raises(EngineUnusable):
        score(path, restart=True, start=Starts(dies_after=40))
    run = score(path)
    assert_whole(run, 100)
    assert run.summary.run_id != first.summary.run_id and run.manifest["computed"]["rows"] < 100


@pytest.mark.slow
def test_a_run_that_was_broken_off_before_its_plan_begins_anew(tmp_path, score, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", *rows(5))
    with monkeypatch.context() as patch:
        patch.setattr(batch.runs, "save_plan", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            score(path)
    assert_whole(score(path), 5)
    assert list((tmp_path / "out" / "_work").iterdir()) == []


def test_a_run_that_is_told_to_drain_finishes_what_it_has_begun_and_no_more(tmp_path, score):
    lines = [{"prompt": f"slow:0.3 row {n}", "request_id": f"{n}"} for n in range(600)]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    few = {"engine": EngineSettings(max_num_seqs=8), "replicas": 1}
    with pytest.raises(Interrupted, match=r"\d+ of 600 rows are left"):
        score(path, drain_at=1, **few)
    (work,) = (tmp_path / "out" / "_work").glob("2*")
    num_staged = sum(pq.read_metadata(part).num_rows for part in work.glob("staged/*/*"))
    assert 0 < num_staged < 600
    run = score(path, **few)
    assert_whole(run, 600)
    # Nothing that was begun is begun again.
    assert run.manifest["computed"]["rows"] == 600 - num_staged


def test_answers_to_equal_requests_are_carried_over_and_the_rest_is_computed(tmp_path, score):
    old = [{"prompt": f"row {n}", "request_id": f"old{n}", "user": "a"} for n in range(90)]
    path = write_lines(tmp_path / "a.jsonl", *old, {"prompt": "fail"}, {"prompt": "row 3", "request_id": "again"})
    first = score(path)
    answers = dict(zip(first.table("responses")["id"].to_pylist(), first.table("responses").to_pylist(), strict=True))
    new = [{"prompt": f"row {n}", "request_id": f"new{n}", "user": "b"} for n in range(100)]
    lines = [*reversed(new), {"prompt": "fail"}, "broken", {"prompt": "row 3", "request_id": "twice"}]
    write_lines(path, *lines)
    with pytest.raises(UsageError, match=r"a\.jsonl has changed. Give --changed for"):
        score(path, start=NONE)
    second = score(path, changed=True)
    told = second.table("responses").to_pylist()
    assert [row["id"] for row in told] == [*(f"new{n}" for n in reversed(range(100))), "twice"]
    assert [row["source_line"] for row in told] == [*range(1, 101), 103]
    carried = {row["id"]: row for row in second.table("usage").to_pylist() if row["is_carried"]}
    assert set(carried) == {*(f"new{n}" for n in range(90)), "twice"}
    for row in told:
        # The request is this run's; the answer is the earlier one's, to the letter.
        assert json.loads(row["request"])["request_id"] == row["id"]
        if row["id"] in carried and row["id"] != "twice":
            before = answers[row["id"].replace("new", "old")]
            assert row["response"] == before["response"] and row["fingerprint"] == before["fingerprint"]
    assert second.table("errors")["reason"].to_pylist() == ["asked_to_fail", "invalid_json"]
    # What failed, and what is new.
    assert second.manifest["computed"]["rows"] == 11 and second.manifest["rows_carried"] == 91
    assert second.summary.totals.num_answered == 101 and first.summary.run_id != second.summary.run_id
    assert score(path, changed=True, start=NONE).summary.is_repeat


@pytest.mark.slow
def test_when_nothing_is_new_no_engine_starts_and_without_a_run_all_is_computed(tmp_path, score):
    path = write_lines(tmp_path / "a.jsonl", *rows(20))
    assert score(path, changed=True).manifest["rows_carried"] == 0
    write_lines(path, *reversed(rows(20)), "broken")
    run = score(path, changed=True, start=NONE)
    assert run.table("responses")["id"].to_pylist() == [f"{n}" for n in reversed(range(20))]
    assert run.manifest["rows_carried"] == 20 and run.table("errors").num_rows == 1
    # Another model's answers are others.
    other = score(path, changed=True, engine=EngineSettings(seed=7))
    assert other.manifest["rows_carried"] == 0 and other.manifest["computed"]["rows"] == 20


@pytest.mark.slow
def test_a_run_that_carries_over_goes_on_when_it_was_broken_off(tmp_path, score):
    path = write_lines(tmp_path / "a.jsonl", *rows(50))
    score(path)
    write_lines(path, *rows(150))
    with pytest.raises(EngineUnusable):
        score(path, changed=True, start=Starts(dies_after=40))
    run = score(path, changed=True)
    assert_whole(run, 150)
    assert run.manifest["rows_carried"] == 50 and 0 < run.manifest["computed"]["rows"] < 100


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from pipelines import batch
from schemas.settings import RunSettings
from tests.conftest import Silence
from tests.deterministic import Starts
batch.run(RunSettings(inputs=({path!r},), output={out!r}, served_names=("test",)), Silence(), Starts())
"""


def test_a_driver_that_is_killed_loses_no_row(tmp_path, score, monkeypatch):
    lines = [{"prompt": f"slow:{0.1 + n / 40} row", "request_id": f"{n}"} for n in range(400)]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    script = SCRIPT.format(root=str(ROOT), path=str(path), out=str(tmp_path / "out"))
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, start_new_session=True) as driver:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "out").glob("_work/*/staged/*/*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        with pytest.raises(UsageError, match=f"another run writes there .process {driver.pid} on "):
            score(path, start=NONE)
        os.killpg(driver.pid, signal.SIGKILL)
    run = score(path)
    assert_whole(run, 400)
    assert 0 < run.manifest["computed"]["rows"] < 400


def test_a_lease_that_another_run_has_taken_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.05)
    taken = json.dumps({"token": "x", "host": "elsewhere", "pid": 1, "started": 0.0, "renewed": time.time()})
    with Lease(Folder.at(str(tmp_path))) as held:
        held.check()
        (tmp_path / "_work" / "lease.json").write_text(taken)
        time.sleep(0.5)
        with pytest.raises(UsageError, match="another run has taken this folder over"):
            held.check()
        # That one is done by now.
        (tmp_path / "_work" / "lease.json").unlink()
        time.sleep(0.2)
        with pytest.raises(UsageError, match="another run has taken this folder over"):
            held.check()
    (tmp_path / "_work" / "lease.json").write_text(taken)
    with pytest.raises(UsageError, match="another run writes there"), Lease(Folder.at(str(tmp_path))):
        pass
    assert (tmp_path / "_work" / "lease.json").read_text() == taken


def test_a_lease_that_nobody_renews_is_taken(tmp_path):
    output = Folder.at(str(tmp_path))
    held = {"token": "x", "host": "elsewhere", "pid": 1, "started": 0.0, "renewed": time.time()}
    (tmp_path / "_work").mkdir()
    (tmp_path / "_work" / "lease.json").write_text(json.dumps(held))
    with pytest.raises(UsageError, match="process 1 on elsewhere, last heard of 0 s ago"), Lease(output):
        pass
    for free in ({**held, "renewed": time.time() - EXPIRES_S - 1}, {"token": "x"}):
        (tmp_path / "_work" / "lease.json").write_text(json.dumps(free) if "host" in free else "{")
        with Lease(output):
            told = json.loads((tmp_path / "_work" / "lease.json").read_text())
            assert told["pid"] == os.getpid()
            with pytest.raises(UsageError, match="another run writes there"), Lease(output):
                pass
        assert not (tmp_path / "_work" / "lease.json").exists()
