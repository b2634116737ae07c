"""Writing: files that appear whole or not at all, attempts that supersede one another, right-sized parts."""

import hashlib
import json
import pickle
import random
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import staged, write
from pipelines.storage import Folder
from schemas import tables
from schemas.failures import UsageError


def outcome(line, **values):
    row = {"source_index": 0, "id": str(line), "source_file": "f", "source_line": line, "source_offset": 0}
    row |= {"endpoint": "/v1/completions", "request": "{}", "model": "m", "response": json.dumps({"n": line})}
    row |= {"text": ["t"], "finish_reason": ["stop"], "created": datetime.now(UTC), "prompt_tokens": 1}
    row |= {"completion_tokens": 1, "total_tokens": 2, "total_ms": 1.0, "replica": "r", "attempt": 1}
    return {**row, "is_deduplicated": False, "is_carried": False, **values}


def outcomes(*lines):
    return pa.Table.from_pylist([outcome(line) for line in lines], schema=tables.OUTCOMES)


def test_a_file_whose_writing_fails_never_appears(tmp_path):
    folder = Folder.at(str(tmp_path))
    with pytest.raises(RuntimeError, match="midway"), folder.create("deep", "a.bin") as stream:
        stream.write(b"half")
        raise RuntimeError("midway")
    assert folder.join("deep").names() == []
    folder.write(b"whole", "deep", "a.bin")
    assert folder.join("deep").names() == ["a.bin"] and folder.read("deep", "a.bin") == b"whole"


def test_a_folder_is_the_same_place_in_every_process_and_shown_as_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = pickle.loads(pickle.dumps(Folder.at("out")))  # noqa: S301 - our own bytes
    monkeypatch.chdir("/")
    folder.write(b"x", "a.bin")
    assert (tmp_path / "out" / "a.bin").read_bytes() == b"x"
    assert folder.show("runs", "1") == folder.join("runs").show("1") == "out/runs/1"
    assert Folder.at("/").join("runs").uri == "/runs" and Folder.at("s3://b/").show("x") == "s3://b/x"


def test_each_attempt_at_a_chunk_has_a_number_of_its_own(tmp_path):
    stager = staged.Stager(Folder.at(str(tmp_path)))
    assert stager.begin(7)[0] == 1
    assert stager.put(7, 1, 0, outcomes(1)) != stager.put(7, 1, 1, outcomes(2))
    attempt, parts, rows = stager.begin(7)
    assert attempt == 2 and len(parts) == 2 and rows["source_line"].to_pylist() == [1, 2]
    assert stager.begin(8)[0] == 1


def test_staged_parts_come_back_in_input_order(tmp_path):
    work = Folder.at(str(tmp_path))
    stager = staged.Stager(work)
    parts = [stager.put(3, 1, 0, outcomes(5, 2)), stager.put(0, 1, 0, outcomes(9, 1))]
    (rows,) = staged.sorted_outcomes(work, parts)
    assert rows["source_line"].to_pylist() == [1, 2, 5, 9]
    (none,) = staged.sorted_outcomes(work, [])
    assert none.num_rows == 0


def test_parts_and_row_groups_are_right_sized(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "ROW_GROUP_BYTES", 2_000)
    monkeypatch.setattr(write, "PART_BYTES", 20_000)
    with write.TableWriter(Folder.at(str(tmp_path)), "responses", tables.RESPONSES) as writer:
        for start in range(0, 2_000, 4):
            writer.write(outcomes(*range(start, start + 4)))
    paths = sorted((tmp_path / "responses").iterdir())
    assert len(paths) > 2 and [path.name for path in paths] == [f"part-{n:05d}.parquet" for n in range(len(paths))]
    assert [row for path in paths for row in pq.read_table(path)["source_line"].to_pylist()] == list(range(2_000))
    assert pq.read_metadata(paths[0]).num_row_groups > 1
    for path, file in zip(paths, writer.files, strict=True):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]


