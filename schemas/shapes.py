"""The shapes of a line: which request it holds, under which id, and what else its writer put beside it.

Recognised a line at a time:

- a bare body: of a completion (`prompt`), a chat (`messages`), a legacy chat (`context`);
- the OpenAI batch envelope, `{"custom_id", "method", "url", "body"}`, also with Azure's urls;
- Bedrock's `{"recordId", "modelInput"}` around a bare body.

Envelopes of other services are refused by name. A bare body may carry its id as `custom_id`. Fields that the schema
doesn't know are columns of its writer's own, and come out in `extra`, when the body names no model; a body written for
an API names one, and goes to the engine whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.contract import known_fields
from schemas.failures import Failure
from schemas.requests import Endpoint
from schemas.rules import RETIRED, plain

# An envelope's url, without a trailing slash, and the path that answers it.
URLS: Mapping[str, Endpoint] = {
    "/v1/completions": "/v1/completions",
    "/completions": "/v1/completions",
    "/v1/chat/completions": "/v1/chat/completions",
    "/chat/completions": "/v1/chat/completions",
    "/external/api/inference/openai/v1/chat/completions": "/external/api/inference/openai/v1/chat/completions",
    "/external/api/inference": "/external/api/inference",
}
# The field that tells a bare body's kind.
TELLING: Mapping[str, Endpoint] = {
    "prompt": "/v1/completions",
    "prompt_embeds": "/v1/completions",
    "messages": "/v1/chat/completions",
    "context": "/external/api/inference",
}
_ENVELOPE_FIELDS = {"custom_id", "method", "url", "body"}
_BEDROCK_FIELDS = {"recordId", "modelInput"}


@dataclass(slots=True)
class Shaped:
    """What a line holds. `id`: the caller's own, None where there is none. `extra`: the caller's own columns."""

    endpoint: Endpoint
    body: dict[str, Any]
    id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class _Refused(Exception):
    """A line whose shape isn't taken, and why."""

    def __init__(self, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(400, reason, message, param)


def recognise(line: Any, endpoint: Endpoint | None = None) -> Shaped | Failure:
    """The request in a line that was parsed strictly, or a Failure (400 with a reason of its own).

    `endpoint`: what bare bodies are, whatever they look like; None: each as it looks.
    """
    try:
        if not isinstance(line, dict):
            raise _Refused("not_an_object", f"found {_kind(line)}, expected a JSON object with a request")
        if "modelInput" in line or "recordId" in line:
            return _bedrock(line, endpoint)
        if "body" in line and not _tells(line):
            return _envelope(line, endpoint)
        _refuse_foreign(line)
        return _bare(line, endpoint)
    except _Refused as refused:
        return refused.failure


def unknown_fields(shaped: Shaped, line: dict[str, Any]) -> list[str]:
    """Fields beside the request's own that no schema speaks of: columns of the caller's, or misspelt names."""
    body = next((line[name] for name in ("body", "modelInput") if isinstance(line.get(name), dict)), line)
    known = known_fields(shaped.endpoint)
    return sorted(name for name in body if name not in known and name != "custom_id")


def _tells(body: dict[str, Any]) -> bool:
    """Whether a field tells which kind of request this is."""
    return any(name in body for name in TELLING)


def _envelope(line: dict[str, Any], endpoint: Endpoint | None) -> Shaped:
    identifier = line.get("custom_id", "")
    _expect("custom_id", identifier, isinstance(identifier, str), "a string")
    _expect("method", line.get("method"), line.get("method", "POST") == "POST", '"POST"')
    if (url := line.get("url")) is not None:
        known = URLS.get(url.rstrip("/")) if isinstance(url, str) else None
        _expect("url", url, known is not None, " or ".join(sorted(set(URLS.values()))))
        _expect("url", url, endpoint in (None, known), f"that of {endpoint}, as --endpoint says")
        endpoint = known
    return _inside(line, "body", identifier, endpoint, _ENVELOPE_FIELDS)


def _bedrock(line: dict[str, Any], endpoint: Endpoint | None) -> Shaped:
    identifier, body = line.get("recordId", ""), line.get("modelInput")
    _expect("recordId", identifier, isinstance(identifier, str), "a string")
    if isinstance(body, dict) and not _tells(body) and endpoint is None:
        found = ", ".join(map(plain, sorted(body)[:3])) or "no field"
        message = f"modelInput: found {found}, of a model of Bedrock's own; expected prompt, messages or context"
        raise _Refused("unsupported_shape", message, "modelInput")
    return _inside(line, "modelInput", identifier, endpoint, _BEDROCK_FIELDS)


def _inside(line: dict[str, Any], name: str, identifier: str, endpoint: Endpoint | None, fields: set[str]) -> Shaped:
    """The bare body in an envelope's field `name`; what else the envelope holds is the caller's own."""
    body = line.get(name)
    _expect(name, body, isinstance(body, dict), "an object with a request")
    assert isinstance(body, dict), "just seen"
    inner = _bare(body, endpoint)
    own = {key: value for key, value in line.items() if key not in fields}
    return Shaped(inner.endpoint, inner.body, identifier or inner.id, own | inner.extra)


def _bare(body: dict[str, Any], endpoint: Endpoint | None) -> Shaped:
    if endpoint is None:
        telling = [name for name in TELLING if body.get(name) is not None]
        if len(telling) > 1 and len({TELLING[name] for name in telling}) > 1:
            message = f"found {' and '.join(telling)}; a request has one of them. Leave the others out"
            raise _Refused("ambiguous_shape", message)
        endpoint = TELLING[telling[0]] if telling else "/v1/completions"
    identifier = body.get("custom_id", "")
    _expect("custom_id", identifier, isinstance(identifier, str), "a string")
    identifier = identifier or body.get("request_id")
    known = known_fields(endpoint)
    own = {key for key in body if key not in known and key not in RETIRED}
    if own and body.get("model") is not None:
        own &= {"custom_id"}
    extra = {}
    if own:
        extra = {key: value for key, value in body.items() if key in own and key != "custom_id"}
        body = {key: value for key, value in body.items() if key not in own}
    return Shaped(endpoint, body, identifier if isinstance(identifier, str) and identifier else None, extra)


def _refuse_foreign(line: dict[str, Any]) -> None:
    """Refuses a line that was written for another service, naming it and what to change."""
    if _tells(line):
        return
    for name, kind, service, advice in (
        ("params", dict, "Anthropic's batch form", "write its messages as a chat body"),
        ("contents", list, "Gemini's form", "write its contents as the messages of a chat body"),
        ("request", dict, "Gemini's batch form", "write its contents as the messages of a chat body"),
        ("inputs", str, "the form of Hugging Face's text generation", "write it as prompt, its parameters beside it"),
    ):
        if isinstance(line.get(name), kind):
            raise _Refused("unsupported_shape", f"{name}: found {service}; {advice}", name)


def _expect(name: str, found: Any, is_met: bool, expected: str) -> None:
    if not is_met:
        text = repr(found)[:80] if isinstance(found, (str, int, float)) else _kind(found)
        raise _Refused("malformed_envelope", f"{name}: found {text}, expected {expected}", name)


def _kind(value: Any) -> str:
    names = {
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        dict: "an object",
    }
    return names.get(type(value), "null")
