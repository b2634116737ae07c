"""Prefixes: a prompt's place in the tree of all prompts, as a short path that sorts where the tree is walked.

A path has four bytes for each level that the prompt reaches. A level stands for all tokens up to its end, so two
prompts share as many levels as their beginnings agree in; paths in the order of their bytes are a depth-first walk.
Levels are blocks of tokens, since an engine finds whole blocks again alone; far down they grow wider, so that the path
of a very long prompt stays short.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

# Tokens of a level; the engine's own blocks are as large or half of it.
BLOCK = 32
# Levels of one block; from there on, each is an eighth longer than all before it.
_FINE_LEVELS = 64
_KEY_BYTES = 4


def _level_ends(longest: int = 1 << 31) -> list[int]:
    ends = [BLOCK * (level + 1) for level in range(_FINE_LEVELS)]
    while ends[-1] < longest:
        ends.append(ends[-1] + max(BLOCK, ends[-1] // 8 // BLOCK * BLOCK))
    return ends


# Tokens from a prompt's beginning to the end of each level.
LEVEL_ENDS = _level_ends()


def path_of(tokens: Sequence[int], root: str = "") -> bytes:
    """The path of a prompt.

    `root`: what its cache is kept apart by (an adapter, a salt); prompts of different roots share no level. The first
    four bytes are those of the root.
    """
    digest = hashlib.blake2b(root.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES)
    keys = [digest.digest()]
    data = np.asarray(tokens, dtype=np.uint32).tobytes()
    start = 0
    for end in LEVEL_ENDS:
        if end > len(tokens):
            break
        digest.update(data[4 * start : 4 * end])
        keys.append(digest.copy().digest())
        start = end
    return b"".join(keys)


def shared_levels(one: bytes, other: bytes) -> int:
    """How many levels two paths share; 0: not even the root's."""
    longest = min(len(one), len(other))
    for end in range(_KEY_BYTES, longest + 1, _KEY_BYTES):
        if one[end - _KEY_BYTES : end] != other[end - _KEY_BYTES : end]:
            return end // _KEY_BYTES - 1
    return longest // _KEY_BYTES


def key_at(path: bytes, level: int) -> bytes:
    """The path's key at a level, 0 being the root's; empty where the path ends before it."""
    return path[_KEY_BYTES * level : _KEY_BYTES * (level + 1)]


def first_levels(path: bytes, number: int) -> bytes:
    return path[: _KEY_BYTES * number]


def num_levels(path: bytes) -> int:
    return len(path) // _KEY_BYTES


def num_shared_tokens(levels: int) -> int:
    """Tokens that prompts which share so many levels (the root's among them) have in common, at least."""
    return LEVEL_ENDS[levels - 2] if levels > 1 else 0
