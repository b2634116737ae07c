"""Rules for chat bodies: messages, tools and templates. Like those of `schemas/rules.py`."""

from collections.abc import Iterator, Mapping
from typing import Any

import jiter

from schemas.beam_rules import beam_search
from schemas.dialects import GUIDED
from schemas.failures import Failure
from schemas.rules import (
    COMMON,
    RETIRED,
    Body,
    Judge,
    Rule,
    check_logprobs,
    check_structured_outputs,
    feature,
    min_tokens,
    number,
    plain,
    refuse,
    show,
    unsupported,
    whole,
)

_MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "image_embeds", "file")
# A message of one of these with a text and nothing else has no fault: most are so.
_PLAIN_ROLES = ("user", "assistant", "system", "developer")
# Keys of an assistant's message that no template here is given.
_LOST = {
    "refusal": "write it as the content",
    "audio": "write its transcript as the content",
}


def _messages(field: str, value: list[dict[str, Any]], body: Body, judge: Judge) -> Failure | None:
    if not value:
        return refuse("empty_prompt", field, "found no message, expected one at least")
    if judge.limits is not None and judge.limits.chat_template is None:
        message = "the model has no chat template, so it can't chat. Write a completion with prompt"
        return refuse("no_chat_template", field, message)
    for index, one in enumerate(value):
        if len(one) == 2 and one.get("role") in _PLAIN_ROLES and isinstance(one.get("content"), str):
            continue
        if (fault := next(_message(f"{field}[{index}]", one, judge), None)) is not None:
            return fault
    return None


def _message(path: str, message: dict[str, Any], judge: Judge) -> Iterator[Failure]:
    for name, advice in _LOST.items():
        if message.get(name) is not None:
            yield refuse("unsupported_field", f"{path}.{name}", f"the model would never see it; {advice}")
    yield from check_calls(path, message, judge)
    content = message.get("content")
    if content is None and not message.get("tool_calls") and not message.get("function_call"):
        yield refuse("empty_prompt", f"{path}.content", "found no content, expected text")
    if isinstance(content, list):
        for index, part in enumerate(content):
            kind = next((name for name in _MEDIA if isinstance(part, dict) and name in part), None)
            if kind is not None:
                where = f"{path}.content[{index}].{kind}"
                yield refuse("media_unsupported", where, "the model takes text alone. Leave the part out")


def check_calls(path: str, message: Mapping[str, Any], judge: Judge) -> Iterator[Failure]:
    """What is wrong with a message's calls of tools, or with its being a tool's answer."""
    if message.get("tool_calls") or message.get("function_call") or message.get("role") in ("tool", "function"):
        yield from _needs_tools(path, judge)
    if (former := message.get("function_call")) is not None:
        if message.get("role") != "assistant":
            words = "the model would never see it; an assistant makes calls"
            yield refuse("unsupported_field", f"{path}.function_call", words)
        elif not _is_object(former["arguments"]):
            where = f"{path}.function_call.arguments"
            yield refuse("bad_tools", where, f"found {show(former['arguments'])}, expected a JSON object")
    if message.get("tool_calls") and message.get("role") != "assistant":
        # Nor has the schema looked at them.
        yield refuse(
            "unsupported_field", f"{path}.tool_calls", "the model would never see them; an assistant makes calls"
        )
    for index, call in enumerate(message.get("tool_calls") or ()):
        if call.get("type") == "custom":
            yield refuse("unsupported_field", f"{path}.tool_calls[{index}]", "found a custom tool; write a function")
        elif not _is_object(call["function"]["arguments"]):
            where = f"{path}.tool_calls[{index}].function.arguments"
            yield refuse("bad_tools", where, f"found {show(call['function']['arguments'])}, expected a JSON object")


def _is_object(text: str) -> bool:
    try:
        return not text or isinstance(jiter.from_json(text.encode()), dict)
    except ValueError:
        return False


def _needs_tools(path: str, judge: Judge) -> Iterator[Failure]:
    if judge.limits is not None and not judge.limits.template_speaks_of("tool"):
        message = "the model's chat template knows no tools, so the model would never see them. Leave them out"
        yield refuse("tools_unsupported", path, message)


