"""What vLLM raises or returns for a request, in our words: the one place where its errors become ours.

"This request failed" is a Failure; "the engine is unusable" is an EngineUnusable. Light until the first call: vLLM is
imported by the functions that need its classes.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from schemas.failures import EngineUnusable, Failure

MAX_MESSAGE_CHARS = 600
ABORTED = Failure(500, "aborted", "the engine gave the request up before it was answered")

_REFUSED = "the engine refused this request"
_UNABLE = "the engine can't do what this request asks for"
_BUSY = "the engine can't take this request now"
_FAILED = "the engine failed on this request"

# What vLLM's handlers answer when their own await is cancelled, as a 400; they mark it in no other way.
_DISCONNECTED = "Client disconnected"
# The parameters of vLLM's two checks of a prompt's length, in tokens and (before it is cut into tokens) in characters.
_LENGTH_PARAMS = frozenset({"input_tokens", "input_text"})

# Past this a text is cut before it is cleaned, which happens on the loop that answers everybody. vLLM's own cleaning
# isn't used: it knows some folders only, and takes a second for 4,000 characters of slashes and letters.
_MAX_CLEANED_CHARS = 4_000
_TRACEBACK = "Traceback (most recent call last):"
# A frame of a stack, an object's address, and the time and place that a library in C++ puts before its message.
_NOISE = re.compile(r'File "[^"]+", line \d+, in [\w.<>]+| at 0x[0-9a-fA-F]+(?=>)|\[\d\d:\d\d:\d\d\] \S+:\d+: ')
# A path of the API says nothing about this machine and stays.
_FILE_PATH = re.compile(r"(?:file://|(?<![\w/.]))/(?!v1/)[\w.@~-]+(?:/[\w.@~-]+)+/?")
# pydantic names the branch of a union that it tried by its class.
_CLASS_NAME = re.compile(r"[A-Z]\w*")


class GivenUp(Exception):
    """The engine ended a sequence of a beam search that had not come to its end."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How errors of one class are told.

    `lead`: our words, used where vLLM has none. `is_led`: they also stand before vLLM's, because those were not
    written for whoever sent the request. `param`: the field at fault, where vLLM doesn't name it.
    """

    status_code: int
    reason: str
    lead: str
    is_led: bool = False
    param: str | None = None


# What a status alone tells: of a returned body, and of an exception that brings its own.
_BY_STATUS: Mapping[int, _Kind] = {
    400: _Kind(400, "invalid_request", _REFUSED),
    404: _Kind(404, "unknown_model", _REFUSED, param="model"),
    409: _Kind(409, "conflict", _BUSY),
    422: _Kind(422, "unprocessable", _REFUSED),
    429: _Kind(429, "overloaded", _BUSY),
    500: _Kind(500, "engine_error", _FAILED, is_led=True),
    501: _Kind(501, "unsupported", _UNABLE),
    503: _Kind(503, "overloaded", _BUSY),
}


@cache
def _kinds() -> Mapping[type[BaseException], _Kind]:
    """By class; one that isn't listed is told as its nearest parent that is."""
    from jinja2 import TemplateError
    from pydantic import ValidationError
    from vllm import exceptions

    refused, failed = _BY_STATUS[400], _BY_STATUS[500]
    # vLLM raises these for a client's mistakes, which it has not all given classes of its own, and a fault in its own
    # code raises them too. It answers 400 to both; the lead says whose word that is.
    blamed = _Kind(400, "invalid_request", _REFUSED, is_led=True)
    return {
        exceptions.VLLMClientError: refused,
        exceptions.VLLMNotFoundError: _BY_STATUS[404],
        exceptions.LoRAAdapterNotFoundError: _Kind(404, "unknown_adapter", _REFUSED, param="model"),
        exceptions.VLLMUnprocessableEntityError: _BY_STATUS[422],
        ValidationError: refused,
        TemplateError: _Kind(400, "invalid_request", "the chat template refused the messages", is_led=True),
        ValueError: blamed,
        TypeError: blamed,
        OverflowError: blamed,
        NotImplementedError: _Kind(501, "unsupported", _UNABLE, is_led=True),
        exceptions.RetryableRequestError: _Kind(503, "transient", _BUSY),
        exceptions.VLLMServerError: failed,
        BaseException: failed,
    }


