"""Order: what goes first, what goes together, and where it is cut. Pure; works on paths (`pipelines/prefixes.py`).

Requests that share a beginning go one after the other, so that an engine still has it in its cache. Among what shares
the same beginning, the longest goes first and the smallest last: work that starts late must not be what a whole run
waits for. How long something takes is at least its share of all the work, and at least its longest answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from pipelines.prefixes import key_at, num_levels, shared_levels

# What a token of a prompt costs, of what one of an answer does: prompts are computed many tokens at a time.
PROMPT_COST = 1 / 8
# Sequences that are computed side by side, where nobody says.
DEFAULT_WIDTH = 256


@dataclass(frozen=True, slots=True)
class Leaf:
    """A request, or several that stay together: the beginning that they share, their work, their longest answer."""

    path: bytes
    # In tokens of answers; a prompt's count for PROMPT_COST each.
    work: float
    # In tokens.
    longest: float


def walk(leaves: Sequence[Leaf], width: int = DEFAULT_WIDTH) -> list[int]:
    """The places of `leaves` in the order in which they are to be worked on; the same for the same leaves.

    `width`: sequences that are computed side by side, on all replicas together.
    """
    by_path = sorted(range(len(leaves)), key=lambda place: leaves[place].path)
    paths = [leaves[place].path for place in by_path]
    work_before = list(accumulate((leaves[place].work for place in by_path), initial=0.0))
    ordered: list[int] = []

    def duration(start: int, end: int) -> float:
        longest = max(leaves[place].longest for place in by_path[start:end])
        return max((work_before[end] - work_before[start]) / width, longest)

    def visit(start: int, end: int) -> None:
        if end - start == 1:
            ordered.append(by_path[start])
            return
        level = shared_levels(paths[start], paths[end - 1])
        parts = _parts(paths, start, end, level)
        for part in sorted(parts, key=lambda part: -duration(*part)):
            # Equal paths have no parts of their own.
            if part == (start, end):
                ordered.extend(sorted(by_path[start:end], key=lambda place: (-leaves[place].longest, place)))
            else:
                visit(*part)

    if leaves:
        visit(0, len(leaves))
    return ordered


def _parts(paths: Sequence[bytes], start: int, end: int, level: int) -> list[tuple[int, int]]:
    """Ranges of sorted paths that agree at `level`, the first at which they don't all; a path that ends before it is a
    range of its own."""
    if num_levels(paths[end - 1]) == level:
        return [(start, end)]
    parts: list[tuple[int, int]] = []
    for place in range(start, end):
        key = key_at(paths[place], level)
        if parts and key and key == key_at(paths[place - 1], level):
            parts[-1] = (parts[-1][0], place + 1)
        else:
            parts.append((place, place + 1))
    return parts


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """How large a chunk is to be: by its work, within bounds of its rows."""

    work: float
    min_rows: int
    max_rows: int


def cut(leaves: Sequence[Leaf], size: ChunkSize) -> list[tuple[int, int]]:
    """Ranges of ordered leaves, one for each chunk: about equal work, and the ends of groups where they are near."""
    chunks: list[tuple[int, int]] = []
    start, work, least_shared = 0, 0.0, 1 << 30
    for place in range(1, len(leaves)):
        work += leaves[place - 1].work
        num_rows = place - start
        shared = shared_levels(leaves[place - 1].path, leaves[place].path)
        is_full = num_rows >= size.max_rows or (num_rows >= size.min_rows and work >= size.work)
        is_half = num_rows >= size.max_rows / 2 or (num_rows >= size.min_rows and work >= size.work / 2)
        if is_full or (is_half and shared < least_shared):
            chunks.append((start, place))
            start, work, least_shared = place, 0.0, 1 << 30
        else:
            least_shared = min(least_shared, shared)
    if leaves:
        chunks.append((start, len(leaves)))
    return chunks


# A chunk is at most so small a part of a replica's even share of the work.
PARTS_OF_A_SHARE = 8


def shares(works: Sequence[float], num_replicas: int) -> list[float]:
    """Most work of the chunk that begins at each place of an order, for all replicas to end together.

    Chunks are alike in the first half, so that what a replica takes of them by number is as much by work; from there
    on what is left is cut into so many, and chunks grow smaller towards the end (guided self-scheduling).
    """
    left = total = sum(works)
    most = []
    for work in works:
        most.append(min(total, 2 * left) / (num_replicas * PARTS_OF_A_SHARE))
        left -= work
    return most


def deal(works: Sequence[float], num_hands: int, each: int) -> list[int]:
    """The places of chunks of so much work in an order in which the first `each` of them, and the next, come to as much
    work: each goes to the hand that has least by then.

    Whoever is up first takes a hand at once, and is not to have all that takes longest.
    """
    hands: list[list[int]] = [[] for _ in range(num_hands)]
    held = [0.0] * num_hands
    for place in range(min(len(works), num_hands * each)):
        hand = min((hand for hand in range(num_hands) if len(hands[hand]) < each), key=held.__getitem__)
        hands[hand].append(place)
        held[hand] += works[place]
    return [*chain.from_iterable(hands), *range(num_hands * each, len(works))]
