"""The operations of the endpoint's own description. The names, tags and summaries of published ones are theirs."""

from collections.abc import Mapping
from typing import Any

from schemas.failures import ERROR_TYPES

Operation = dict[str, Any]

# The statuses that the published description has, and the form that it gives their bodies.
_PUBLISHED: Mapping[int, tuple[str, str]] = {
    400: ("Bad Request", "ErrorResponse"),
    404: ("Not Found", "ErrorResponse"),
    422: ("Validation Error", "HTTPValidationError"),
    500: ("Internal Server Error", "ErrorResponse"),
}
_OWN = (401, 408, 413, 415, 429, 501, 503, 504)
_OF_MODELS = (401, 429, 503)

# What the three operations of the chat's description say alike.
_EXTERNAL_STATUSES = (400, 401, 404, 408, 413, 415, 429, 500, 501, 503, 504)


def completions(timeout_header: str) -> Operation:
    return {
        "summary": "Create Completion",
        "operationId": "create_completion_v1_completions_post",
        "tags": ["Completions"],
        "parameters": [_timeout(timeout_header)],
        "requestBody": _body("CompletionRequest"),
        "responses": {
            "200": {
                "description": "Successful Response",
                "content": {
                    "application/json": {"schema": _ref("CompletionResponse")},
                    # Each event holds a CompletionChunk, or an error; the last one is [DONE].
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **{
                str(status): json_response(description, _ref(name))
                for status, (description, name) in _PUBLISHED.items()
            },
            **{str(status): json_response(ERROR_TYPES[status], _ref("FailureResponse")) for status in _OWN},
        },
    }


def chat_completions(timeout_header: str) -> Operation:
    return {
        "summary": "Create Chat Completion",
        "operationId": "create_chat_completion_v1_chat_completions_post",
        "tags": ["Chat"],
        "parameters": [_timeout(timeout_header)],
        "requestBody": _body("ChatCompletionRequest"),
        "responses": _chat_responses(),
    }


def external_chat_completions(timeout_header: str) -> Operation:
    return {
        "summary": "Legacy Chat Completions",
        "operationId": "external_openai_chat_endpoint_external_api_inference_openai_v1_chat_completions_post",
        "tags": ["External"],
        "parameters": [_timeout(timeout_header)],
        "requestBody": _body("ChatCompletionRequest"),
        "responses": _chat_responses(),
    }


def external_chat(timeout_header: str) -> Operation:
    return {
        "summary": "Legacy API Inference Chat",
        "operationId": "external_chat_external_api_inference_post",
        "tags": ["External"],
        "parameters": [_ORIGIN, _timeout(timeout_header)],
        "requestBody": _body("ExternalChatBody"),
        "responses": {
            "200": _searched(json_response("The answer's text, and calls of tools", _ref("ExternalChatResponse"))),
            **_external_failures(),
        },
    }


def external_streaming(timeout_header: str) -> Operation:
    return {
        "summary": "Legacy API Streaming",
        "operationId": "external_streaming_external_api_inference_streaming_post",
        "tags": ["External"],
        "parameters": [_ORIGIN, _timeout(timeout_header)],
        "requestBody": _body("ExternalChatBody"),
        "responses": {
            # Each event holds a piece of the text, or an error.
            "200": _searched(
                {
                    "description": "The answer's text in pieces, and calls of tools",
                    "content": {"text/event-stream": {"schema": {"type": "string"}}},
                }
            ),
            **_external_failures(),
        },
    }


def _chat_responses() -> dict[str, Any]:
    return {
        "200": {
            "description": "The whole answer, or its chunks as events",
            "content": {
                "application/json": {"schema": _ref("ChatCompletionResponse")},
                # The last event is [DONE].
                "text/event-stream": {"schema": _ref("ChatCompletionStreamResponse")},
            },
        },
        **_external_failures(),
    }


def _external_failures() -> dict[str, Any]:
    return {"422": json_response("Validation Error", _ref("ChatHTTPValidationError")), **_failures(_EXTERNAL_STATUSES)}


def _searched(response: dict[str, Any]) -> dict[str, Any]:
    words = "Whether the web was searched: off, unavailable, done, failed or too-long."
    return response | {"headers": {"X-Web-Search": {"description": words, "schema": {"type": "string"}}}}


def _body(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": _ref(name)}}, "required": True}


def _timeout(header: str) -> dict[str, Any]:
    return {
        "name": header,
        "in": "header",
        "required": False,
        "description": "Seconds after which the request is given up (504).",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }


_ORIGIN: dict[str, Any] = {
    "name": "origin_endpoint",
    "in": "query",
    "required": False,
    "schema": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Origin Endpoint"},
}


def models() -> dict[str, Any]:
    return {
        "summary": "List Models",
        "operationId": "list_models_v1_models_get",
        "tags": ["Models"],
        "responses": {
            "200": json_response(
                "Successful Response",
                {
                    "type": "object",
                    "required": ["object", "data"],
                    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}},
                },
            ),
            **_failures(_OF_MODELS),
        },
    }


def model() -> dict[str, Any]:
    return {
        "summary": "Retrieve Model",
        "operationId": "retrieve_model_v1_models_get",
        "tags": ["Models"],
        "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}],
        "responses": {"200": json_response("Successful Response", _ref("Model")), **_failures((*_OF_MODELS, 404))},
    }


def health() -> dict[str, Any]:
    return {
        "summary": "Whether an engine answers",
        "operationId": "health_health_get",
        "tags": ["Health"],
        "responses": {
            "200": json_response(
                "Successful Response",
                {"type": "object", "required": ["status"], "properties": {"status": {"const": "ok"}}},
            ),
            **_failures((503,)),
        },
    }


def _failures(statuses: tuple[int, ...]) -> dict[str, Any]:
    return {str(status): json_response(ERROR_TYPES[status], _ref("FailureResponse")) for status in statuses}


def json_response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
