"""A whole run over Ray, with the deterministic engine: one row out for each line in, in order, published at the end."""

import contextlib
import gc
import json
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from pipelines.gate import Gate
from pipelines.progress import Orders
from pipelines.replica import MAX_DEATHS_IN_A_ROW, Replica
from schemas import tables
from schemas.failures import EngineUnusable, TooManyErrors, UsageError
from schemas.settings import parse_max_errors
from tests.conftest import Silence, write_lines
from tests.deterministic import DeterministicEngine, Starts

# Rows of a chunk on CPUs, when the rows are short and one replica takes them.
CHUNK_ROWS = 64


def test_each_line_becomes_one_row_in_input_order(tmp_path, score):
    first = write_lines(tmp_path / "a.jsonl", *({"prompt": f"row {n}"} for n in range(5 * CHUNK_ROWS + 3)))
    second = write_lines(
        tmp_path / "b.jsonl", {"prompt": "please fail"}, "broken", "", {"prompt": "one two"}, {"prompt": "fail"}, "{}}"
    )
    run = score(first, second)
    responses, errors = run.table("responses"), run.table("errors")
    assert responses["source_line"].to_pylist() == [*range(1, 5 * CHUNK_ROWS + 4), 4]
    assert responses["text"].to_pylist()[-2:] == [[f"{5 * CHUNK_ROWS + 2} row"], ["two one"]]
    assert [(row["source_line"], row["stage"], row["reason"]) for row in errors.to_pylist()] == [
        (1, "infer", "asked_to_fail"),
        (2, "validate", "invalid_json"),
        (5, "infer", "asked_to_fail"),
        (6, "validate", "invalid_json"),
    ]
    assert run.summary.num_rows == responses.num_rows + errors.num_rows == 5 * CHUNK_ROWS + 8
    assert run.summary.totals.reasons == {"asked_to_fail": 2, "invalid_json": 2}


@pytest.mark.slow
def test_requests_and_ids_come_out_as_they_went_in(tmp_path, score):
    texts = [
        '{"request_id": "2024-05-01", "prompt": "2024-01-01T00:00:00Z", "seed": 9007199254740993}',
        '{"request_id":"00123","prompt":[1,2,3],"stop":"\\n"}',
        '{"model":"test","request_id":"ü \\u00e9","prompt":["a","b"],"extra_field":{"deep":[1.50,null]}}',
    ]
    run = score(write_lines(tmp_path / "a.jsonl", *texts))
    assert run.table("responses")["request"].to_pylist() == texts
    assert run.table("responses")["id"].to_pylist() == ["2024-05-01", "00123", "ü é"]
    assert run.table("responses")["prompt"].to_pylist() == ["2024-01-01T00:00:00Z", None, None]


@pytest.mark.slow
def test_a_callers_own_columns_come_out_beside_the_answer_and_are_told(tmp_path, score):
    lines = [
        {"prompt": "a b", "label": "spam", "row": 17},
        {"custom_id": "007", "method": "POST", "url": "/v1/completions", "body": {"prompt": "c"}, "tag": [1]},
    ]
    run = score(write_lines(tmp_path / "a.jsonl", *lines))
    rows = run.table("responses").to_pylist()
    assert [json.loads(row["extra"]) for row in rows] == [{"label": "spam", "row": 17}, {"tag": [1]}]
    assert [json.loads(row["request"]) for row in rows] == [{"prompt": "a b"}, {"prompt": "c"}]
    assert [row["id"] for row in rows] == [f"{tmp_path}/a.jsonl:1", "007"]
    assert run.summary.totals.unknown_fields == run.manifest["unknown_fields"] == {"label": 1, "row": 1}


def test_the_manifest_tells_what_the_tables_hold(tmp_path, score):
    run = score(write_lines(tmp_path / "a.jsonl", {"prompt": "a b"}, {"prompt": "fail"}, {"prompt": "c"}))
    manifest = run.manifest
    assert manifest["rows"] == {"input": 3, "responses": 2, "usage": 2, "errors": 1}
    assert manifest["errors_by_reason"] == {"asked_to_fail": 1}
    usage = run.table("usage")
    assert manifest["usage"] == {
        "prompt_tokens": sum(usage["prompt_tokens"].to_pylist()),
        "completion_tokens": sum(usage["completion_tokens"].to_pylist()),
    }
    folder = run.output / "runs" / manifest["run_id"]
    assert (folder / "_SUCCESS").exists()
    for file in manifest["files"]:
        assert (folder / file["path"]).stat().st_size == file["bytes"]
        assert pq.read_metadata(folder / file["path"]).num_rows == file["rows"]
    assert list((run.output / "_work").iterdir()) == []


