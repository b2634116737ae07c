"""Planning: order, chunks, repeated requests, totals; and that a run's answers come out the same whatever the plan."""

import json
import random

import pyarrow.parquet as pq
import pytest

from pipelines import plan
from pipelines.order import ChunkSize
from pipelines.prefixes import BLOCK
from pipelines.storage import Folder
from pipelines.validate import Validator
from schemas import tables
from tests.conftest import write_lines
from tests.test_trouble import LIMITS

BIG = ChunkSize(1e9, 1, 1_000)


def body(tokens, **more):
    return {"prompt": tokens, "max_tokens": 4, "temperature": 0, **more}


def prompt(*words, tail=3):
    """A prompt of a block for each word, and some tokens more."""
    return [int.from_bytes(word.encode()) % 40_000 for word in words for _ in range(BLOCK)] + [1] * tail


def checked(bodies):
    """`tables.CHECKED` of some bodies, in the order of a sorted block."""
    from pipelines.checks import Checks

    rows = [
        {"source_index": 0, "source_file": "f", "source_line": n, "source_offset": n, "reason": None, "message": None}
        | {"line": json.dumps(one).encode()}
        for n, one in enumerate(bodies, 1)
    ]
    import pyarrow as pa

    validator = Validator(Checks("batch", None, LIMITS))
    block = validator(pa.Table.from_pylist(rows, schema=tables.LINES))
    assert block["reason"].null_count == block.num_rows, block["message"]
    return plan.WithKey(None)(block).sort_by("key")


def spool(tmp_path, bodies, size=BIG, **options):
    """Chunks and totals of some bodies, and the spooled rows of each chunk."""
    work = Folder.at(str(tmp_path / "work"))
    (written,) = plan.SpoolWriter(work, size, **options)(checked(bodies))
    totals = json.loads(written.pop("totals").to_pylist()[0])
    chunks = [plan.Chunk(*values) for values in zip(*written.values(), strict=True)]
    rows = [plan.read_chunk(work, one.part, one.row_group, one.start, one.num_rows).to_pylist() for one in chunks]
    return chunks, totals, rows


def test_equal_requests_that_must_have_the_same_answer_stand_behind_one_another(tmp_path):
    bodies = [body([5, 6]), body([7]), body([5, 6], user="u"), body([5, 6], max_tokens=5), body([5, 6])]
    chunks, totals, (rows,) = spool(tmp_path, bodies)
    asked = [[row["source_line"] for row in rows if not row["is_repeated"]], [r["is_repeated"] for r in rows]]
    assert sorted(asked[0]) == [1, 2, 4] and sum(asked[1]) == 2
    place = [row["source_line"] for row in rows].index(1)
    assert [row["source_line"] for row in rows[place : place + 3]] == [1, 3, 5]
    assert (chunks[0].num_rows, chunks[0].num_requests) == (5, 3)
    assert (totals["num_rows"], totals["num_repeated"], totals["repeated_tokens"]) == (5, 2, 4)
    assert (totals["output_tokens"], totals["computed_tokens"]) == (21, 13)


@pytest.mark.parametrize(
    ("bodies", "options"),
    [
        ([body([5], temperature=1)] * 2, {}),
        ([body([5], temperature=None)] * 2, {}),
        ([body([5], priority=1), body([5], priority=2)], {}),
        ([body([5], cache_salt="a"), body([5], cache_salt="b")], {}),
        ([body([5])] * 2, {"with_dedup": False}),
    ],
)
def test_others_are_each_answered_by_themselves(tmp_path, bodies, options):
    chunks, totals, _ = spool(tmp_path, bodies, **options)
    assert sum(chunk.num_requests for chunk in chunks) == 2 and totals["num_repeated"] == 0


def test_one_answer_is_fanned_out_to_so_many_rows_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "MAX_REPEATED", 3)
    chunks, totals, _ = spool(tmp_path, [body([5])] * 10)
    assert sum(chunk.num_requests for chunk in chunks) == 3 and totals["num_repeated"] == 7


def test_shared_beginnings_are_told_as_the_best_that_any_order_could_find(tmp_path):
    draw = random.Random(1)  # noqa: S311 - work to repeat, not a secret
    bodies = [body(prompt(f"g{n % 7}", "x", f"own{n}")) for n in range(70)]
    draw.shuffle(bodies)
    _, totals, _ = spool(tmp_path, bodies)
    # Of each of seven groups all but the first find two blocks.
    assert totals["shared_tokens"] == 63 * 2 * BLOCK
    assert totals["prompt_tokens"] == 70 * (3 * BLOCK + 3)


