"""Constraints of an answer's form: compiled where they can be stopped, once each."""

import time

import pytest

from pipelines.grammars import GrammarCompiler
from pipelines.limits import read_limits
from pipelines.model import resolve
from schemas.settings import EngineSettings

# Some seconds of work for any machine: 400 patterns of 200 places each.
SLOW = {
    "json": {
        "type": "object",
        "properties": {f"p{n}": {"pattern": "^(a|b|c){1,300}$", "type": "string"} for n in range(900)},
    }
}


@pytest.fixture(scope="module")
def compiler():
    model = resolve(None)
    made = GrammarCompiler(model.path, read_limits(model, (), EngineSettings()), time_limit_s=2)
    yield made
    made.close()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"structured_outputs": None, "response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
        {"structured_outputs": {"json": '{"type": "integer"}'}},
        {"structured_outputs": {"regex": "[ab]+"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
    ],
)
def test_what_compiles_passes(compiler, body):
    assert compiler.check(body, "/v1/completions") is None


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(a"},
        {"regex": "a\x00"},
        {"json": "no json"},
        {"json": {"type": "nonsense"}},
        {"json": {"type": " \u202e"}},
        {"json": {"type": "number", "multipleOf": 3}},
        {"grammar": "root ::= "},
        {"structural_tag": "{}"},
    ],
)
def test_what_does_not_compile_is_refused_on_one_line(compiler, constraint):
    failure = compiler.check({"structured_outputs": constraint}, "/v1/completions")
    assert (failure.reason, failure.param) == ("bad_constraint", "structured_outputs")
    assert "it doesn't compile (" in failure.message and failure.message.isprintable()
    assert "/project/" not in failure.message


def test_a_constraint_that_takes_too_long_is_stopped_and_the_next_one_compiles(compiler):
    compiler.check({"structured_outputs": {"choice": ["warm"]}}, "/v1/completions")
    began = time.monotonic()
    assert compiler.check({"structured_outputs": SLOW}, "/v1/completions").reason == "constraint_too_slow"
    assert time.monotonic() - began < 10
    assert compiler.check({"structured_outputs": {"choice": ["after"]}}, "/v1/completions") is None
    again = time.monotonic()
    assert compiler.check({"structured_outputs": SLOW}, "/v1/completions").reason == "constraint_too_slow"
    assert time.monotonic() - again < 0.1, "an equal constraint is judged once"


def weather(**parameters):
    return {"type": "function", "function": {"name": "weather", "parameters": parameters}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [weather(type="object", properties={"city": {"type": "string"}})], "tool_choice": "required"}, None),
        ({"tools": [weather(type="nothing")], "tool_choice": "required"}, "tools"),
        (
            {
                "tools": [weather(type="object", properties={"a": {"type": "string", "pattern": "("}})],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
            },
            "tools",
        ),
        ({"tools": [weather(type="nothing")], "tool_choice": "none"}, None),
    ],
)
def test_calls_of_tools_are_compiled_where_a_grammar_gives_their_form(compiler, body, field):
    failure = compiler.check(body, "/v1/chat/completions")
    assert (failure and failure.param) == field
    # A completion may hold anything under a name that it doesn't know.
    assert compiler.check(body, "/v1/completions") is None