@pytest.mark.parametrize("lines", [[], ["", "   "], ["broken"]])
def test_without_requests_there_are_whole_tables_and_no_engine(tmp_path, score, lines):
    run = score(write_lines(tmp_path / "a.jsonl", *lines), start=Starts(error="must not start"))
    for name, schema in tables.PUBLISHED.items():
        assert run.table(name).schema.equals(schema, check_metadata=True)
    assert run.table("responses").num_rows == 0
    assert run.table("errors").num_rows == run.summary.num_rows == lines.count("broken")


@pytest.mark.slow
def test_all_tables_have_the_published_schema_whatever_the_rows_hold(tmp_path, score):
    run = score(write_lines(tmp_path / "a.jsonl", {"prompt": "fail"}, {"prompt": [1]}))
    for name, schema in tables.PUBLISHED.items():
        assert run.table(name).schema.equals(schema, check_metadata=True)
        assert not any(pa.types.is_null(field.type) for field in run.table(name).schema)


def test_several_replicas_share_the_work(tmp_path, score):
    (tmp_path / "meeting").mkdir()
    lines = [{"prompt": f"slow:0.05 row {n}"} for n in range(6 * CHUNK_ROWS)]
    start = Starts(meeting=(str(tmp_path / "meeting"), 2))
    run = score(write_lines(tmp_path / "a.jsonl", *lines), start=start, replicas=2)
    assert len(set(run.table("usage")["replica"].to_pylist())) == 2
    assert run.table("responses")["source_line"].to_pylist() == list(range(1, 6 * CHUNK_ROWS + 1))


@dataclass(frozen=True)
class OneByOne(Starts):
    """Of two engines that come to the meeting one is up some seconds after the other, and leaves a file to say so."""

    def __call__(self) -> DeterministicEngine:
        folder = Path(self.meeting[0])
        try:
            (folder / "first").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(3)
            (folder / "second").touch()
        return DeterministicEngine()


@pytest.mark.slow
def test_a_replica_that_is_up_first_leaves_the_other_half_of_the_work_and_of_the_longest(tmp_path, score):
    # None is answered before both are up: what the first has taken by then is what it took at once.
    wait = f"until:{tmp_path / 'second'} slow:3"
    short = [{"prompt": f"{wait} row {n}", "max_tokens": 30} for n in range(92)]
    long = [{"prompt": f"{wait} row {n}", "max_tokens": 400} for n in range(8)]
    path = write_lines(tmp_path / "a.jsonl", *short, *long)
    replicas = score(path, start=OneByOne(meeting=(str(tmp_path), 2)), replicas=2).table("usage")["replica"]
    assert [one["counts"] for one in replicas.slice(92).value_counts().to_pylist()] == [4, 4]
    assert min(one["counts"] for one in replicas.value_counts().to_pylist()) >= 35


def test_an_engine_that_does_not_start_ends_the_run_with_its_reason(tmp_path, score):
    with pytest.raises(EngineUnusable, match=r"^no such weights$"):
        score(write_lines(tmp_path / "a.jsonl", {"prompt": "a"}), start=Starts(error="no such weights"))


def test_a_run_that_failed_leaves_its_cores_though_its_error_is_kept(tmp_path, score):
    with pytest.raises(EngineUnusable) as kept:
        score(write_lines(tmp_path / "a.jsonl", {"prompt": "a"}), start=Starts(error="no such weights"))
    until = time.monotonic() + 15
    while (free := ray.available_resources().get("CPU")) != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < until, f"{free} cores are free"
        time.sleep(0.2)
    assert kept.value


