"""The completion request: every field, its type, bounds and default.

`completion_request.schema.json` is generated from these models (`python -m schemas.generate`) and decides over raw
bodies; the models carry what it accepted.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import BOUND_64, Base64, GenerationRequest, Int64, Open, Plain, TokenId

XArg = str | int | float


class StreamOptions(Open):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchemaResponseFormat(Open):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", title="Schema")
    strict: bool | None = None


class ResponseFormat(Open):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaResponseFormat | None = None


class StructuralTagResponseFormat(Open):
    type: Literal["structural_tag"]
    format: Any


class LegacyStructuralTag(Open):
    begin: str
    schema_: dict[str, Any] | None = Field(None, alias="schema", title="Schema")
    end: str


class LegacyStructuralTagResponseFormat(Open):
    type: Literal["structural_tag"]
    structures: list[LegacyStructuralTag]
    triggers: list[str]


class StructuredOutputsParams(Plain):
    json_: str | dict[str, Any] | None = Field(None, alias="json", title="Json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend: str | None = Field(None, alias="_backend", title="Backend")
    backend_was_auto: bool = Field(False, alias="_backend_was_auto", title="Backend Was Auto")


class RepetitionDetectionParams(Plain):
    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`, and of a line of a batch file."""

    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    echo: bool | None = False
    frequency_penalty: float | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    presence_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = []
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    watermarking: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=BOUND_64)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_embeds: Base64 | list[Base64] | None = None
    add_special_tokens: bool = True
    response_format: ResponseFormat | StructuralTagResponseFormat | LegacyStructuralTagResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    priority: Int64 = 0
    session_id: str | None = None
    return_token_ids: bool | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = 0
    return_token_offsets: bool | None = False
    mm_payload: Literal["tensors", "none"] = "tensors"
    return_mm_kwargs: Annotated[bool | None, Field(deprecated=True)] = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, XArg | list[XArg]] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    thinking_token_budget: int | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None
