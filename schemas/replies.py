"""An engine's answer in the words of the API that was asked: whole bodies and events of a stream. Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from schemas.dialects import EXTERNAL_CHAT, LEGACY, LEGACY_STREAM
from schemas.requests import Endpoint, Timing


class Reply(Protocol):
    """Tells one request's answer; a stream's chunks in their order."""

    def answer(self, body: dict[str, Any], timing: Timing) -> dict[str, Any]:
        """The body that goes out, of the engine's, which it may change."""
        ...

    def concerns(self, data: str) -> bool:
        """Whether `chunk` has anything to do with an event, by its JSON text: most go out as they are."""
        ...

    def chunk(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The event that goes out, of the engine's, which it may change; None: nothing goes out for it."""
        ...

    def last(self, timing: Timing) -> Iterable[dict[str, Any]]:
        """What goes out after the engine's last event."""
        ...


def reply_to(endpoint: Endpoint) -> Reply:
    return _REPLIES[endpoint]()


class _Completion:
    """The engine's own words."""

    def answer(self, body: dict[str, Any], timing: Timing) -> dict[str, Any]:
        return body

    def concerns(self, data: str) -> bool:
        return False

    def chunk(self, event: dict[str, Any]) -> dict[str, Any] | None:
        return event

    def last(self, timing: Timing) -> Iterable[dict[str, Any]]:
        return ()


class _Chat(_Completion):
    """The engine calls `reasoning` what the API calls `reasoning_content`."""

    def answer(self, body: dict[str, Any], timing: Timing) -> dict[str, Any]:
        for choice in body["choices"]:
            _rename_reasoning(choice["message"])
        return body

    def concerns(self, data: str) -> bool:
        return '"reasoning":' in data

    def chunk(self, event: dict[str, Any]) -> dict[str, Any] | None:
        for choice in event["choices"]:
            _rename_reasoning(choice["delta"])
        return event


class _ExternalChat(_Chat):
    """With the times of the request, in milliseconds; those of a stream stand on the event with the usage."""

    def __init__(self) -> None:
        self._usage: dict[str, Any] | None = None

    def answer(self, body: dict[str, Any], timing: Timing) -> dict[str, Any]:
        return super().answer(body, timing) | {"time_info": _time_info(timing)}

    def concerns(self, data: str) -> bool:
        return super().concerns(data) or '"choices":[]' in data

    def chunk(self, event: dict[str, Any]) -> dict[str, Any] | None:
        if not event["choices"] and event.get("usage"):
            # It goes out once the times are known.
            self._usage = event
            return None
        return super().chunk(event)

    def last(self, timing: Timing) -> Iterable[dict[str, Any]]:
        return () if self._usage is None else (self._usage | {"time_info": _time_info(timing)},)


class _Legacy(_Completion):
    """A text, and calls of tools where there are any."""

    def answer(self, body: dict[str, Any], timing: Timing) -> dict[str, Any]:
        message = body["choices"][0]["message"]
        told = {"created": body["created"], "text": message.get("content") or ""}
        for name, value in (
            ("tool_calls", message.get("tool_calls")),
            ("reasoning_content", message.get("reasoning")),
        ):
            if value:
                told[name] = value
        return told


class _LegacyStream(_Completion):
    """Pieces of the text, counted; a call of a tool once it is whole, on the last one."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._created: float = 0
        self._calls: dict[int, dict[str, Any]] = {}

    def concerns(self, data: str) -> bool:
        return True

    def chunk(self, event: dict[str, Any]) -> dict[str, Any] | None:
        self._created = event.get("created", self._created)
        text = ""
        for choice in event["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                self._gather(part)
        return self._next(text, None) if text else None

    def last(self, timing: Timing) -> Iterable[dict[str, Any]]:
        if self._calls or not self._num_sent:
            # An answer without words is an event, too.
            yield self._next("", [self._calls[index] for index in sorted(self._calls)] or None)

    def _gather(self, part: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(
            part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def _next(self, text: str, tool_calls: list[dict[str, Any]] | None) -> dict[str, Any]:
        event = {"created": self._created, "idx": self._num_sent, "text": text, "tool_calls": tool_calls}
        self._num_sent += 1
        return event


_REPLIES: Mapping[Endpoint, type[Reply]] = {
    "/v1/completions": _Completion,
    "/v1/chat/completions": _Chat,
    EXTERNAL_CHAT: _ExternalChat,
    LEGACY: _Legacy,
    LEGACY_STREAM: _LegacyStream,
}


def choices_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer as it went out; a legacy chat's is one, whose message is what it tells."""
    if "choices" in body:
        return list(body["choices"])
    told = {name: body.get(name) for name in ("tool_calls", "reasoning_content")}
    return [{"message": {"content": body.get("text") or None, **told}}]


def _rename_reasoning(message: dict[str, Any]) -> None:
    if "reasoning" in message:
        message["reasoning_content"] = message.pop("reasoning")


def _time_info(timing: Timing) -> dict[str, float]:
    times = {"queue_ms": timing.queue_ms, "first_token_ms": timing.first_token_ms, "total_ms": timing.total_ms}
    return {name: round(value, 3) for name, value in times.items() if value is not None}


def to_json(body: Mapping[str, Any]) -> str:
    """JSON as answers are sent. Raises ValueError for a number that is none."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
