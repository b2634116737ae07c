"""How a run's rows differ from an earlier run's: what is new, changed, gone, or answered otherwise; exact."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import changes
from schemas import tables
from schemas.settings import EngineSettings
from tests.conftest import write_lines
from tests.deterministic import Starts


def side(name, request, answer, line=1, is_old=False, has_own_id=True, file="f"):
    """A row of SIDES: `name` is its own id, else what it is called by its place."""
    row = {"id": name, "source_file": file, "source_line": line, "text": [answer], "finish_reason": ["stop"]}
    key = name if has_own_id else request
    told = {"is_old": is_old, "has_own_id": has_own_id, "key": key, "mark": request, "fingerprint": request}
    return {**row, **told, "sign": f"{key} {request} {answer}", "reason": None}


def old(*args, **kwargs):
    return side(*args, **kwargs, is_old=True)


def difference(*rows):
    found = changes.compare(pa.Table.from_pylist(list(rows), schema=tables.SIDES))
    found = found.sort_by([("file", "ascending"), ("line", "ascending")])
    joined = pa.concat_tables(changes._joined([found]))
    assert joined.schema.equals(tables.CHANGES, check_metadata=True)
    return [(row["kind"], row["id"], row["text"], row["old_text"]) for row in joined.to_pylist()]


def test_each_kind_is_told_by_id_and_request():
    rows = [old("a", "r1", "x"), side("a", "r1", "x"), old("b", "r1", "x"), side("b", "r2", "y", line=2)]
    rows += [
        old("c", "r3", "x"),
        side("c", "r3", "z", line=3),
        old("d", "r4", "w", line=4),
        side("e", "r4", "w", line=5),
    ]
    assert difference(*rows) == [
        ("changed", "b", ["y"], ["x"]),
        ("changed_answer", "c", ["z"], ["x"]),
        ("gone", "d", None, ["w"]),
        ("new", "e", ["w"], None),
    ]


def test_of_equal_ids_equal_rows_belong_together_first():
    rows = [old("a", "r1", "x", line=1), old("a", "r2", "y", line=2), old("a", "r3", "z", line=3)]
    news = [side("a", "r4", "w", line=1), side("a", "r1", "x", line=2), side("a", "r2", "other", line=3)]
    assert difference(*rows, *news) == [("changed", "a", ["w"], ["z"]), ("changed_answer", "a", ["other"], ["y"])]
    assert difference(rows[0], rows[0], news[1]) == [("gone", "a", None, ["x"])]


def test_rows_without_an_id_are_known_by_their_request_and_then_by_their_place():
    """A line put in at the top moves all others, and changes none."""
    before = [old(f"f:{n}", f"r{n}", f"a{n}", line=n, has_own_id=False) for n in (1, 2, 3)]
    after = [side(f"f:{n + 1}", f"r{n}", f"a{n}", line=n + 1, has_own_id=False) for n in (1, 2, 3)]
    top = side("f:1", "r0", "a0", line=1, has_own_id=False)
    assert difference(*before, top, *after) == [("new", "f:1", ["a0"], None)]
    edited = side("f:2", "r9", "a9", line=2, has_own_id=False)
    same = [side(f"f:{n}", f"r{n}", f"a{n}", line=n, has_own_id=False) for n in (1, 3)]
    assert difference(*before, edited, *same) == [("changed", "f:2", ["a9"], ["a2"])]
    named = side("mine", "r9", "a9", line=2)
    assert [row[0] for row in difference(*before, named, *same)] in (["gone", "new"], ["new", "gone"])


def test_a_place_that_goes_on_in_the_next_table_is_one():
    pair = [old("f:1", "r1", "x", has_own_id=False), side("f:1", "r2", "y", has_own_id=False)]
    found = changes.compare(pa.Table.from_pylist(pair, schema=tables.SIDES))
    halves = [found.slice(0, 1), found.slice(1), changes.compare(tables.SIDES.empty_table())]
    assert pa.concat_tables(changes._joined(halves))["kind"].to_pylist() == ["changed"]


def published(run):
    return [{name: row[name] for name in ("kind", "id", "text", "old_text", "reason", "old_reason")} for row in run]


def test_a_run_with_changed_publishes_how_it_differs(tmp_path, score):
    """The three days of a dataset whose files are named after their days."""
    days = [tmp_path / f"day{n}.jsonl" for n in range(3)]
    keep = [{"prompt": f"row {n}", "request_id": f"{n}"} for n in range(40)]
    write_lines(days[0], *keep, {"prompt": "fail", "request_id": "f"}, {"prompt": "no id"}, "broken", '{"a": 1}')
    first = score(days[0], changed=True)
    assert first.manifest["changes"] is None and not (first.output / "runs" / first.summary.run_id / "changes").exists()
    edited = {"prompt": "row changed", "request_id": "3"}
    write_lines(days[1], edited, *keep[4:], {"prompt": "ok", "request_id": "f"}, "broken", {"prompt": "no id"})
    second = score(days[1], changed=True)
    told = {"new": 0, "changed": 2, "gone": 4, "changed_answer": 0, "unchanged": 38}
    assert second.manifest["changes"] == {"against": first.summary.run_id, **told}
    assert second.summary.changes == second.manifest["changes"]
    rows = {row["id"]: row for row in second.table("changes").to_pylist()}
    assert {name: row["kind"] for name, row in rows.items()} == {
        **{f"{n}": "gone" for n in range(3)},
        f"{days[0]}:44": "gone",
        "3": "changed",
        "f": "changed",
    }
    assert (rows["3"]["text"], rows["3"]["old_text"]) == (["changed row"], ["3 row"])
    assert (rows["3"]["source_line"], rows["3"]["old_source_line"]) == (1, 4)
    assert (rows["f"]["text"], rows["f"]["old_reason"], rows["f"]["old_text"]) == (["ok"], "asked_to_fail", None)
    assert rows["0"]["text"] is None and rows["0"]["old_fingerprint"] and rows["0"]["fingerprint"] is None
    folder = second.output / "runs" / second.summary.run_id
    (file,) = [file for file in second.manifest["files"] if file["path"].startswith("changes/")]
    assert file["rows"] == 6 and (folder / file["path"]).stat().st_size == file["bytes"]
    assert pq.read_schema(folder / file["path"]).equals(tables.CHANGES, check_metadata=True)
    third = score(write_lines(days[2], *days[1].read_text().splitlines()), changed=True, start=Starts(error="none"))
    assert third.manifest["changes"]["unchanged"] == 40 and third.table("changes").num_rows == 0


@pytest.mark.slow
def test_another_model_gives_other_answers_to_the_same_requests(tmp_path, score):
    lines = [
        {"prompt": f"late:{tmp_path / 'once'} a", "request_id": "0"},
        {"prompt": "b", "request_id": "1"},
        {"prompt": "c"},
    ]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    score(path)
    # All are asked again, and of what failed there is an answer now.
    run = score(path, changed=True, engine=EngineSettings(seed=7))
    assert run.manifest["rows_carried"] == 0
    told = {"new": 0, "changed": 0, "gone": 0, "changed_answer": 1, "unchanged": 2}
    assert run.manifest["changes"] == {"against": run.manifest["changes"]["against"], **told}
    (row,) = run.table("changes").to_pylist()
    assert (row["id"], row["old_reason"], row["reason"]) == ("0", "deadline_exceeded", None)
    assert row["fingerprint"] != row["old_fingerprint"]


@pytest.mark.slow
def test_many_row_groups_are_compared_by_ray_alike(tmp_path, score, monkeypatch):
    first = [{"prompt": f"row {n}", **({"request_id": f"{n}"} if n % 2 else {})} for n in range(300)]
    path = write_lines(tmp_path / "a.jsonl", *first)
    score(path)
    second = [{**row, "prompt": f"other {n}"} if n % 3 == 0 else row for n, row in enumerate(first) if n % 10 != 1]
    write_lines(path, *second, *({"prompt": f"added {n}"} for n in range(5)))
    few = score(path, changed=True)
    monkeypatch.setattr(changes, "_GROUPS_AT_ONCE", 0)
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(earlier_manifest(tmp_path, few)))
    many = score(path, changed=True, start=Starts())
    assert many.summary.run_id != few.summary.run_id
    assert many.manifest["changes"] == few.manifest["changes"]
    assert many.table("changes").to_pylist() == few.table("changes").to_pylist()
    kinds = few.table("changes")["kind"].to_pylist()
    told = few.manifest["changes"]
    assert {kind: kinds.count(kind) for kind in tables.CHANGE_KINDS} == {
        kind: told[kind] for kind in tables.CHANGE_KINDS
    }
    # Each line of this run is told of once, and so is each of the earlier one's.
    assert told["unchanged"] + told["new"] + told["changed"] == len(second) + 5
    assert told["unchanged"] + told["gone"] + told["changed"] == 300


def earlier_manifest(tmp_path, run):
    against = run.manifest["changes"]["against"]
    return json.loads((tmp_path / "out" / "runs" / against / "manifest.json").read_text())


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (
            '{"choices": [{"message": {"content": null, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}}]}',
            '[{"name": "f"}]',
        ),
        ('{"choices": [{"message": {"content": null}}]}', None),
    ],
)
def test_the_calls_of_an_answer_without_text_are_its_text(response, told):
    assert changes._calls(response, 0) == told


def test_a_legacy_chat_that_calls_a_tool_is_told_by_its_calls():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    told = changes._calls(json.dumps({"created": 1, "text": "", "tool_calls": [call]}), 0)
    assert json.loads(told) == [call["function"]]
    assert changes._calls(json.dumps({"created": 1, "text": ""}), 0) is None