def test_an_engine_that_dies_time_and_again_ends_the_run_and_publishes_nothing(tmp_path, score):
    with pytest.raises(EngineUnusable, match="the engine's process has died"):
        score(write_lines(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"}), start=Starts(dies_after=1))
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.slow
def test_a_replica_that_dies_time_and_again_ends_the_run(tmp_path, score):
    with pytest.raises(EngineUnusable, match="a replica's process died, and 3 new ones in its place"):
        score(write_lines(tmp_path / "a.jsonl", {"prompt": "exit"}))


def test_an_answer_that_no_table_can_hold_is_that_rows_failure(tmp_path, score):
    run = score(write_lines(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "nan"}, {"prompt": "b"}))
    assert run.table("responses")["source_line"].to_pylist() == [1, 3]
    (error,) = run.table("errors").to_pylist()
    assert (error["status_code"], error["reason"], error["source_line"]) == (500, "unusable_answer", 2)


class Unheard:
    """A scoreboard that orders nothing."""

    class report:
        remote = staticmethod(lambda *_: ray.put(Orders()))


@pytest.mark.parametrize("fails", [1, MAX_DEATHS_IN_A_ROW - 2, MAX_DEATHS_IN_A_ROW - 1])
def test_an_engine_that_does_not_start_again_at_once_is_tried_again(ray_cluster, fails):
    class Engine(DeterministicEngine):
        left = fails

        def restart(self):
            self.left -= 1
            if self.left >= 0:
                raise EngineUnusable("it didn't start again")
            super().restart()

    replica = Replica(Engine, None, None, Unheard, "run")
    with contextlib.nullcontext() if fails < MAX_DEATHS_IN_A_ROW - 1 else pytest.raises(EngineUnusable, match="again"):
        replica._restart_engine(0, EngineUnusable("it died"))


def test_a_replica_that_is_dropped_closes_its_engine(ray_cluster):
    closed = []

    class Engine(DeterministicEngine):
        def close(self):
            closed.append(self)

    replica = Replica(Engine, None, None, Unheard, "run")
    assert closed == []
    del replica
    gc.collect()
    assert len(closed) == 1


def test_more_replicas_than_fit_are_refused_before_an_engine_starts(tmp_path, score):
    with pytest.raises(
        UsageError, match=r"^1000 replicas with 1 CPU core each don't fit: the cluster has \d+ CPU cores"
    ):
        score(write_lines(tmp_path / "a.jsonl", {"prompt": "a"}), start=Starts(error="must not start"), replicas=1000)


@pytest.mark.slow
def test_a_run_anew_is_a_second_folder_and_the_manifest_moves_on(tmp_path, score):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    first, second = score(path).summary, score(path, restart=True).summary
    assert {path.name for path in (tmp_path / "out" / "runs").iterdir()} == {first.run_id, second.run_id}
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["run_id"] == second.run_id


def test_an_output_folder_that_holds_something_else_is_refused(tmp_path, score):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"out: holds thesis\.tex"):
        score(write_lines(tmp_path / "a.jsonl", {"prompt": "a"}))


@pytest.mark.slow
def test_progress_has_true_totals(tmp_path, score, monkeypatch):
    half, rest = tmp_path / "half", tmp_path / "rest"

    def progress(self, now):
        """Half of the rows are answered when all are seen to be under way, and the rest when those are seen."""
        self.seen.append(now)
        if now.num_in_flight == 2 * CHUNK_ROWS:
            half.touch()
        if now.done.num_done == CHUNK_ROWS:
            rest.touch()

    monkeypatch.setattr(Silence, "progress", progress)
    lines = [{"prompt": f"until:{rest if n % 2 else half} row"} for n in range(2 * CHUNK_ROWS)]
    run = score(write_lines(tmp_path / "a.jsonl", *lines, "broken"))
    assert half.exists() and rest.exists()
    assert {now.total_rows for now in run.show.seen} == {2 * CHUNK_ROWS}
    done = [now.done.num_done for now in run.show.seen]
    assert done == sorted(done) and CHUNK_ROWS in done and done[-1] == 2 * CHUNK_ROWS
    assert max(now.num_in_flight for now in run.show.seen) == 2 * CHUNK_ROWS


