"""Write the JSON Schema files beside this module anew: `python -m schemas.generate`."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from schemas.chat import ChatCompletionRequest
from schemas.completion import CompletionRequest
from schemas.errors import CompletionHTTPValidationError, ErrorResponse, FailureResponse, HTTPValidationError
from schemas.legacy import LegacyChatRequest
from schemas.responses import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionChunk,
    CompletionResponse,
    LegacyChatChunk,
    LegacyChatResponse,
)

HERE = Path(__file__).parent


class _WithoutNullDefaults(GenerateJsonSchema):
    """Leaves `"default": null` out: a field that may be absent says so by not being required."""

    def default_schema(self, schema: Any) -> dict[str, Any]:
        if schema.get("default", ...) is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


MODELS: dict[str, type[BaseModel]] = {
    "completion_request.schema.json": CompletionRequest,
    "chat_completion_request.schema.json": ChatCompletionRequest,
    "legacy_chat_request.schema.json": LegacyChatRequest,
    "completion_response.schema.json": CompletionResponse,
    "completion_chunk.schema.json": CompletionChunk,
    "chat_completion_response.schema.json": ChatCompletionResponse,
    "chat_completion_chunk.schema.json": ChatCompletionChunk,
    "legacy_chat_response.schema.json": LegacyChatResponse,
    "legacy_chat_chunk.schema.json": LegacyChatChunk,
    "error_response.schema.json": ErrorResponse,
    "http_validation_error.schema.json": HTTPValidationError,
    "completion_http_validation_error.schema.json": CompletionHTTPValidationError,
    "failure_response.schema.json": FailureResponse,
}


def render(name: str) -> str:
    """The text that the file `name` should hold."""
    schema = MODELS[name].model_json_schema(schema_generator=_WithoutNullDefaults)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


if __name__ == "__main__":
    for name in MODELS:
        (HERE / name).write_text(render(name))
