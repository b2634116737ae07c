"""The shapes of a line: which request it holds, under which id, with which columns of its writer's own."""

import json

import pytest

from schemas.failures import Failure
from schemas.shapes import Shaped, recognise

BODY = {"model": "m", "prompt": "hi", "max_tokens": 8}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("line", "shaped"),
    [
        (BODY, Shaped("/v1/completions", BODY)),
        (CHAT, Shaped("/v1/chat/completions", CHAT)),
        ({"context": []}, Shaped("/external/api/inference", {"context": []})),
        ({"model": "m"}, Shaped("/v1/completions", {"model": "m"})),
        ({**BODY, "request_id": "r"}, Shaped("/v1/completions", {**BODY, "request_id": "r"}, "r")),
        ({**BODY, "custom_id": "c", "request_id": "r"}, Shaped("/v1/completions", {**BODY, "request_id": "r"}, "c")),
        ({**BODY, "future_field": 1}, Shaped("/v1/completions", {**BODY, "future_field": 1})),
        (
            {"prompt": "hi", "label": "spam", "row": {"n": [1, None]}},
            Shaped("/v1/completions", {"prompt": "hi"}, None, {"label": "spam", "row": {"n": [1, None]}}),
        ),
        (
            {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": BODY},
            Shaped("/v1/completions", BODY, "c"),
        ),
        (
            {"custom_id": "c", "method": "POST", "url": "/chat/completions", "body": CHAT, "tag": 1},
            Shaped("/v1/chat/completions", CHAT, "c", {"tag": 1}),
        ),
        ({"custom_id": "", "url": "/v1/completions", "body": BODY}, Shaped("/v1/completions", BODY, None)),
        ({"recordId": "7", "modelInput": CHAT}, Shaped("/v1/chat/completions", CHAT, "7")),
    ],
)
def test_a_line_is_known_by_its_shape(line, shaped):
    before = json.dumps(line)
    assert recognise(line) == shaped
    assert json.dumps(line) == before


def test_a_body_that_is_all_of_its_line_is_that_very_object():
    assert recognise(BODY).body is BODY


@pytest.mark.parametrize(
    ("line", "reason", "param", "words"),
    [
        ([1], "not_an_object", None, "found an array, expected a JSON object"),
        ("hello", "not_an_object", None, "found a string"),
        (None, "not_an_object", None, "found null"),
        (42, "not_an_object", None, "found a number"),
        ({"custom_id": "b", "url": "/v1/completions", "body": "text"}, "malformed_envelope", "body", "found 'text'"),
        ({"custom_id": 7, "url": "/v1/completions", "body": BODY}, "malformed_envelope", "custom_id", "found 7"),
        ({"custom_id": "b", "method": "GET", "body": BODY}, "malformed_envelope", "method", 'expected "POST"'),
        (
            {"custom_id": "b", "url": "/v1/embeddings", "body": BODY},
            "malformed_envelope",
            "url",
            "/v1/chat/completions",
        ),
        ({**BODY, "custom_id": None}, "malformed_envelope", "custom_id", "found null, expected a string"),
        ({**BODY, **CHAT}, "ambiguous_shape", None, "found prompt and messages"),
        ({"custom_id": "a", "params": {"messages": []}}, "unsupported_shape", "params", "Anthropic"),
        ({"key": "a", "request": {"contents": []}}, "unsupported_shape", "request", "Gemini"),
        ({"inputs": "hi", "parameters": {}}, "unsupported_shape", "inputs", "write it as prompt"),
        ({"recordId": "1", "modelInput": {"inputText": "hi"}}, "unsupported_shape", "modelInput", "inputText"),
        ({"recordId": "1"}, "malformed_envelope", "modelInput", "found null, expected an object"),
    ],
)
def test_a_shape_that_is_not_taken_is_named_with_what_to_change(line, reason, param, words):
    failure = recognise(line)
    assert isinstance(failure, Failure), failure
    assert (failure.status_code, failure.reason, failure.param) == (400, reason, param)
    assert words in failure.message


def test_an_endpoint_that_was_said_decides_over_looks():
    assert recognise({**BODY, **CHAT}, "/v1/chat/completions").endpoint == "/v1/chat/completions"
    failure = recognise({"custom_id": "b", "url": "/v1/completions", "body": BODY}, "/v1/chat/completions")
    assert isinstance(failure, Failure) and failure.param == "url"
