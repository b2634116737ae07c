"""Order: beginnings together, the longest first, cuts at the ends of groups."""

import random
from itertools import pairwise

import pytest

from pipelines.order import ChunkSize, Leaf, cut, deal, shares, walk
from pipelines.prefixes import BLOCK, path_of, shared_levels


def path(*words):
    """The path of a prompt in which each word stands for a whole block."""
    return path_of([int.from_bytes(word.encode()) % 2**32 for word in words for _ in range(BLOCK)])


def ordered(leaves, width=4):
    return [leaves[place] for place in walk(leaves, width)]


def test_what_shares_a_beginning_goes_together_whatever_else_is_there():
    draw = random.Random(5)  # noqa: S311 - work to repeat, not a secret
    leaves = [
        Leaf(path(f"g{draw.randrange(6)}", f"s{draw.randrange(3)}", f"own{n}"), draw.randint(1, 90), draw.randint(1, 9))
        for n in range(300)
    ]
    draw.shuffle(leaves)
    told = ordered(leaves)
    assert sorted(map(id, told)) == sorted(map(id, leaves))
    for levels in (2, 3):
        keys = [leaf.path[: 4 * levels] for leaf in told]
        assert sum(a != b for a, b in pairwise(keys)) + 1 == len(set(keys))


def test_groups_with_the_most_work_go_first_and_the_smallest_last():
    sizes = {"small": 2, "large": 40, "middle": 10}
    leaves = [Leaf(path(name, f"{n}"), 10, 1) for name, size in sizes.items() for n in range(size)]
    told = [leaf.path[4:8] for leaf in ordered(leaves)]
    names = [name for name in ("large", "middle", "small") for _ in range(sizes[name])]
    assert told == [path(name)[4:8] for name in names]


def test_what_shares_nothing_goes_by_the_length_of_its_answer():
    leaves = [Leaf(path(f"{n}"), n % 7, n % 7) for n in range(30)]
    lengths = [leaf.longest for leaf in ordered(leaves)]
    assert lengths == sorted(lengths, reverse=True)


def test_one_very_long_answer_goes_before_a_group_that_takes_less_time():
    group = [Leaf(path("g", f"{n}"), 10, 10) for n in range(100)]
    alone = Leaf(path("alone"), 400, 400)
    assert ordered([*group, alone], width=4)[0] is alone
    assert ordered([*group, alone], width=1)[-1] is alone


def test_inside_a_group_the_longest_answers_go_first():
    leaves = [Leaf(path("g", f"{n}"), n, n) for n in (3, 9, 1, 5)]
    assert [leaf.longest for leaf in ordered(leaves)] == [9, 5, 3, 1]
    equal = [Leaf(path("g"), n, n) for n in (3, 9, 1)]
    assert [leaf.longest for leaf in ordered(equal)] == [9, 3, 1]


def test_a_prompt_that_begins_another_goes_beside_it():
    whole, part, other = Leaf(path("a", "b"), 1, 1), Leaf(path("a"), 9, 9), Leaf(path("z"), 5, 5)
    assert ordered([whole, other, part]) == [part, whole, other]


def test_the_order_is_the_same_each_time():
    leaves = [Leaf(path(f"{n % 3}"), 1, 1) for n in range(20)]
    assert walk(leaves) == walk(leaves) and walk([]) == []


@pytest.mark.parametrize(("rows", "work", "lengths"), [(4, 1e9, [4, 4, 2]), (100, 30, [3, 3, 3, 1]), (100, 5, [2] * 5)])
def test_chunks_have_about_equal_work_within_bounds_of_their_rows(rows, work, lengths):
    leaves = [Leaf(path(f"{n}"), 10, 10) for n in range(10)]
    chunks = cut(leaves, ChunkSize(work, 2, rows))
    assert [end - start for start, end in chunks] == lengths
    assert [place for start, end in chunks for place in range(start, end)] == list(range(10))
    assert cut([], ChunkSize(1, 1, 1)) == []


def test_a_chunk_ends_with_its_group_where_that_is_near():
    leaves = [Leaf(path(f"g{n // 12}", f"{n}"), 1, 1) for n in range(36)]
    assert cut(leaves, ChunkSize(1e9, 1, 16)) == [(0, 12), (12, 24), (24, 36)]
    ends = [end for _, end in cut(leaves, ChunkSize(1e9, 1, 5))]
    assert all(shared_levels(leaves[end - 1].path, leaves[end].path) >= 1 for end in ends[:-1])


def test_chunks_grow_smaller_towards_the_end():
    most = shares([10.0] * 100, 2)
    assert most == sorted(most, reverse=True) and most[-1] == pytest.approx(10 / 8)
    assert most[50] == pytest.approx(most[0]) and most[75] == pytest.approx(most[0] / 2)


def test_half_of_the_first_chunks_is_half_of_their_work():
    """Whoever is up first takes several at once, which nobody gets back: then by number is to be by work."""
    most = shares([1.0] * 100, 2)
    assert most[0] == 100 / 16 and len({round(one, 9) for one in most[:50]}) == 1


def test_hands_of_the_first_chunks_come_to_as_much_work_whoever_takes_one_first():
    assert deal([5] * 6 + [1] * 3, 2, 3) == [0, 2, 4, 1, 3, 5, 6, 7, 8]
    # Full chunks and halves by turns, as the ends of groups make them.
    dealt = deal([9, 4, 9, 4, 9, 4, 9, 4, 1, 1], 2, 4)
    assert sum([9, 4, 9, 4, 9, 4, 9, 4][place] for place in dealt[:4]) == 26 and dealt[8:] == [8, 9]
    assert deal([1, 1, 1], 2, 5) == [0, 2, 1] and deal([2, 1], 1, 2) == [0, 1] and deal([], 2, 2) == []
