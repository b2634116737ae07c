"""How anything that goes wrong with one request is told: at both doors the same status, type, reason and words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ERROR_TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

# One step of a path such as `prompt[3]` or `logit_bias.5`: an index, or a name.
_STEP = re.compile(r"\[(\d+)\]|([^.\[]+)")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one request has no answer.

    `status_code` is the HTTP status that the online door gives; `reason` is our stable name for the fault (snake
    case); `param` is the path of the field at fault, such as `prompt[3]`, where one is.
    """

    status_code: int
    reason: str
    message: str
    param: str | None = None

    @property
    def type(self) -> str:
        return ERROR_TYPES.get(self.status_code, "InternalServerError")

    def body(self) -> dict[str, Any]:
        """The body that the API sends, a `schemas.errors.FailureResponse`.

        `{"status_code", "error": {"message", "type", "param", "code", "reason"}}`, and for a breach of the schema
        (422) also the list `detail` of `{"loc", "msg", "type"}`.
        """
        body: dict[str, Any] = {
            "status_code": self.status_code,
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.status_code,
                "reason": self.reason,
            },
        }
        if self.status_code == 422:
            body["detail"] = [{"loc": self._location(), "msg": self.message, "type": self.reason}]
        return body

    def _location(self) -> list[str | int]:
        """Where in the request the fault lies, step by step: `prompt[3]` is `["body", "prompt", 3]`."""
        steps = _STEP.findall(self.param or "")
        return ["body", *(int(index) if index else name for index, name in steps)]


@dataclass(frozen=True, slots=True)
class Throttled(Failure):
    """A caller asked too often, and may ask again after some seconds."""

    retry_after_s: int = 1


class UsageError(Exception):
    """The command can't be carried out as given. Its text is one line for a person: what, and what to do."""


class InputMissing(UsageError):
    """An input names nothing that is there."""


class Busy(UsageError):
    """Another run holds the lease on a folder. `holder` says which."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class EngineUnusable(Exception):
    """The engine can't answer this request or any other one; the fault isn't the request's.

    `reason` says why, on one line; Ray adds words of its own to an exception's text on the way.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotBegun(Exception):
    """The engine lets no more requests in, and this one hadn't begun: it is left for another time."""


class Interrupted(Exception):
    """A person has asked the run to end: what was in the engines is finished and kept, the rest is left."""


class TooManyErrors(Exception):
    """More rows failed than the user allows: the run stops, what is finished is kept."""


class StorageFailed(Exception):
    """A disk or an object store doesn't take, or give, what a run needs; trying again later may help.

    `reason` is one line for a person: which file, and what the store says; Ray adds words of its own to an exception's
    text on the way.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class JobLost(Exception):
    """A job of a cluster came to no end of its own, or nobody can tell any more. Its text is one line for a person."""