@pytest.mark.slow
def test_the_tables_open_where_the_summary_says(tmp_path, score):
    import duckdb
    import pandas
    import polars

    run = score(write_lines(tmp_path / "a.jsonl", {"prompt": "a b", "request_id": "x"}, {"prompt": "fail"}))
    glob = run.summary.tables["responses"]
    assert duckdb.sql(f"FROM '{glob}' SELECT id, text").fetchall() == [("x", ["b a"])]
    assert pandas.read_parquet(glob.removesuffix("/*.parquet"))["id"].tolist() == ["x"]
    assert polars.read_parquet(glob)["id"].to_list() == ["x"]


def test_an_engine_that_dies_is_started_again_and_no_row_is_lost(score, tmp_path):
    prompts = [f"row {number}" for number in range(80)]
    prompts[40] = f"row 40 die:{tmp_path / 'died'}"
    run = score(write_lines(tmp_path / "in.jsonl", *({"prompt": prompt} for prompt in prompts)))
    responses = run.table("responses")
    assert run.table("errors").num_rows == 0 and (tmp_path / "died").exists()
    assert sorted(responses["prompt"].to_pylist()) == sorted(prompts)


def test_requests_that_kill_the_engine_each_time_are_given_up_and_cost_nobody_else(score, tmp_path):
    prompts = [f"row {number}" for number in range(150)]
    prompts[40] = prompts[130] = "die"
    lines = [{"prompt": prompt, "temperature": 0} for prompt in prompts]
    run = score(write_lines(tmp_path / "in.jsonl", *lines), dedup=False)
    errors = run.table("errors").to_pylist()
    assert [(row["source_line"], row["reason"], row["status_code"]) for row in errors] == [
        (41, "engine_died", 500),
        (131, "engine_died", 500),
    ]
    assert run.table("responses").num_rows == 148


def test_who_wants_the_engine_alone_waits_for_the_others_and_they_for_him():
    gate, told = Gate(), []
    gate.enter()

    def alone():
        with gate.alone():
            told.append("alone")

    def enter():
        gate.enter()
        told.append("together")

    first = threading.Thread(target=alone)
    first.start()
    time.sleep(0.1)
    second = threading.Thread(target=enter)
    second.start()
    time.sleep(0.1)
    assert told == []
    gate.leave()
    first.join(5)
    second.join(5)
    assert told == ["alone", "together"]


@pytest.mark.parametrize(
    ("most", "words"),
    [
        (2, "3 of 200 rows have failed (3 invalid_json), and --max-errors allows 2"),
        (0.01, "3 of 200 rows have failed (3 invalid_json), and --max-errors allows 0.01 of all"),
    ],
)
def test_a_run_with_too_many_lines_refused_stops_before_an_engine_starts(score, tmp_path, most, words):
    path = write_lines(tmp_path / "in.jsonl", *({"prompt": f"{n}"} for n in range(197)), "x", "y", "z")
    with pytest.raises(TooManyErrors, match=re.escape(words)):
        score(path, start=Starts(error="must not start"), max_errors=most)


def test_a_run_in_which_too_many_rows_fail_stops_and_goes_on_when_it_may(score, tmp_path):
    lines = [{"prompt": f"fail {n}" if n % 2 else f"row {n}"} for n in range(300)]
    path = write_lines(tmp_path / "in.jsonl", *lines)
    with pytest.raises(TooManyErrors, match=r"\d+ of 300 rows have failed \(\d+ asked_to_fail\)"):
        score(path, max_errors=10)
    assert not (tmp_path / "out" / "manifest.json").exists()
    run = score(path, max_errors=150)
    assert run.table("errors").num_rows == run.table("responses").num_rows == 150
    assert run.manifest["computed"]["rows"] < 300


@pytest.mark.parametrize(("text", "most"), [(None, None), ("0", 0), ("100", 100), ("5%", 0.05), ("0.5%", 0.005)])
def test_how_many_rows_may_fail_is_a_number_or_a_share(text, most):
    assert parse_max_errors(text) == most and type(parse_max_errors(text)) is type(most)


@pytest.mark.parametrize("text", ["", "many", "-1", "100%", "-1%", "1.5", "%"])
def test_how_many_rows_may_fail_is_refused_where_it_is_neither(text):
    with pytest.raises(UsageError, match="expected a number of rows, such as 100, or a share"):
        parse_max_errors(text)
