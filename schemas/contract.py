"""The contract of both doors: strict JSON, then the JSON Schema, then the rules that a schema can't say."""

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import jiter
import jsonschema_rs

from schemas.chat_rules import CHAT
from schemas.completion_rules import COMPLETION
from schemas.failures import Failure
from schemas.requests import Endpoint
from schemas.rules import Judge, Rule, refuse

SCHEMA_FILES: dict[Endpoint, str] = {
    "/v1/completions": "completion_request.schema.json",
    "/v1/chat/completions": "chat_completion_request.schema.json",
    "/external/api/inference": "legacy_chat_request.schema.json",
}

RULES: Mapping[Endpoint, Mapping[str, Rule]] = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}

# Only a number with an exponent that isn't negative, or with hundreds of digits, can overflow to infinity. Every digit
# as 0 and E as e, so that a search for fixed bytes finds one: a regular expression takes longer than all the parsing.
_SHAPE_OF_NUMBERS = bytes.maketrans(b"123456789E", b"000000000e")
_MANY_DIGITS = b"0" * 200
_FOUND_LENGTH = 60
_LENIENT = Judge()


def parse_strict(text: bytes) -> Any | Failure:
    """The value that one JSON text holds, or a Failure (400, `invalid_json`) that gives the column.

    Stricter than Python's json: no duplicate key, no NaN or infinity (nor a number that overflows to one), no invalid
    UTF-8, no lone surrogate, no nesting that exhausts the stack. Integers of any size stay exact.
    """
    try:
        value = jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        return Failure(400, "invalid_json", _explain_parse_error(text, str(error)))
    shape = text.translate(_SHAPE_OF_NUMBERS)
    may_overflow = b"0e0" in shape or b"0e+0" in shape or _MANY_DIGITS in shape
    if may_overflow and (path := _overflowed(value, "")) is not None:
        message = f"{path or 'the line'}: found a number beyond the range of a 64-bit float (about 1.8e308)"
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
    validator = _validator(endpoint)
    return None if validator.is_valid(body) else _explain_schema_error(next(validator.iter_errors(body)), body)


def _broken_rule(body: dict[str, Any], endpoint: Endpoint, judge: Judge) -> Failure | None:
    rules = RULES.get(endpoint)
    if rules is None:
        message = "found a legacy chat body; write its turns as the messages of a chat body"
        return refuse("unsupported_endpoint", "context", message)
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


def _explain_parse_error(text: bytes, error: str) -> str:
    what, _, column = error.partition(" at line 1 column ")
    if what == "trailing characters":
        what = "found more after the end of the JSON value; a line holds one object alone"
    elif what.startswith("EOF"):
        what = "the line ends inside the JSON value; an object must stand on one line, whole"
    elif what.startswith("Detected duplicate key"):
        what = f"found the key {what.removeprefix('Detected duplicate key ')} twice; keep one"
    elif what == "invalid unicode code point":
        what = "found bytes that are no UTF-8; save the file as UTF-8"
    elif what == "recursion limit exceeded":
        what = "found values nested too deep"
    elif text.lstrip()[:1] not in b"{[":
        what = f"found {_shorten(text.decode(errors='replace'))}, expected a JSON object"
    return f"not valid JSON: {what}" + (f" (column {column})" if column else "")


def _overflowed(value: Any, path: str) -> str | None:
    """The path of the first infinite number in a value, if any."""
    if isinstance(value, float):
        return path if math.isinf(value) else None
    if isinstance(value, dict):
        children = ((f"{path}.{key}" if path else key, child) for key, child in value.items())
    elif isinstance(value, list):
        children = ((f"{path}[{index}]", child) for index, child in enumerate(value))
    else:
        return None
    return next((found for name, child in children if (found := _overflowed(child, name)) is not None), None)


def _explain_schema_error(error: jsonschema_rs.ValidationError, body: Any) -> Failure:
    error, types = _most_telling(error)
    path = _path(error.instance_path, body)
    expected = f"expected {' or '.join(types)}" if types else _bound(error)
    message = f"{path or 'the request'}: found {_shorten(_to_json(error.instance))}, {expected}"
    return Failure(422, "schema", message, path or None)


def _most_telling(error: jsonschema_rs.ValidationError) -> tuple[jsonschema_rs.ValidationError, list[str]]:
    """The error to report, and the types that would do where the type is the fault.

    Of alternatives, the one that came furthest is what its writer meant: one that already fails by the value's own
    type tells least; of the others, the one with the fewest faults.
    """
    kind = error.kind
    if isinstance(kind, jsonschema_rs.ValidationErrorKind.Type):
        return error, _types(kind)
    if not isinstance(kind, jsonschema_rs.ValidationErrorKind.AnyOf):
        return error, []
    own_path = error.instance_path
    close = [
        branch for branch in kind.context if not (_is_type_error(branch[0]) and branch[0].instance_path == own_path)
    ]
    if close:
        best = min(close, key=len)
        return _most_telling(best[0])
    return error, list(dict.fromkeys(name for branch in kind.context for name in _types(branch[0].kind)))


def _is_type_error(error: jsonschema_rs.ValidationError) -> bool:
    return isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Type)


def _types(kind: Any) -> list[str]:
    types = kind.types
    return [types] if isinstance(types, str) else [str(name) for name in types]


def _bound(error: jsonschema_rs.ValidationError) -> str:
    """What was expected, from the library's sentence `<value> is less than the minimum of 0`."""
    message: str = error.message
    value = _to_json(error.instance)
    return "which " + message.removeprefix(value).strip() if message.startswith(value) else message


def _path(steps: list[str | int], body: Any) -> str:
    """`["prompt", 3]` as `prompt[3]`; a step into an object is a name even when it looks like a number."""
    path = ""
    here = body
    for step in steps:
        if isinstance(here, dict):
            path += f".{step}" if path else str(step)
            here = here[str(step)]
        else:
            path += f"[{step}]"
            here = here[int(step)]
    return path


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _shorten(text: str) -> str:
    return text if len(text) <= _FOUND_LENGTH else f"{text[:_FOUND_LENGTH]}… ({len(text):,} characters)"
