"""The legacy chat request: turns of a conversation, and a configuration by name."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Open
from schemas.chat import FunctionToolCall, StructuralTagResponseFormat, Tool
from schemas.completion import ResponseFormat

TurnType = Literal[
    "AI",
    "Human",
    "Retrieval",
    "Instruction",
    "Metadata",
    "LinkedWebpages",
    "System",
    "Question",
    "Options",
    "Role",
    "Answer",
    "AI (internally)",
    "Tool",
]

DateTime = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class Turn(Open):
    type: TurnType
    text: str
    ts: DateTime | None = None
    tool_calls: list[FunctionToolCall] | None = None
    tool_call_id: str | None = None


class Metadata(Open):
    user_timezone: str | None = None
    user_firstname: str | None = None
    user_country: str | None = None
    user_region: str | None = None
    user_city: str | None = None


class LegacyChatRequest(Open):
    """The body of `POST /external/api/inference`."""

    context: list[Turn]
    config: str = "placeholder"
    metadata: Metadata | None = None
    temperature: float | None = None
    stop_tokens: list[str] | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    web_search: bool = True
    tools: list[Tool] | None = []
    server_target: str | None = None
    response_format: ResponseFormat | StructuralTagResponseFormat | None = None
    schemas: list[str] | None = None
