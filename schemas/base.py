"""What all models of bodies share."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# The published schemas write their 64-bit bounds as floats, which round to 2**63: that number itself lies within them.
BOUND_64 = 2**63
Int64 = Annotated[int, Field(ge=-BOUND_64, le=BOUND_64)]
TokenId = Annotated[int, Field(ge=0)]
Base64 = Annotated[str, Field(json_schema_extra={"contentMediaType": "application/octet-stream"})]


class Open(BaseModel):
    """A body that may hold fields of which the schema doesn't speak."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", populate_by_name=True)


def _say_nothing_of_further_fields(schema: dict[str, Any]) -> None:
    schema.pop("additionalProperties")


class Plain(BaseModel):
    """A body of which the schema says nothing about further fields; they are kept as well."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="allow",
        populate_by_name=True,
        json_schema_extra=_say_nothing_of_further_fields,
    )


def optional(kind: type) -> Any:
    """A field that may be absent but not null: it has no default in the schema, and is empty in the model."""
    return Field(default_factory=kind)


class GenerationRequest(Open):
    """What the completion and the chat request say alike."""

    model: str | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float = 1.0
    stop_token_ids: list[int] | None = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = optional(list)
    request_id: str = optional(str)
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