def check_tools(field: str, value: list[dict[str, Any]], body: Body, judge: Judge) -> Failure | None:
    """Whether the model can be offered tools, and is known to ask for them in the way that the body wants."""
    if not value:
        return refuse("bad_tools", field, "found an empty list. Leave it out")
    if body.get("tool_choice") == "none":
        return None
    if (failure := next(_needs_tools(field, judge), None)) is not None:
        return failure
    if body.get("tool_choice") in (None, "auto") and judge.limits is not None and not judge.limits.tool_parser:
        message = "tool_choice auto needs to know how the model writes a call. Give --engine tool_parser=NAME, or "
        return refuse("tools_unsupported", field, message + "tool_choice required, none, or a named function")
    return None


def _tool_choice(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
    if value == "none":
        return None
    tools = body.get("tools")
    if not tools:
        return refuse("bad_tools", field, f"found {show(value)} without tools. Give tools, or leave it out")
    if isinstance(value, dict):
        name = value["function"]["name"]
        names = [tool["function"]["name"] for tool in tools]
        if name not in names:
            found = f"found {show(name)}, which is none of the tools: {plain(', '.join(names), 200)}"
            return refuse("bad_tools", f"{field}.function.name", found)
    return None


def _documents(field: str, value: list[dict[str, str]], body: Body, judge: Judge) -> Failure | None:
    if not value or judge.limits is None or judge.limits.template_speaks_of("documents"):
        return None
    message = "the model's chat template takes no documents. Write them into a message"
    return refuse("unsupported_field", field, message)


def _continue(field: str, value: bool, body: Body, judge: Judge) -> Failure | None:
    if not value:
        return None
    if body.get("add_generation_prompt", True):
        message = "a message is either continued or answered. Give add_generation_prompt: false beside it"
        return refuse("bad_continuation", field, message)
    if body["messages"] and body["messages"][-1].get("role") != "assistant":
        return refuse("bad_continuation", field, "the last message isn't the assistant's, so there is none to continue")
    return None


def _template_arguments(field: str, value: dict[str, Any], body: Body, judge: Judge) -> Failure | None:
    taken = [name for name in value if name in ("chat_template", "tokenize", "messages", "conversation")]
    if not taken:
        return None
    return refuse("feature_off", f"{field}.{taken[0]}", "a request doesn't choose the template. Leave it out")


def _structured_outputs(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
    """The engine takes them of a chat, too, though the schema doesn't speak of them: so it hasn't looked at them."""
    if not isinstance(value, dict):
        return refuse("bad_constraint", field, f"found {show(value)}, expected an object")
    return check_structured_outputs(field, value, body, judge)


def _guided(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
    """A constraint by its former name; one of all that a body may have, by either name."""
    form = body.get("response_format") or {}
    others = [name for name in (*GUIDED, "structured_outputs") if name != field and body.get(name) is not None]
    others += ["response_format"] if form.get("type", "text") != "text" else []
    if others:
        found = f"found beside {others[0]}; a request has one constraint of its answer's form"
        return refuse("bad_constraint", field, found)
    if value in ("", []) and field != "guided_regex":
        return refuse("bad_constraint", field, f"found {value!r}, which says nothing. Leave it out")
    return None


def _whitespace(field: str, value: str, body: Body, judge: Judge) -> Failure | None:
    return refuse("unsupported_field", field, "the engine's grammars know no pattern of whitespace. Leave it out")


def _backend(field: str, value: str, body: Body, judge: Judge) -> Failure | None:
    """Any but ours asks for another grammar's rules."""
    if value in ("auto", "xgrammar"):
        return None
    return refuse("unsupported_field", field, f"found {show(value)}, and this engine has xgrammar. Leave it out")


CHAT: Mapping[str, Rule] = {
    **COMMON,
    "messages": _messages,
    "max_tokens": whole(1),
    "max_completion_tokens": whole(1),
    "min_tokens": min_tokens("/v1/chat/completions"),
    "use_beam_search": beam_search("/v1/chat/completions"),
    "structured_outputs": _structured_outputs,
    "top_logprobs": check_logprobs,
    "tools": check_tools,
    "tool_choice": _tool_choice,
    "documents": _documents,
    "continue_final_message": _continue,
    "timeout_sec": number(above=0),
    **dict.fromkeys(GUIDED, _guided),
    "guided_whitespace_pattern": _whitespace,
    "guided_decoding_backend": _backend,
    "guided_meta": unsupported("no grammar here takes it"),
    "chat_template": feature("chat_template", "a template runs as a program on the server"),
    "chat_template_kwargs": _template_arguments,
    "mm_processor_kwargs": unsupported("the model takes text alone"),
    "logits_processors": unsupported("code that comes with a request never runs here"),
}
assert RETIRED.keys() <= CHAT.keys(), "fields of old are refused in chats, too"
