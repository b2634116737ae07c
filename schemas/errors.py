"""The bodies of errors: what each API documents, and `FailureResponse`, the one form that is sent and fits them all.

The completion API and the chat and legacy APIs call two different forms of a breach by one name, `ValidationError`.
"""

from typing import Annotated, Any

from pydantic import Field

from schemas.base import Open, Plain, optional


class ValidationError(Plain):
    """One breach of a request's schema, in the chat and legacy APIs."""

    loc: list[str | int]
    msg: str
    type: str


class HTTPValidationError(Plain):
    """The body of a 422 of the chat and legacy APIs."""

    detail: list[ValidationError] = optional(list)


class CompletionValidationError(ValidationError):
    """One breach of a request's schema, in the completion API."""

    input: Any = None
    ctx: dict[str, Any] = optional(dict)


class CompletionHTTPValidationError(Plain):
    """The body of a 422 of the completion API."""

    detail: list[CompletionValidationError] = optional(list)


class ErrorInfo(Open):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(Open):
    """The body of any other error, in the completion API."""

    error: ErrorInfo


Status = Annotated[int, Field(ge=400, le=599)]


class FailureInfo(ErrorInfo):
    code: Status
    # A name for the fault that stays the same whatever the message says.
    reason: str


class FailureResponse(ErrorResponse):
    """The body of every error that is sent: an ErrorResponse to all APIs, and with `detail` an HTTPValidationError."""

    status_code: Status
    error: FailureInfo
    detail: list[ValidationError] = optional(list)
