"""What a body means to the engine, which speaks completions and chats: the one place where other words for them end.

Judged are bodies as they came (`schemas/contract.py`), so that an error names what its writer wrote.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from schemas.failures import Failure
from schemas.limits import ModelLimits
from schemas.requests import Endpoint
from schemas.turns import to_chat

EngineEndpoint = Literal["/v1/completions", "/v1/chat/completions"]

EXTERNAL_CHAT: Endpoint = "/external/api/inference/openai/v1/chat/completions"
LEGACY: Endpoint = "/external/api/inference"
LEGACY_STREAM: Endpoint = "/external/api/inference/streaming"

# What a body of that API means where it says nothing; on /v1 the same fields mean what OpenAI says.
EXTERNAL_DEFAULTS: Mapping[str, Any] = {"tool_choice": "none", "parallel_tool_calls": False}
# Constraints of an answer's form by their former names, and where today's stands in `structured_outputs`.
GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
# What the engine is told, and by which name the body said it. A message may be made of several turns: which of them is
# at fault isn't known.
_LEGACY_NAMES = {"messages": "context", "stop": "stop_tokens", "model": "config"}


def to_engine(body: Mapping[str, Any], endpoint: Endpoint, limits: ModelLimits | None) -> dict[str, Any]:
    """The body that an engine takes, of one that passed the schema. Nothing of `body` is changed."""
    if endpoint == "/v1/completions":
        return dict(body)
    if endpoint in (LEGACY, LEGACY_STREAM):
        chat = to_chat(body)
        if endpoint == LEGACY_STREAM:
            # The usage is for our own books.
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
    else:
        chat = {name: value for name, value in body.items() if name not in _FORMER}
        if (constraint := _constraint(body)) is not None:
            chat["structured_outputs"] = constraint
        if endpoint == EXTERNAL_CHAT:
            chat |= {name: value for name, value in EXTERNAL_DEFAULTS.items() if chat.get(name) is None}
    if (options := chat.get("stream_options")) is not None and options.get("include_usage") is None:
        # The schema's default, which isn't the engine's.
        chat["stream_options"] = {**options, "include_usage": True}
    chat["messages"] = _messages(chat["messages"], limits)
    return chat


def engine_endpoint(endpoint: Endpoint) -> EngineEndpoint:
    return "/v1/completions" if endpoint == "/v1/completions" else "/v1/chat/completions"


def in_words_of(failure: Failure, body: Mapping[str, Any], endpoint: Endpoint) -> Failure:
    """A failure of the engine's body, by the name that the field has in the body as it came."""
    if failure.param is None:
        return failure
    field = re.split(r"[.\[]", failure.param, maxsplit=1)[0]
    if endpoint in (LEGACY, LEGACY_STREAM):
        param = _LEGACY_NAMES.get(field, failure.param)
    elif field == "structured_outputs" and not body.get(field):
        param = next((old for old in GUIDED if body.get(old) is not None), failure.param)
    else:
        return failure
    # Our own messages begin with the path.
    message = failure.message
    if message.startswith(f"{failure.param}: "):
        message = param + message.removeprefix(failure.param)
    return replace(failure, message=message, param=param)


# They say nothing that an engine takes.
_FORMER = frozenset({*GUIDED, "guided_whitespace_pattern", "guided_decoding_backend", "guided_meta"})


def _constraint(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """`structured_outputs`, as the body says it by either name."""
    said = {new: body[old] for old, new in GUIDED.items() if body.get(old) is not None}
    return said or body.get("structured_outputs")


def _messages(messages: list[dict[str, Any]], limits: ModelLimits | None) -> list[dict[str, Any]]:
    """Messages of former and newer forms in those that chat templates know."""
    knows_developers = limits is None or limits.template_speaks_of("developer")
    told: list[dict[str, Any]] = []
    last_call = "call_0"
    for index, message in enumerate(messages):
        match message:
            case {"role": "developer"} if not knows_developers:
                told.append({**message, "role": "system"})
            case {"role": "function"}:
                told.append({"role": "tool", "tool_call_id": last_call, "content": message.get("content") or ""})
            case {"role": "assistant", "function_call": {} as function}:
                last_call = f"call_{index}"
                calls = [
                    *(message.get("tool_calls") or ()),
                    {"id": last_call, "type": "function", "function": function},
                ]
                rest = {name: value for name, value in message.items() if name != "function_call"}
                told.append({**rest, "tool_calls": calls})
            case _:
                told.append(message)
    return told
