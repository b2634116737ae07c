"""The chat request: messages of every role, tools, and the options of the chat API."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from schemas.base import GenerationRequest, Open, Plain, optional
from schemas.completion import LegacyStructuralTag as StructuralTag
from schemas.completion import ResponseFormat

# --- parts of a message's content -----------------------------------------------------------------


class TextPart(Plain):
    text: str
    type: Literal["text"]


class RefusalPart(Plain):
    refusal: str
    type: Literal["refusal"]


class ImageUrl(Plain):
    url: str
    detail: Literal["auto", "low", "high"] = optional(str)


class ImagePart(Plain):
    image_url: ImageUrl
    type: Literal["image_url"]


class InputAudio(Plain):
    data: str
    format: Literal["wav", "mp3"]


class InputAudioPart(Plain):
    input_audio: InputAudio
    type: Literal["input_audio"]


class FileData(Plain):
    file_data: str = optional(str)
    file_id: str = optional(str)
    filename: str = optional(str)


class FilePart(Plain):
    file: FileData
    type: Literal["file"]


class Url(Plain):
    url: str


class AudioPart(Plain):
    audio_url: Url
    type: Literal["audio_url"]


class VideoPart(Plain):
    video_url: Url
    type: Literal["video_url"]


class ImageEmbedsPart(Plain):
    image_embeds: str | dict[str, str]
    type: Literal["image_embeds"]


class SimpleImagePart(Plain):
    image_url: str


class SimpleAudioPart(Plain):
    audio_url: str


class SimpleVideoPart(Plain):
    video_url: str


UserPart = TextPart | ImagePart | InputAudioPart | FilePart
AnyPart = (
    UserPart
    | AudioPart
    | VideoPart
    | RefusalPart
    | SimpleImagePart
    | ImageEmbedsPart
    | SimpleAudioPart
    | SimpleVideoPart
    | str
)

# --- messages -------------------------------------------------------------------------------------


class Function(Plain):
    arguments: str
    name: str


class FunctionToolCall(Plain):
    id: str
    function: Function
    type: Literal["function"]


class Custom(Plain):
    input: str
    name: str


class CustomToolCall(Plain):
    id: str
    custom: Custom
    type: Literal["custom"]


class DeveloperMessage(Plain):
    content: str | list[TextPart]
    role: Literal["developer"]
    name: str = optional(str)


class SystemMessage(Plain):
    content: str | list[TextPart]
    role: Literal["system"]
    name: str = optional(str)


class UserMessage(Plain):
    content: str | list[UserPart]
    role: Literal["user"]
    name: str = optional(str)


class Audio(Plain):
    id: str


class AssistantMessage(Plain):
    role: Literal["assistant"]
    audio: Audio | None = None
    content: str | list[TextPart | RefusalPart] | None = None
    function_call: Function | None = None
    name: str = optional(str)
    refusal: str | None = None
    tool_calls: list[FunctionToolCall | CustomToolCall] = optional(list)


class ToolMessage(Plain):
    content: str | list[TextPart]
    role: Literal["tool"]
    tool_call_id: str


class FunctionMessage(Plain):
    content: str | None
    name: str
    role: Literal["function"]


class CustomMessage(Plain):
    """A message of a role that no other form knows, or in a form that its own role doesn't."""

    role: str
    content: str | list[AnyPart] = optional(str)
    name: str = optional(str)
    tool_call_id: str | None = None
    tool_calls: list[FunctionToolCall] | None = None


Message = (
    DeveloperMessage | SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage | CustomMessage
)

# --- tools and options ----------------------------------------------------------------------------


class FunctionDefinition(Open):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Open):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(Open):
    name: str


class NamedToolChoice(Open):
    function: NamedFunction
    type: Literal["function"] = "function"


class StreamOptions(Open):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class StructuralTagResponseFormat(Open):
    type: Literal["structural_tag"]
    structures: list[StructuralTag]
    triggers: list[str]


class LogitsProcessor(Open):
    model_config = ConfigDict(extra="forbid")

    qualname: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`, and of a chat line of a batch file."""

    messages: list[Message]
    frequency_penalty: float | None = 0.0
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    presence_penalty: float | None = 0.0
    response_format: ResponseFormat | StructuralTagResponseFormat | None = None
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    stop: str | list[str] | None = []
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none"] | Literal["auto"] | Literal["required"] | NamedToolChoice | None = "none"
    parallel_tool_calls: bool | None = False
    best_of: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_meta: dict[str, Any] | None = None
    priority: int = 0
    logits_processors: list[str | LogitsProcessor] | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, str | int | float] | None = None
    timeout_sec: float | None = None
