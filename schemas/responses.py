"""What is sent back: answers, chunks of a stream, usage, log-probabilities and tool calls.

An answer's body is vLLM's own and goes out as it came, so these models make none: they say which bodies callers may
rely on, and the `*_response` and `*_chunk` schemas beside this module are generated from them
(`python -m schemas.generate`). Fields of which they don't speak are allowed and kept. Where a body may lack a field,
the model holds an empty value; dump with `exclude_unset=True` to have back what came in.
"""

from typing import Any, Literal

from schemas.base import Open, Plain, optional

# --- what answers share -------------------------------------------------------------------------------------------


class PromptTokensDetails(Open):
    """How many of the prompt's tokens the prefix cache already had."""

    cached_tokens: int | None = None


class Usage(Open):
    """The tokens of one answer, of all its prompts and choices together."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Logprob(Plain):
    """The natural logarithm of one token's probability, and the token's rank in the vocabulary, 1 being likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# By position in the prompt; null where nothing comes before. Keys are token ids, as strings.
PromptLogprobs = list[dict[str, Logprob] | None]
StopReason = int | str


class FunctionCall(Open):
    name: str
    # JSON, as the model wrote it: it may be broken.
    arguments: str


class ToolCall(Open):
    id: str = optional(str)
    type: Literal["function"] = "function"
    function: FunctionCall


# --- completions ----------------------------------------------------------------------------------------------------
# The completion API leaves these bodies open. Required here is what its clients count on, and what both doors send.


class CompletionLogprobs(Open):
    """Log-probabilities of a choice's tokens: four lists of one length. An echoed first token has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class _CompletionChoice(Open):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    # Null in a chunk until the choice ends.
    finish_reason: str | None
    stop_reason: StopReason | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(_CompletionChoice):
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunkChoice(_CompletionChoice):
    """What a chunk adds to one choice."""


class CompletionResponse(Open):
    """The answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class CompletionChunk(Open):
    """One event of a streamed completion; the one with the usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


# --- chats ------------------------------------------------------------------------------------------------------------


class TokenLogprob(Open):
    token: str
    # What stands for a probability of 0.
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatTokenLogprob(TokenLogprob):
    """A chosen token, with the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob] = optional(list)


class ChatLogprobs(Open):
    content: list[ChatTokenLogprob] | None = None


class ChatMessage(Open):
    role: str
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = optional(list)


class ChatChoice(Open):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = "stop"
    stop_reason: StopReason | None = None


class ChatCompletionResponse(Open):
    """The answer of `POST /v1/chat/completions`."""

    id: str = optional(str)
    object: Literal["chat.completion"] = "chat.completion"
    created: int = optional(int)
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    system_fingerprint: str | None = None
    time_info: dict[str, Any] | None = None


class DeltaFunctionCall(Plain):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(Open):
    """What a chunk adds to the tool call `index`; the name comes first, the arguments piece by piece."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(Open):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] = optional(list)


class ChatChunkChoice(Open):
    """What a chunk adds to one choice."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | None = None


class ChatCompletionChunk(Open):
    """One event of a streamed chat; the one with the usage has no choices."""

    id: str = optional(str)
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = optional(int)
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    time_info: dict[str, Any] | None = None


# --- legacy chats -----------------------------------------------------------------------------------------------------


class LegacyChatResponse(Plain):
    """The answer of `POST /external/api/inference`."""

    created: float
    text: str
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


class LegacyChatChunk(Plain):
    """One event of `POST /external/api/inference/streaming`; `idx` counts them from 0."""

    created: float
    idx: int
    text: str
    tool_calls: list[ToolCall] | None = None
