"""Rows of a published run for a page that shows them one by one: which ones, and how much of each.

A first pass over the columns that a filter asks for chooses rows by number; only the row groups that hold chosen ones
are read whole. Memory holds the chosen rows and one row group.
"""

import heapq
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jiter
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.published import PublishedRun
from schemas.failures import UsageError
from schemas.replies import choices_of

Order = Literal["input", "slowest", "longest"]
FILTERS = ("id", "file", "line", "model", "finish_reason", "reason", "contains")
# What a page holds of a row, where it isn't asked for whole: characters of each text, tokens and choices of an answer.
MAX_TEXT, MAX_TOKENS, MAX_CHOICES = 20_000, 2_000, 16
# Characters of JSON that a page holds of all rows together.
MAX_PAGE = 24 << 20
# A line with so many digits is one of no file.
_LINE_DIGITS = 19
_OF_ANSWERS, _OF_ERRORS = {"finish_reason", "model"}, {"reason"}
_SORTED_BY = {"slowest": "total_ms", "longest": "completion_tokens"}
_COLUMNS = {"id": "id", "file": "source_file", "line": "source_line", "model": "model", "reason": "reason"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows: `most` answers and as many errors, of those that a filter lets through, in an order."""

    most: int
    where: Mapping[str, str] = field(default_factory=dict)
    order: Order = "input"
    # Whether texts are left as long as they are.
    whole: bool = False

    @property
    def has_answers(self) -> bool:
        return not _OF_ERRORS & self.where.keys()

    @property
    def has_errors(self) -> bool:
        return self.order == "input" and not _OF_ANSWERS & self.where.keys()


@dataclass(slots=True)
class Chosen:
    """Rows as a page shows them, and how many more there were room for but not space."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    num_left_out: int = 0


def parse_where(pairs: list[str]) -> dict[str, str]:
    """Filters of `FIELD=VALUE` pairs. Raises UsageError."""
    where: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name not in FILTERS or not equals:
            raise UsageError(f"--where {pair}: expected FIELD=VALUE, with a field of {', '.join(FILTERS)}")
        if name in where:
            raise UsageError(f"--where {name}: found twice. Give each field once")
        if name == "line" and not (value.isdecimal() and len(value) < _LINE_DIGITS):
            raise UsageError(f"--where {pair}: expected a line's number, from 1")
        where[name] = value
    if _OF_ANSWERS & where.keys() and _OF_ERRORS & where.keys():
        raise UsageError("--where reason: is of errors, and model and finish_reason of answers. Give one kind of them")
    return where


def choose(run: PublishedRun, wanted: Wanted) -> Chosen:
    """The rows of a run that are wanted, as a page shows them."""
    chosen, size = Chosen(), 0
    for row in _rows(run, wanted):
        shown = row if wanted.whole else _cut(row, wanted, run)
        size += _size(shown)
        if size > MAX_PAGE and chosen.rows and not wanted.whole:
            chosen.num_left_out += 1
        else:
            chosen.rows.append(shown)
    return chosen


def _rows(run: PublishedRun, wanted: Wanted) -> Iterator[dict[str, Any]]:
    if wanted.has_answers:
        numbers = _answers(run, wanted)
        answers, usage = _picked(run, "responses", numbers), _picked(run, "usage", numbers)
        for number in numbers:
            yield _answer(answers[number], usage[number])
    if wanted.has_errors:
        numbers = _first(_matching(run, "errors", wanted, ["message", "raw"]), wanted.most)
        errors = _picked(run, "errors", numbers)
        for number in numbers:
            yield _error(errors[number])


# --- which ----------------------------------------------------------------------------------------------------------


def _answers(run: PublishedRun, wanted: Wanted) -> list[int]:
    """Numbers of rows, from 0, in the order in which they are shown."""
    matching = _matching(run, "responses", wanted, ["prompt", "request", "text"])
    if wanted.order == "input":
        return _first(matching, wanted.most)
    keys = (key for table in run.columns("usage", [_SORTED_BY[wanted.order]]) for key in table[0].to_pylist())
    ranked = ((key, -number) for number, (is_one, key) in enumerate(zip(matching, keys, strict=True)) if is_one)
    return [-number for _, number in heapq.nlargest(wanted.most, ranked)]


def _first(matching: Iterator[bool], most: int) -> list[int]:
    numbers: list[int] = []
    for number, is_one in enumerate(matching):
        if is_one:
            numbers.append(number)
            if len(numbers) == most:
                break
    return numbers


def _matching(run: PublishedRun, table: str, wanted: Wanted, texts: list[str]) -> Iterator[bool]:
    """Whether each row of a table is let through."""
    where = dict(wanted.where)
    text, reason = where.pop("contains", None), where.pop("finish_reason", None)
    columns = [_COLUMNS[name] for name in where]
    columns += texts if text is not None else []
    columns += ["finish_reason"] if reason is not None else []
    for rows in run.columns(table, columns or ["id"]):
        is_one = pa.chunked_array([pa.array([True] * rows.num_rows)])
        for name, value in where.items():
            held: Any = int(value) if name == "line" else value
            is_one = pc.and_(is_one, pc.fill_null(pc.equal(rows[_COLUMNS[name]], held), False))
        if reason is not None:
            is_one = pc.and_(is_one, _any(rows["finish_reason"], lambda values: pc.equal(values, reason)))
        if text is not None:
            is_one = pc.and_(is_one, _contains(rows, texts, text))
        yield from is_one.to_pylist()


def _contains(rows: pa.Table, columns: list[str], text: str) -> Any:
    def has(values: Any) -> Any:
        return pc.match_substring(values, text, ignore_case=True)

    found = pa.chunked_array([pa.array([False] * rows.num_rows)])
    for name in columns:
        column = rows[name]
        is_there = _any(column, has) if pa.types.is_list(column.type) else pc.fill_null(has(column), False)
        found = pc.or_(found, is_there)
    return found


def _any(lists: Any, has: Any) -> Any:
    """Whether one at least of a row's values is such."""
    parents = pc.list_parent_indices(lists.combine_chunks())
    values = lists.combine_chunks().flatten()
    found = pc.unique(parents.filter(pc.fill_null(has(values), False)))
    return pc.is_in(pa.array(range(len(lists)), parents.type), value_set=found)


def _picked(run: PublishedRun, table: str, numbers: list[int]) -> dict[int, dict[str, Any]]:
    """Whole rows by their numbers."""
    left, first = sorted(numbers), 0
    picked: dict[int, dict[str, Any]] = {}
    for group in run.row_groups(table):
        if not left:
            break
        end = first + group.parquet.metadata.row_group(group.number).num_rows
        here = [number for number in left if number < end]
        left = left[len(here) :]
        if here:
            rows = group.read(None).take([number - first for number in here])
            picked |= dict(zip(here, rows.to_pylist(), strict=True))
        first = end
    return picked


# --- how ------------------------------------------------------------------------------------------------------------


def _answer(row: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    body, request = jiter.from_json(row["response"].encode()), jiter.from_json(row["request"].encode())
    numbers = ("prompt_tokens", "completion_tokens", "cached_tokens", "search_tokens", "attempt", "replica")
    told: dict[str, Any] = {name: usage[name] for name in numbers if usage[name] is not None}
    told |= {name: round(usage[name], 1) for name in ("queue_ms", "first_token_ms", "total_ms") if usage[name]}
    told |= {name: True for name in ("is_deduplicated", "is_carried") if usage[name]}
    return {
        **_place(row),
        "kind": "answer",
        "model": row["model"],
        "endpoint": row["endpoint"],
        "created": row["created"].isoformat(timespec="seconds"),
        "prompt": _prompt(row["prompt"], request),
        "choices": [_choice(choice) for choice in choices_of(body)],
        "usage": told,
        "extra": row["extra"],
        "request": row["request"],
        "response": row["response"],
    }


def _error(row: dict[str, Any]) -> dict[str, Any]:
    told = {name: row[name] for name in ("stage", "status_code", "type", "reason", "param", "message", "attempts")}
    raw = None if row["raw"] is None else row["raw"].decode(errors="backslashreplace")
    return {**_place(row), "kind": "error", **told, "request": raw}


def _place(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "file": row["source_file"], "line": row["source_line"]}


def _prompt(text: str | None, request: dict[str, Any]) -> list[list[str]]:
    """Texts with who says each of them, where it is a chat."""
    if text is not None:
        return [["", text]]
    if isinstance(turns := request.get("context"), list):
        return [[str(one.get("type")), _as_text(one.get("text"))] for one in turns if isinstance(one, dict)]
    if not isinstance(messages := request.get("messages"), list):
        return [["", _as_text(request.get("prompt"))]]
    return [[str(one.get("role")), _as_text(one.get("content"))] for one in messages if isinstance(one, dict)]


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    told = {
        "text": choice["text"] if "text" in choice else message.get("content"),
        "finish_reason": choice.get("finish_reason"),
        "reasoning": message.get("reasoning_content"),
        "tool_calls": _as_text(message["tool_calls"]) if message.get("tool_calls") else None,
        "score": choice.get("score"),
        "tokens": _tokens(choice.get("logprobs")),
    }
    return {name: value for name, value in told.items() if value not in (None, [])}


def _tokens(logprobs: Any) -> list[list[Any]]:
    """Each token with its log-probability and those of the likeliest ones in its place, best first."""
    if not isinstance(logprobs, dict):
        return []
    if isinstance(content := logprobs.get("content"), list):
        return [
            [one["token"], one["logprob"], [[top["token"], top["logprob"]] for top in one.get("top_logprobs") or []]]
            for one in content
        ]
    tokens, own = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return [
        [token, value, sorted(([text, number] for text, number in (top or {}).items()), key=lambda pair: -pair[1])]
        for token, value, top in zip(tokens, own, tops, strict=False)
    ]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


# --- how much -------------------------------------------------------------------------------------------------------


def _cut(row: dict[str, Any], wanted: Wanted, run: PublishedRun) -> dict[str, Any]:
    """The row with what is long cut, and then the command that shows all of it."""
    cutter = _Cutter()
    shown: dict[str, Any] = cutter.cut(row)
    if cutter.has_cut:
        place = [f"file={row['file']}", *([f"line={row['line']}"] if row["line"] is not None else [])]
        where = " ".join(f"--where {shlex.quote(one)}" for one in place)
        output = run.folder.typed.removesuffix(f"/runs/{run.id}") or "/"
        shown["more"] = (
            f"overnight report --output {shlex.quote(output)} --run {run.id} --rows {wanted.most} {where} --whole"
        )
    return shown


class _Cutter:
    def __init__(self) -> None:
        self.has_cut = False

    def cut(self, value: Any, name: str = "") -> Any:
        most = {"choices": MAX_CHOICES, "tokens": MAX_TOKENS}.get(name, MAX_TOKENS)
        if isinstance(value, str) and len(value) > MAX_TEXT:
            self.has_cut = True
            return f"{value[:MAX_TEXT]}… [{len(value) - MAX_TEXT:,} more characters]"
        if isinstance(value, list):
            self.has_cut |= len(value) > most
            return [self.cut(one) for one in value[:most]]
        if isinstance(value, dict):
            return {key: self.cut(one, key) for key, one in value.items()}
        return value


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, list):
        return sum(map(_size, value)) + 2
    if isinstance(value, dict):
        return sum(_size(key) + _size(one) for key, one in value.items())
    return 8