def translate(error: BaseException) -> Failure | EngineUnusable:
    """What an exception out of vLLM means: a failure of its request alone, or an engine that can't answer any.

    Statuses are those of vLLM's `create_error_response`, with two exceptions: an EngineGenerateError is told by its
    cause where vLLM had blamed the request, and a cancelled request is nobody's mistake. KeyboardInterrupt and
    SystemExit are raised again. A library in Rust that panics raises a BaseException that isn't an Exception.
    """
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    match error:
        case KeyboardInterrupt() | SystemExit():
            raise error
        case EngineUnusable():
            return error
        case EngineDeadError():
            return EngineUnusable("the engine's process has died")
        case asyncio.CancelledError() | GeneratorExit() | GivenUp():
            return ABORTED
        case EngineGenerateError():
            return _translate_cause(error.__cause__)
    kind = _kind(error)
    text, param = _words(error)
    return _failure(kind, text, param)


def translate_response(error_response: Any) -> Failure:
    """The failure that a returned `ErrorResponse` of vLLM tells of."""
    told = error_response.error
    # A client that leaves is noticed elsewhere; what is cancelled here was cancelled by us.
    if told.code == 400 and told.message == _DISCONNECTED:
        return ABORTED
    return _failure(_kind_of(told.code), told.message, told.param)


def one_line(text: str) -> str:
    """A text of vLLM or of a library below it, fit to be shown: no traceback, addresses, paths or line ends.

    At most MAX_MESSAGE_CHARS characters.
    """
    head, found, trace = text.partition(_TRACEBACK)
    if found:
        lines = trace.strip().splitlines() or [""]
        text = head.strip(" :\n") or lines[-1].partition(": ")[2]
    text = _NOISE.sub("", text.strip()[:_MAX_CLEANED_CHARS])
    return _cut(" ".join(_FILE_PATH.sub("<path>", text).split()))


def _translate_cause(cause: BaseException | None) -> Failure | EngineUnusable:
    """An EngineGenerateError by what it was raised from; it has no words of its own.

    A bare ValueError or TypeError in there is not taken for the client's mistake: when the loop that hands out the
    answers fails, every request in flight gets that loop's exception as its cause.
    """
    from vllm import exceptions
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    match cause:
        case (
            exceptions.VLLMClientError()
            | exceptions.GracefulHTTPError()
            | exceptions.GenerationError()
            | EngineDeadError()
            | EngineGenerateError()
        ):
            return translate(cause)
    return _failure(_BY_STATUS[500], "" if cause is None else str(cause), None)


def _kind(error: BaseException) -> _Kind:
    from vllm.exceptions import GracefulHTTPError

    if isinstance(error, GracefulHTTPError):
        return _kind_of(error.http_status.value)
    kinds = _kinds()
    return next(kinds[parent] for parent in type(error).__mro__ if parent in kinds)


def _kind_of(status_code: int) -> _Kind:
    known = _BY_STATUS.get(status_code)
    if known is not None:
        return known
    nearest = _BY_STATUS[400 if 400 <= status_code < 500 else 500]
    return _Kind(status_code, nearest.reason, nearest.lead, nearest.is_led)


def _words(error: BaseException) -> tuple[str, str | None]:
    """What an exception says, and the path of the field that it says it of."""
    from pydantic import ValidationError
    from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError

    match error:
        case VLLMValidationError() | VLLMUnprocessableEntityError():
            # Its str() appends the rejected value: perhaps a whole prompt, or an integer too long to print.
            return str(error.args[0]), error.parameter
        case ValidationError():
            first = error.errors(include_url=False, include_input=False)[0]
            return first["msg"].removeprefix("Value error, "), _path(first["loc"])
    return str(error), None


def _path(location: tuple[int | str, ...]) -> str | None:
    """pydantic's location as a path such as `messages[0].content`, without the branches of unions that it tried."""
    from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param

    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not _CLASS_NAME.fullmatch(step):
            # Beside an empty step the cleaning leaves nothing of a branch, and of a field's name `.name`.
            path += clean_loc_for_param(("", step))
    return path.removeprefix(".") or None


def _failure(kind: _Kind, text: str, param: str | None) -> Failure:
    words = one_line(text)
    if not words:
        message = f"{kind.lead}, and gave no reason"
    else:
        message = _cut(f"{kind.lead}: {words}") if kind.is_led else words
    if kind.status_code == 400 and param in _LENGTH_PARAMS:
        return Failure(400, "prompt_too_long", message, "input_tokens")
    return Failure(kind.status_code, kind.reason, message, param or kind.param)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"
