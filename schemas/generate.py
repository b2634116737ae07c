"""Write the JSON Schema files beside this module anew: `python -m schemas.generate`."""

import json
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from schemas.completion import CompletionRequest

HERE = Path(__file__).parent


class _WithoutNullDefaults(GenerateJsonSchema):
    """Leaves `"default": null` out: a field that may be absent says so by not being required."""

    def default_schema(self, schema: Any) -> dict[str, Any]:
        if schema.get("default", ...) is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def completion_request_schema() -> dict[str, Any]:
    """The JSON Schema (Draft 2020-12) of a completion request."""
    schema = CompletionRequest.model_json_schema(schema_generator=_WithoutNullDefaults)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


SCHEMAS = {"completion_request.schema.json": completion_request_schema}


def render(name: str) -> str:
    """The text that the file `name` should hold."""
    return json.dumps(SCHEMAS[name](), indent=2) + "\n"


if __name__ == "__main__":
    for name in SCHEMAS:
        (HERE / name).write_text(render(name))
