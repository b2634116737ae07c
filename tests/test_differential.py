"""The schema's verdict against an independent validator's, over drawn bodies: the same for each."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest

from schemas import generate
from schemas.contract import SCHEMA_FILES, check_schema, parse_strict
from schemas.failures import Failure
from tests.mutations import SEEDS, VALUES, places, spoil, to_text

NUM_DRAWN = 2_200
# One endpoint for each schema: the others are judged by the same file.
ENDPOINTS = pytest.mark.parametrize("endpoint", SEEDS)


@cache
def schema_of(endpoint):
    return json.loads((generate.HERE / SCHEMA_FILES[endpoint]).read_text())


@cache
def peer(endpoint):
    return jsonschema.Draft202012Validator(schema_of(endpoint))


def properties_of(schema):
    """The names of all fields of which a schema speaks, at any depth."""
    return {name for part in (schema, *schema.get("$defs", {}).values()) for name in part.get("properties", ())}


def faults(errors, path=()):
    """Where the independent validator sees a fault, in any alternative."""
    for error in errors:
        here = (*path, *error.relative_path)
        yield here
        if error.validator == "additionalProperties":
            # It speaks of the object; we, of the field that shouldn't be there.
            yield from ((*here, name) for name in error.instance)
        yield from faults(error.context or (), here)


def show(path):
    """`("prompt", 3)` as `prompt[3]`."""
    words = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return words.removeprefix(".")


def is_whole(path):
    """Whether a path stands in a message as it is: no name in it was cut, and none held what can't be printed."""
    return "…" not in path and "\\" not in path


def verdict(body: Any, endpoint, with_place: bool = False) -> bool:
    """Whether both take a body. Fails where they differ, or where a rejection doesn't say what and where.

    `with_place`: the other validator is asked for the place of the fault, too, which takes it long.
    """
    text = to_text(body)
    value = parse_strict(text.encode())
    assert not isinstance(value, Failure), f"{value.message}: {text[:300]}"
    assert repr(value) == repr(json.loads(text)), text[:300]
    failure = check_schema(value, endpoint)
    is_taken = peer(endpoint).is_valid(value)
    assert (failure is None) == is_taken, f"{'taken' if failure is None else failure.message} by us alone: {text[:300]}"
    if failure is not None:
        assert (failure.status_code, failure.reason) == (422, "schema")
        assert failure.message and failure.message.isprintable() and len(failure.message) < 600, failure.message[:900]
        assert "which breaks the schema" not in failure.message, "a fault that we can't name"
        if failure.param is not None:
            assert failure.message.startswith(f"{failure.param}: ")
        if failure.param is not None and with_place and is_whole(failure.param):
            assert failure.param in {show(path) for path in faults(peer(endpoint).iter_errors(value))}, failure
    return is_taken


def test_every_schema_is_drawn_from():
    assert {SCHEMA_FILES[endpoint] for endpoint in SEEDS} == set(SCHEMA_FILES.values())


@ENDPOINTS
def test_the_seeds_are_valid_and_use_every_field(endpoint):
    for body in SEEDS[endpoint]:
        assert verdict(body, endpoint), body
    assert {name for body in SEEDS[endpoint] for name in body} >= schema_of(endpoint)["properties"].keys()


@ENDPOINTS
def test_drawn_bodies_get_the_same_verdict_from_an_independent_validator(endpoint):
    draw = random.Random(endpoint)  # noqa: S311 - the same bodies each time
    verdicts = []
    touched = set()
    for body in SEEDS[endpoint]:
        for path in places(body):
            touched |= {*path}
            verdicts.append(verdict(spoil(draw, body, path), endpoint, with_place=True))
    assert touched >= properties_of(schema_of(endpoint)), "a field was never spoiled"
    while len(verdicts) < NUM_DRAWN:
        body = draw.choice(SEEDS[endpoint])
        for _ in range(draw.choice((1, 2, 4))):
            body = spoil(draw, body)
        verdicts.append(verdict(body, endpoint))
    assert 0.2 < sum(verdicts) / NUM_DRAWN < 0.8


@ENDPOINTS
def test_every_field_with_every_value_gets_the_same_verdict(endpoint):
    least: dict[str, Any] = {name: [] for name in schema_of(endpoint).get("required", ())}
    for field in schema_of(endpoint)["properties"]:
        for value in VALUES:
            verdict({**least, field: value}, endpoint)


@ENDPOINTS
@pytest.mark.parametrize("value", [None, True, 1, "a", [], [{}], {}])
def test_what_is_no_object_gets_the_same_verdict(endpoint, value):
    verdict(value, endpoint)
