"""What a replica takes at a time, by the chunks that there are."""

from dataclasses import replace
from queue import SimpleQueue

import pytest

from pipelines.placement import Placement
from pipelines.replica import take_all
from schemas.plans import Chunk

PLACEMENT = Placement(
    num_replicas=2,
    is_fixed=True,
    replicas_per_node=2,
    num_cpus=1,
    num_gpus=0,
    num_parts=1,
    rows_in_flight=384,
    environment={},
)


def chunks(*works, rows=10):
    return [Chunk("part", 0, 0, rows, rows, 0, b"", float(work), 1) for work in works]


def in_flight(made, **placement):
    return replace(PLACEMENT, **placement).for_chunks(made).chunks_in_flight


def test_a_replica_takes_as_many_chunks_as_fill_its_engine_and_one_to_spare():
    assert in_flight(chunks(*[10] * 1_000, rows=384)) == 2
    assert in_flight(chunks(*[10] * 1_000, rows=100)) == 5


def test_a_replica_takes_no_more_than_an_even_share_of_the_work_at_first():
    works = [100] * 10 + [10] * 90
    # Half of the chunks would be three quarters of the work.
    taken = in_flight(chunks(*works))
    assert taken == 9 and sum(works[:taken]) <= sum(works) / 2 < sum(works[: taken + 1])
    assert in_flight(chunks(*works), num_replicas=1) == 40


def test_one_request_that_is_more_than_a_share_leaves_the_engines_no_emptier():
    assert in_flight(chunks(10_000, *[10] * 90)) == 8


@pytest.mark.parametrize(("num_chunks", "taken"), [(1, 1), (2, 1), (3, 2), (8, 4)])
def test_a_few_chunks_are_shared_by_their_number(num_chunks, taken):
    assert in_flight(chunks(*[10] * num_chunks)) == taken


def test_no_replica_is_started_without_a_chunk_unless_so_many_were_asked_for():
    assert replace(PLACEMENT, is_fixed=False, num_replicas=4).for_chunks(chunks(1, 1, 1)).num_replicas == 3
    assert replace(PLACEMENT, num_replicas=4).for_chunks(chunks(1, 1, 1)).num_replicas == 4


def test_what_is_there_is_taken_together_and_nothing_after_a_while():
    queue = SimpleQueue()
    for number in range(3):
        queue.put(number)
    assert take_all(queue, timeout_s=60) == [0, 1, 2]
    assert take_all(queue, timeout_s=0.01) == []
