"""A legacy chat as a chat: where in the conversation each kind of turn stands. Pure.

| turn | what the model sees |
| --- | --- |
| `System`, `Instruction`, `Role` | a system message; those that stand together are one |
| `Human`, `Question` | the user's words |
| `AI`, `Answer` | the assistant's words, and its tool calls |
| `Tool` | a tool's answer to a call |
| `Options`, `Retrieval`, `LinkedWebpages`, `Metadata` | context, named as what it is, within the user's next message |
| `AI (internally)` | context as well: a note that the assistant made for itself, and never its words |

The body's `metadata` (name, time zone, place of the user) is said at the end of the first system message.
"""

from collections.abc import Mapping
from typing import Any

# A configuration that names no model.
PLACEHOLDER = "placeholder"
# A field of the legacy body, and the chat's. Values that say nothing are left out.
FIELDS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_tokens",
    "stop_tokens": "stop",
    "tools": "tools",
    "response_format": "response_format",
}
_ROLES: Mapping[str, str] = {
    "System": "system",
    "Instruction": "system",
    "Role": "system",
    "AI": "assistant",
    "Answer": "assistant",
    "Tool": "tool",
}
# What stands before the words of a turn that is nobody's speech.
_LABELS: Mapping[str, str] = {
    "Role": "Your role",
    "Options": "Options",
    "Retrieval": "Retrieved for this conversation",
    "LinkedWebpages": "From linked web pages",
    "Metadata": "About this conversation",
    "AI (internally)": "A note that the assistant made for itself and has not said",
}
_ABOUT_THE_USER: Mapping[str, str] = {
    "user_firstname": "first name",
    "user_timezone": "time zone",
    "user_city": "city",
    "user_region": "region",
    "user_country": "country",
}


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat body that a legacy body means."""
    chat: dict[str, Any] = {"messages": _messages(body["context"], body.get("metadata") or {})}
    chat |= {new: body[old] for old, new in FIELDS.items() if body.get(old) not in (None, [])}
    if (config := body.get("config")) not in (None, PLACEHOLDER):
        chat["model"] = config
    return chat


def _messages(turns: list[dict[str, Any]], metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for turn in turns:
        message = _message(turn)
        if message["role"] == "tool":
            # An answer that doesn't name its call is that of the first one that has none yet.
            message["tool_call_id"] = turn.get("tool_call_id") or next(iter(unanswered), "call_0")
            unanswered = [one for one in unanswered if one != message["tool_call_id"]]
        unanswered += [call["id"] for call in message.get("tool_calls", ())]
        if messages and _go_together(messages[-1], message):
            # Many templates take no two messages of one role in a row.
            message["content"] = "\n\n".join(filter(None, (messages[-1]["content"], message["content"])))
            messages[-1] |= message
        else:
            messages.append(message)
    if about := _about_the_user(metadata):
        if messages and messages[0]["role"] == "system":
            messages[0]["content"] += "\n\n" + about
        else:
            messages.insert(0, {"role": "system", "content": about})
    return messages


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    label = _LABELS.get(turn["type"])
    message = {
        "role": role_of(turn["type"]),
        "content": turn["text"] if label is None else f"{label}:\n{turn['text']}",
    }
    if message["role"] == "assistant" and turn.get("tool_calls"):
        message["tool_calls"] = turn["tool_calls"]
    return message


def role_of(turn_type: str) -> str:
    """The role of the message in which the model sees a turn."""
    return _ROLES.get(turn_type, "user")


def _go_together(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["role"] == other["role"] != "tool" and not one.get("tool_calls")


def _about_the_user(metadata: Mapping[str, Any]) -> str:
    known = [f"{words}: {metadata[name]}" for name, words in _ABOUT_THE_USER.items() if metadata.get(name)]
    return f"About the user:\n{', '.join(known)}" if known else ""