def test_row_groups_are_right_sized_however_large_the_tables_are(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "ROW_GROUP_BYTES", 20_000)
    monkeypatch.setattr(tables, "BLOCK_BYTES", 4_000)
    parts = [staged.Stager(Folder.at(str(tmp_path))).put(0, 1, 0, outcomes(*range(1, 2_001)))]
    published = write.publish_tables(
        Folder.at(str(tmp_path / "run")), staged.sorted_outcomes(Folder.at(str(tmp_path)), parts), 2_000
    )
    assert published.num_rows["responses"] == published.num_rows["usage"] == 2_000
    groups = pq.read_metadata(tmp_path / "run" / "responses" / "part-00000.parquet")
    assert groups.num_row_groups > 5
    assert pq.read_table(tmp_path / "run" / "usage")["source_line"].to_pylist() == list(range(1, 2_001))


def test_a_table_whose_writing_fails_leaves_no_part(tmp_path):
    writer = write.TableWriter(Folder.at(str(tmp_path)), "responses", tables.RESPONSES)
    with pytest.raises(RuntimeError, match="midway"), writer:
        writer.write(outcomes(1))
        writer._flush()
        raise RuntimeError("midway")
    assert list((tmp_path / "responses").iterdir()) == []


def test_a_missing_or_repeated_row_is_never_published(tmp_path):
    work, run = Folder.at(str(tmp_path / "work")), Folder.at(str(tmp_path / "run"))
    stager = staged.Stager(work)
    one, other = stager.put(0, 1, 0, outcomes(1, 2)), stager.put(1, 1, 0, outcomes(3, 2))
    with pytest.raises(AssertionError, match="3"):
        write.publish_tables(run, staged.sorted_outcomes(work, [one]), 3)
    with pytest.raises(AssertionError, match="3"):
        write.publish_tables(run, staged.sorted_outcomes(work, [one, other]), 4)
    assert list((tmp_path / "run").rglob("*.parquet")) == []


def test_an_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/out: can't be written to \(not a directory\)"):
        write.check_output(Folder.at(str(tmp_path / "file" / "out")))


def test_large_parts_are_never_read_together(tmp_path, ray_cluster, monkeypatch):
    monkeypatch.setattr(staged, "SORTED_BYTES", 100_000)
    work = Folder.at(str(tmp_path))
    stager = staged.Stager(work)
    lines = [(line * 7) % 400 for line in range(400)]
    draw = random.Random(1)  # noqa: S311 - work to repeat, not a secret
    parts = []
    for number in range(0, 400, 100):
        rows = [outcome(line, response=draw.randbytes(500).hex()) for line in lines[number : number + 100]]
        parts.append(stager.put(number, 1, 0, pa.Table.from_pylist(rows, schema=tables.OUTCOMES)))
    told = list(staged.sorted_outcomes(work, parts))
    assert [line for rows in told for line in rows["source_line"].to_pylist()] == list(range(400))
    assert len(told) >= 4 and max(rows.get_total_buffer_size() for rows in told) < 200_000
    assert all(rows.nbytes < 150_000 for rows in staged.PartReader(work, 100_000).read(parts))


@pytest.mark.parametrize("parts_at_once", [1, 64])
def test_of_several_outcomes_of_a_row_the_newest_attempts_is_published(
    tmp_path, ray_cluster, monkeypatch, parts_at_once
):
    monkeypatch.setattr(staged, "_PARTS_AT_ONCE", parts_at_once)
    work = Folder.at(str(tmp_path))
    stager = staged.Stager(work)
    tried = [outcome(line, attempt=attempt, model=f"{attempt}") for attempt in (2, 1, 3) for line in (4, 1, 9)]
    parts = [
        stager.put(0, number, 0, pa.Table.from_pylist([row], schema=tables.OUTCOMES))
        for number, row in enumerate(tried)
    ]
    told = pa.concat_tables(rows.select(["source_line", "model"]) for rows in staged.sorted_outcomes(work, parts))
    assert told.to_pydict() == {"source_line": [1, 4, 9], "model": ["3", "3", "3"]}
