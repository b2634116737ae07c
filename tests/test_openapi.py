"""The description that the endpoint serves: what the published one says of the operation, and ours beside it."""

import jsonschema_rs
import pytest

from schemas import openapi
from schemas.contract import SCHEMA_FILES, check_schema

DOCUMENT = openapi.document("/", "X-Request-Timeout", needs_key=True)
OPERATION = DOCUMENT["paths"]["/v1/completions"]["post"]


def resolved(schema, seen=()):
    """A schema with its references replaced by what they refer to."""
    if isinstance(schema, dict):
        if isinstance(name := schema.get("$ref"), str):
            assert name not in seen
            return resolved(DOCUMENT["components"]["schemas"][name.rpartition("/")[2]], (*seen, name))
        return {key: resolved(value, seen) for key, value in schema.items()}
    return [resolved(one, seen) for one in schema] if isinstance(schema, list) else schema


def test_the_operation_is_the_published_one():
    assert OPERATION["operationId"] == "create_completion_v1_completions_post"
    assert OPERATION["summary"] == "Create Completion" and OPERATION["tags"] == ["Completions"]
    assert OPERATION["requestBody"]["required"] and list(OPERATION["requestBody"]["content"]) == ["application/json"]
    assert {"200", "400", "404", "422", "500"} <= OPERATION["responses"].keys()
    assert OPERATION["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    for status, name in {"400": "ErrorResponse", "404": "ErrorResponse", "500": "ErrorResponse"}.items():
        schema = OPERATION["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
    breach = OPERATION["responses"]["422"]["content"]["application/json"]["schema"]
    assert breach == {"$ref": "#/components/schemas/HTTPValidationError"}


def test_every_reference_leads_somewhere():
    resolved(DOCUMENT["paths"])
    resolved(DOCUMENT["components"])


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a"},
        {"prompt": [1, 2], "n": "2"},
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"prompt": "a", "response_format": {"type": "xml"}},
        {"prompt": "a", "structured_outputs": {"choice": [1]}},
        {"prompt": "a", "stream_options": {"include_usage": True}},
    ],
)
def test_it_describes_what_the_checks_take(body):
    schema = resolved(OPERATION["requestBody"]["content"]["application/json"]["schema"])
    is_valid = jsonschema_rs.validator_for(schema).is_valid(body)
    assert is_valid == (check_schema(body, "/v1/completions") is None)
    assert "/v1/completions" in SCHEMA_FILES


@pytest.mark.parametrize(
    ("path", "summary", "identifier", "kinds"),
    [
        (
            "/external/api/inference/openai/v1/chat/completions",
            "Legacy Chat Completions",
            "external_openai_chat_endpoint_external_api_inference_openai_v1_chat_completions_post",
            {"application/json", "text/event-stream"},
        ),
        (
            "/external/api/inference",
            "Legacy API Inference Chat",
            "external_chat_external_api_inference_post",
            {"application/json"},
        ),
        (
            "/external/api/inference/streaming",
            "Legacy API Streaming",
            "external_streaming_external_api_inference_streaming_post",
            {"text/event-stream"},
        ),
    ],
)
def test_the_operations_of_chats_are_the_published_ones(path, summary, identifier, kinds):
    operation = DOCUMENT["paths"][path]["post"]
    assert (operation["summary"], operation["operationId"]) == (summary, identifier)
    assert operation["tags"] == ["External"] and operation["requestBody"]["required"]
    assert operation["responses"]["200"]["content"].keys() == kinds
    breach = resolved(operation["responses"]["422"]["content"]["application/json"]["schema"])
    assert breach["properties"]["detail"]["items"]["required"] == ["loc", "msg", "type"]
    names = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "query"]
    assert names == ([] if "openai" in path else ["origin_endpoint"])
    body = resolved(operation["requestBody"]["content"]["application/json"]["schema"])
    assert body["required"] == (["messages"] if "openai" in path else ["context"])


def test_every_operation_has_a_name_of_its_own():
    names = [one["operationId"] for item in DOCUMENT["paths"].values() for one in item.values()]
    assert len(set(names)) == len(names)
