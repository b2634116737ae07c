"""A run over several nodes: all of them work, one may be lost, and one that joins late takes its share."""

from collections import Counter

import pytest

from tests.conftest import read_table, write_lines
from tests.nodes import run_on_nodes

NUM_ROWS = 300


@pytest.fixture
def lines(tmp_path):
    rows = [{"prompt": f"slow:{0.1 + n / 50} row {n}", "request_id": f"{n}"} for n in range(NUM_ROWS)]
    return write_lines(tmp_path / "a.jsonl", *rows)


def assert_whole(output, num_rows=NUM_ROWS):
    assert read_table(output, "responses")["id"].to_pylist() == [f"{n}" for n in range(num_rows)]
    assert read_table(output, "errors").num_rows == 0


def rows_by_replica(output):
    return Counter(read_table(output, "usage")["replica"].to_pylist())


@pytest.mark.slow
def test_all_nodes_work(tmp_path, lines):
    told = run_on_nodes(lines, tmp_path / "out", 3, meeting=3)
    assert told == {"replicas": 3, "answered": NUM_ROWS}
    assert_whole(tmp_path / "out")
    shares = rows_by_replica(tmp_path / "out")
    assert len(shares) == 3 and min(shares.values()) > NUM_ROWS / 10


@pytest.mark.slow
@pytest.mark.parametrize("then", [("kill",), ("kill", "join")])
def test_a_node_that_goes_away_costs_no_row(tmp_path, lines, then):
    """Whether another one comes in its place or not."""
    told = run_on_nodes(lines, tmp_path / "out", 3, *then, meeting=3)
    assert told["answered"] == NUM_ROWS
    assert_whole(tmp_path / "out")


@pytest.mark.slow
def test_a_node_that_joins_late_takes_work(tmp_path):
    # Longer than a node and its engine take to come up; little of it is taken at a time.
    rows = [{"prompt": f"slow:2 row {n}", "request_id": f"{n}"} for n in range(120)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    told = run_on_nodes(path, tmp_path / "out", 1, "join", max_num_seqs=2)
    assert told["replicas"] == 2
    assert_whole(tmp_path / "out", 120)
    assert len(rows_by_replica(tmp_path / "out")) == 2
