"""The contract of both doors: strict JSON, then the JSON Schema, then the rules that a schema can't say."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice
from typing import Any, Literal

import jiter
import jsonschema_rs

from schemas.chat_rules import CHAT
from schemas.completion_rules import COMPLETION
from schemas.dialects import EXTERNAL_CHAT, EXTERNAL_DEFAULTS, LEGACY, LEGACY_STREAM
from schemas.failures import Failure
from schemas.legacy_rules import LEGACY_CHAT
from schemas.requests import Endpoint
from schemas.rules import MAX_PATH, Judge, Rule, plain, refuse

SCHEMA_FILES: dict[Endpoint, str] = {
    "/v1/completions": "completion_request.schema.json",
    "/v1/chat/completions": "chat_completion_request.schema.json",
    EXTERNAL_CHAT: "chat_completion_request.schema.json",
    LEGACY: "legacy_chat_request.schema.json",
    LEGACY_STREAM: "legacy_chat_request.schema.json",
}

RULES: Mapping[Endpoint, Mapping[str, Rule]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    EXTERNAL_CHAT: CHAT,
    LEGACY: LEGACY_CHAT,
    LEGACY_STREAM: LEGACY_CHAT,
}

_FOUND_LENGTH = 60
# Of each alternative of a schema, so many faults are looked for, to see which came furthest.
_COMPARED_FAULTS = 8
# Of JSON's types; numbers have more to them.
_PYTHON_TYPES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
_LENIENT = Judge()
# To whoever wrote a line of a file or a body: when it breaks off, and when it isn't UTF-8.
_ADVICE = {
    "line": ("; an object must stand on one line, whole", "; save the file as UTF-8"),
    "body": ("", "; send UTF-8"),
}


def parse_strict(text: bytes, noun: Literal["line", "body"] = "line") -> Any | Failure:
    """The value that one JSON text holds, or a Failure (400, `invalid_json`) that gives the column. `noun`: what the
    text is, to whoever wrote it.

    Stricter than Python's json: no duplicate key, no NaN or infinity (nor a number that overflows to one), no invalid
    UTF-8, no lone surrogate, no nesting that exhausts the stack. Integers of any size stay exact.
    """
    try:
        value = jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        return Failure(400, "invalid_json", _explain_parse_error(text, str(error), noun))
    if (steps := _overflowed([value])) is not None:
        path = _show_path(reversed(steps[:-1]))
        message = f"{path or f'the {noun}'}: found a number beyond the range of a 64-bit float (about 1.8e308)"
        return Failure(400, "invalid_json", message, path or None)
    return value


def check_body(body: Any, endpoint: Endpoint, judge: Judge = _LENIENT) -> Failure | None:
    """The first fault of a request body that was parsed strictly, or None when it may go on to the engine.

    A breach of the JSON Schema is a 422 with reason `schema`; a broken rule has its own status and reason. Rules that
    need the model's limits are asked where the judge has them.
    """
    return check_schema(body, endpoint) or _broken_rule(body, endpoint, judge)


def check_schema(body: Any, endpoint: Endpoint) -> Failure | None:
    """The first breach of the endpoint's JSON Schema (422, `schema`), if any."""
    if _validator(endpoint).is_valid(body):
        return None
    unnamed = _Breach((), body, words="which breaks the schema")
    return next(_breaches(_schema(endpoint), body, (), endpoint), unnamed).explain()


def _broken_rule(body: dict[str, Any], endpoint: Endpoint, judge: Judge) -> Failure | None:
    rules = RULES[endpoint]
    if endpoint == EXTERNAL_CHAT:
        body = {**body, **{name: value for name, value in EXTERNAL_DEFAULTS.items() if body.get(name) is None}}
    for field, value in body.items():
        rule = rules.get(field)
        if rule is not None and value is not None and (failure := rule(field, value, body, judge)) is not None:
            return failure
    if endpoint == "/v1/completions" and body.get("prompt") is None and not body.get("prompt_embeds"):
        return refuse("empty_prompt", "prompt", "found none. Give a text, or token ids")
    return None


@cache
def known_fields(endpoint: Endpoint) -> frozenset[str]:
    """The fields of which an endpoint's schema speaks."""
    return frozenset(_schema(endpoint)["properties"])


@cache
def _schema(endpoint: Endpoint) -> dict[str, Any]:
    text = resources.files(__package__).joinpath(SCHEMA_FILES[endpoint]).read_text()
    schema: dict[str, Any] = json.loads(text)
    return schema


@cache
def _validator(endpoint: Endpoint) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(_schema(endpoint))


# --- explanations ---------------------------------------------------------------------------------------------------


def _explain_parse_error(text: bytes, error: str, noun: str) -> str:
    what, is_placed, place = error.rpartition(" at line ")
    what = what if is_placed else error
    line, _, column = place.partition(" column ")
    if what == "trailing characters":
        what = f"found more after the end of the JSON value; a {noun} holds one object alone"
    elif what.startswith("EOF"):
        what = f"the {noun} ends inside the JSON value" + _ADVICE[noun][0]
    elif what.startswith("Detected duplicate key"):
        what = f"found the key {plain(what.removeprefix('Detected duplicate key '))} twice; keep one"
    elif what == "invalid unicode code point":
        what = "found bytes that are no UTF-8" + _ADVICE[noun][1]
    elif what == "recursion limit exceeded":
        what = "found values nested too deep"
    elif text.lstrip()[:1] not in b"{[":
        what = f"found {_shorten(text.decode(errors='replace'))}, expected a JSON object"
    where = f"column {column}" if line in ("", "1") else f"line {line}, column {column}"
    return f"not valid JSON: {what}" + (f" ({where})" if column else "")


