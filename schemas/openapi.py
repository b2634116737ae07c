"""The description of the endpoint that it serves itself, of the same schemas that judge its requests."""

import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from schemas import operations
from schemas.dialects import EXTERNAL_CHAT, LEGACY, LEGACY_STREAM
from schemas.openapi_access import SECURITY, SECURITY_SCHEMES, token_operation

_VERSION = "3.1.0"
# The names of the published description, where it has one.
_SCHEMAS: Mapping[str, str] = {
    "CompletionRequest": "completion_request.schema.json",
    "CompletionResponse": "completion_response.schema.json",
    "CompletionChunk": "completion_chunk.schema.json",
    "ErrorResponse": "error_response.schema.json",
    "HTTPValidationError": "completion_http_validation_error.schema.json",
    "ChatCompletionRequest": "chat_completion_request.schema.json",
    "ChatCompletionResponse": "chat_completion_response.schema.json",
    "ChatCompletionStreamResponse": "chat_completion_chunk.schema.json",
    "ExternalChatBody": "legacy_chat_request.schema.json",
    "ExternalChatResponse": "legacy_chat_response.schema.json",
    # The published descriptions of completions and of chats have one name for two.
    "ChatHTTPValidationError": "http_validation_error.schema.json",
    "FailureResponse": "failure_response.schema.json",
}
_ASKED: Mapping[str, Callable[[str], operations.Operation]] = {
    "/v1/completions": operations.completions,
    "/v1/chat/completions": operations.chat_completions,
    EXTERNAL_CHAT: operations.external_chat_completions,
    LEGACY: operations.external_chat,
    LEGACY_STREAM: operations.external_streaming,
}


def document(root: str, timeout_header: str, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document of the routes below `root`."""
    security = SECURITY if needs_key else []
    described: dict[str, Any] = {
        "openapi": _VERSION,
        "info": {"title": "Overnight", "version": "1", "description": "LLM completions, by vLLM on Ray Serve."},
        "servers": [{"url": root}],
        "tags": [
            {"name": "Completions"},
            {"name": "Chat"},
            {"name": "External"},
            {"name": "Models"},
            {"name": "Health"},
            {"name": "Access"},
        ],
        "paths": {
            **{path: {"post": made(timeout_header) | {"security": security}} for path, made in _ASKED.items()},
            "/v1/models": {"get": operations.models() | {"security": security}},
            "/v1/models/{model}": {"get": operations.model() | {"security": security}},
            "/health": {"get": operations.health()},
            "/token": {"post": token_operation()},
        },
        "components": {"schemas": _components()},
    }
    if needs_key:
        described["components"]["securitySchemes"] = SECURITY_SCHEMES
    return described


def _components() -> dict[str, Any]:
    """All schemas, and those inside of them; where two of one name differ, their owner's stands before it."""
    found: dict[str, Any] = {
        "Model": {
            "type": "object",
            "required": ["id", "object", "created", "owned_by"],
            "properties": {
                "id": {"type": "string"},
                "object": {"const": "model"},
                "created": {"type": "integer"},
                "owned_by": {"type": "string"},
                "root": {"type": "string"},
                "parent": {"type": ["string", "null"]},
                "max_model_len": {"type": "integer"},
            },
        }
    }
    for name, file in _SCHEMAS.items():
        schema = json.loads(resources.files(__package__).joinpath(file).read_text())
        inner = schema.pop("$defs", {})
        schema.pop("$schema")
        names = {
            one: one if found.get(one, definition) == _moved(definition, {}) else f"{name}{one}"
            for one, definition in inner.items()
        }
        for one, definition in inner.items():
            found[names[one]] = _moved(definition, names)
        found[name] = _moved(schema, names)
    return found


def _moved(schema: Any, names: Mapping[str, str]) -> Any:
    """A schema with its references into `$defs` turned to the document's components."""
    if isinstance(schema, dict):
        return {
            key: f"#/components/schemas/{names.get(inner := value.rpartition('/')[2], inner)}"
            if key == "$ref" and isinstance(value, str)
            else _moved(value, names)
            for key, value in schema.items()
        }
    return [_moved(one, names) for one in schema] if isinstance(schema, list) else schema
