"""Paths: as many shared levels as shared blocks, and an order that walks the tree depth first."""

import random

from pipelines.prefixes import BLOCK, LEVEL_ENDS, num_levels, num_shared_tokens, path_of, shared_levels


def test_paths_share_as_many_levels_as_whole_blocks():
    tokens = list(range(5 * BLOCK + 3))
    for agree in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK):
        other = tokens[:agree] + [9_999] * (len(tokens) - agree)
        shared = shared_levels(path_of(tokens), path_of(other))
        assert num_shared_tokens(shared) == agree // BLOCK * BLOCK
    assert shared_levels(path_of(tokens), path_of(tokens)) == num_levels(path_of(tokens)) == 6


def test_prompts_of_different_roots_share_nothing():
    tokens = list(range(2 * BLOCK))
    assert shared_levels(path_of(tokens, "one"), path_of(tokens, "other")) == 0
    assert path_of([1.0] * BLOCK) == path_of([1] * BLOCK)
    assert path_of([], "one") != path_of([], "other") and num_levels(path_of([])) == 1


def test_equal_blocks_behind_different_ones_are_different():
    one, other = [1] * BLOCK + [7] * BLOCK, [2] * BLOCK + [7] * BLOCK
    assert shared_levels(path_of(one), path_of(other)) == 1


def test_the_path_of_a_very_long_prompt_stays_short():
    assert len(path_of([7] * 1_000_000)) < 500
    assert sorted(set(LEVEL_ENDS)) == LEVEL_ENDS and all(end % BLOCK == 0 for end in LEVEL_ENDS)


def test_sorted_paths_walk_the_tree_depth_first():
    draw = random.Random(3)  # noqa: S311 - work to repeat, not a secret
    trunks = [[draw.randrange(1000) for _ in range(BLOCK * draw.randint(1, 4))] for _ in range(5)]
    prompts = [draw.choice(trunks) + [draw.randrange(1000) for _ in range(40)] for _ in range(200)]
    paths = sorted(map(path_of, prompts))
    # A shared beginning that was left doesn't come back.
    for level in range(1, 6):
        keys = [path[: 4 * (level + 1)] for path in paths if num_levels(path) > level]
        runs = [key for key, before in zip(keys, [None, *keys], strict=False) if key != before]
        assert len(runs) == len(set(runs))