def test_lower_priorities_go_first_and_longer_answers_before_shorter_ones(tmp_path):
    bodies = [body([n], max_tokens=1 + n % 5, priority=n % 3 - 1) for n in range(60)]
    chunks, _, rows = spool(tmp_path, bodies, ChunkSize(1e9, 1, 8))
    order = plan.arrange(chunks[::-1], 100)
    assert [chunk.priority for chunk in order] == sorted(chunk.priority for chunk in chunks)
    for priority in (-1, 0, 1):
        longest = [chunk.longest for chunk in order if chunk.priority == priority]
        assert longest == sorted(longest, reverse=True) and longest[0] == 5
    assert sum(map(len, rows)) == 60


def test_pieces_of_a_chunk_hold_its_rows_in_order(tmp_path):
    bodies = [body([n], max_tokens=10) for n in range(20)] + [body([n], max_tokens=10) for n in range(5)]
    chunks, _, (rows,) = spool(tmp_path, bodies)
    pieces = plan.split(chunks, 2)
    assert len(pieces) > 4 and [one.num_rows for one in pieces] != [1] * 25
    work = Folder.at(str(tmp_path / "work"))
    read = [plan.read_chunk(work, one.part, one.row_group, one.start, one.num_rows).to_pylist() for one in pieces]
    assert [row for piece in read for row in piece] == rows
    # A repeated row stays with the one that is asked.
    assert not any(piece[0]["is_repeated"] for piece in read)
    assert sum(one.work for one in pieces) == pytest.approx(chunks[0].work)


def test_a_large_plan_is_cut_fine_and_a_small_one_no_finer_than_pays():
    assert plan.chunk_size(10, 1, 384).max_rows == 64
    assert plan.chunk_size(1_000_000, 2, 384).max_rows == 384
    assert plan.chunk_size(20_000, 2, 384).max_rows == 100


def test_a_run_over_several_blocks_sorts_them_all_and_publishes_in_input_order(tmp_path, score, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr("pipelines.staged._PARTS_AT_ONCE", 3)
    bodies = [body(prompt(f"g{n % 7}", tail=1 + n % 3)) | {"request_id": f"{n}"} for n in range(400)]
    bodies[17] = {"prompt": 3}
    paths = [write_lines(tmp_path / f"{name}.jsonl", *bodies[part::2]) for part, name in enumerate("ab")]
    run = score(*paths, keep_work=True)
    responses, errors = run.table("responses"), run.table("errors")
    assert responses["id"].to_pylist() == [f"{n}" for part in (0, 1) for n in range(part, 400, 2) if n != 17]
    assert [(row["source_file"], row["source_line"]) for row in errors.to_pylist()] == [(str(paths[1]), 9)]
    # 21 different requests, of which one lost a row; each was computed once.
    usage = run.table("usage")
    assert usage["is_deduplicated"].to_pylist().count(False) == 21
    assert run.manifest["plan"]["num_repeated"] == 399 - 21
    for text, mark in zip(responses["response"].to_pylist(), responses["fingerprint"].to_pylist(), strict=True):
        assert mark and json.loads(text)["choices"]
    assert len(set(responses["fingerprint"].to_pylist())) == 21
    assert len(list((run.output / "_work").glob("*/spool/*.parquet"))) > 1


def test_without_dedup_each_row_is_computed(tmp_path, score):
    run = score(write_lines(tmp_path / "a.jsonl", *[body([5])] * 5), dedup=False)
    assert run.table("usage")["is_deduplicated"].to_pylist() == [False] * 5
    assert len(set(run.table("responses")["fingerprint"].to_pylist())) == 1


def test_a_failure_of_the_request_is_that_of_all_that_ask_the_same(tmp_path, score):
    lines = [{"prompt": "fail", "temperature": 0}] * 3 + [{"prompt": "a", "temperature": 0}]
    run = score(write_lines(tmp_path / "a.jsonl", *lines))
    assert run.table("errors")["source_line"].to_pylist() == [1, 2, 3]
    assert run.summary.totals.reasons == {"asked_to_fail": 3}


def test_a_failure_of_ours_is_tried_again_for_the_next_that_asks_the_same(tmp_path, score):
    prompt = f"late:{tmp_path / 'once'}"
    run = score(write_lines(tmp_path / "a.jsonl", *[{"prompt": prompt, "temperature": 0}] * 3))
    assert run.table("errors")["source_line"].to_pylist() == [1]
    assert run.table("responses")["source_line"].to_pylist() == [2, 3]


def test_the_spool_is_in_the_order_of_the_plan(tmp_path, score):
    bodies = [{"prompt": [n], "max_tokens": n + 1} for n in range(30)]
    run = score(write_lines(tmp_path / "a.jsonl", *bodies), keep_work=True)
    (part,) = (run.output / "_work").glob("*/spool/*.parquet")
    assert pq.read_table(part)["num_output_tokens"].to_pylist() == list(range(30, 0, -1))
    assert run.manifest["plan"]["output_tokens"] == sum(range(31))