def _overflowed(value: Any) -> list[str | int] | None:
    """The path of the first infinite number inside a value, if any; from its end to its beginning."""
    children: Iterable[tuple[str | int, Any]] = value.items() if type(value) is dict else enumerate(value)
    for step, child in children:
        kind = type(child)
        if kind is float:
            if child in (math.inf, -math.inf):
                return [step]
        elif (kind is dict or kind is list) and (path := _overflowed(child)) is not None:
            return [*path, step]
    return None


@dataclass(frozen=True, slots=True)
class _Breach:
    """Where a value breaks a schema, and what was expected there: one of some types, or what the words say."""

    path: tuple[str | int, ...]
    found: Any
    types: tuple[str, ...] = ()
    words: str = ""

    def explain(self) -> Failure:
        path = _show_path(self.path)
        expected = f"expected {' or '.join(self.types)}" if self.types else self.words
        message = f"{path or 'the request'}: found {_shorten(_to_json(self.found))}, {expected}"
        return Failure(422, "schema", message, path or None)


def _breaches(schema: dict[str, Any], value: Any, path: tuple[str | int, ...], endpoint: Endpoint) -> Iterator[_Breach]:
    """What of a value breaks a schema, as far as it is asked for: a line may have millions of faults.

    Speaks the words of JSON Schema that our files use, and decides nothing: `_validator` has by then.
    """
    if (reference := schema.get("$ref")) is not None:
        schema = _schema(endpoint)["$defs"][reference.removeprefix("#/$defs/")]
    if (branches := schema.get("anyOf")) is not None:
        yield from _most_telling(branches, value, path, endpoint)
        return
    kind = schema.get("type")
    if kind is not None and not _is_of_type(value, kind):
        yield _Breach(path, value, (kind,))
        return
    yield from (_Breach(path, value, words=words) for words in _broken_bounds(schema, value))
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, child in value.items():
            if name in known or isinstance(others, dict):
                yield from _breaches(known.get(name, others), child, (*path, name), endpoint)
            elif not others:
                yield _Breach((*path, name), child, words="a field that isn't known here")
    elif isinstance(value, list) and "items" in schema:
        for index, child in enumerate(value):
            yield from _breaches(schema["items"], child, (*path, index), endpoint)


def _most_telling(
    branches: list[dict[str, Any]], value: Any, path: tuple[str | int, ...], endpoint: Endpoint
) -> Iterator[_Breach]:
    """The breach of alternatives to report, if none of them fits.

    The one that came furthest is what its writer meant: one that already fails by the value's own type tells least; of
    the others, the one with the fewest faults.
    """
    tried = []
    for branch in branches:
        found = list(islice(_breaches(branch, value, path, endpoint), _COMPARED_FAULTS))
        if not found:
            return
        tried.append(found)
    close = [found for found in tried if not (found[0].types and found[0].path == path)]
    types = dict.fromkeys(name for found in tried for name in found[0].types)
    yield min(close, key=len)[0] if close else _Breach(path, value, tuple(types))


def _is_of_type(value: Any, kind: str) -> bool:
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer":
        return value.is_integer() if isinstance(value, float) else type(value) is int
    return isinstance(value, _PYTHON_TYPES[kind])


def _broken_bounds(schema: dict[str, Any], value: Any) -> Iterator[str]:
    """What a value of the right type should have been, in words that go on from `found 5, `."""
    if "const" in schema and value != schema["const"]:
        yield f"which is not {_to_json(schema['const'])}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"which is not one of {' or '.join(map(_to_json, schema['enum']))}"
    if isinstance(value, int | float):
        if value < schema.get("minimum", value):
            yield f"which is less than the minimum of {schema['minimum']}"
        if value > schema.get("maximum", value):
            yield f"which is greater than the maximum of {schema['maximum']}"
    elif isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"which is shorter than {_count(schema['minLength'], 'character')}"
        if len(value) > schema.get("maxLength", len(value)):
            yield f"which is longer than {_count(schema['maxLength'], 'character')}"
    elif isinstance(value, list) and len(value) > schema.get("maxItems", len(value)):
        yield f"which has more than {_count(schema['maxItems'], 'item')}"
    elif isinstance(value, dict):
        yield from (f"expected {name} in it" for name in schema.get("required", ()) if name not in value)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _show_path(steps: Iterable[str | int]) -> str:
    """`["prompt", 3]` as `prompt[3]`."""
    words = "".join(f"[{step}]" if isinstance(step, int) else f".{plain(step)}" for step in steps)
    return plain(words.removeprefix("."), MAX_PATH)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _shorten(text: str) -> str:
    shown = plain(text, _FOUND_LENGTH)
    return shown if len(text) <= _FOUND_LENGTH else f"{shown} ({len(text):,} characters)"
