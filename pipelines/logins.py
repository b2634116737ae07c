"""`POST /token`: a user's name and password for a bearer token, by OAuth2's password flow (RFC 6749, 4.3).

Its errors have OAuth2's own form (5.2), where `error` is a text, since OAuth2 libraries read it; `status_code` and
`reason` stand beside it, and mean what they mean elsewhere.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pipelines.bearers import Bearers
from pipelines.passwords import MAX_CHARS, Verifier
from pipelines.throttle import LoginRates
from pipelines.users import NAME, User, Users, UsersUnavailable
from schemas.failures import Failure, Throttled

log = logging.getLogger("overnight.logins")

_FORM = "application/x-www-form-urlencoded"
# Four bytes a character, each of them in three: of the longest password, with room for a name.
_MAX_BODY_BYTES = 16 << 10
_MAX_FIELDS = 16
# A password takes 64 MiB and some ten milliseconds of several cores: so many at a time, and so many that wait for it.
_NUM_JUDGES, _MOST_WAITING = 2, 32
# A token is nobody else's, a proxy's least of all.
_HEADERS = {"Cache-Control": "no-store", "Pragma": "no-cache"}
_RETRY_AFTER_S = 5

# One text for whatever is wrong, so that nobody learns which names there are.
_WRONG = Failure(400, "wrong_password", "no user has this name and password")


class _Refused(Exception):
    """No token: `error` is OAuth2's word for it."""

    def __init__(self, error: str, failure: Failure) -> None:
        super().__init__(failure.message)
        self.error, self.failure = error, failure


class Logins:
    """Gives out tokens."""

    def __init__(self, users: Users | None, bearers: Bearers | None, rates: LoginRates, timeout_s: float) -> None:
        """`timeout_s`: the longest time that a form may take to arrive."""
        self._users, self._bearers, self._rates, self._timeout_s = users, bearers, rates, timeout_s
        self._judges = ThreadPoolExecutor(_NUM_JUDGES, "passwords")
        self._num_waiting = 0
        self._verifier = Verifier() if users is not None else None

    async def answer(self, http: HttpRequest) -> Response:
        """A token, or why there is none."""
        try:
            return JSONResponse(await self._grant(http), 200, _HEADERS)
        except _Refused as refused:
            error, failure = refused.error, refused.failure
        body = {
            "error": error,
            "error_description": failure.message,
            "status_code": failure.status_code,
            "reason": failure.reason,
        }
        headers = dict(_HEADERS)
        if isinstance(failure, Throttled):
            headers["Retry-After"] = str(failure.retry_after_s)
        return JSONResponse(body, failure.status_code, headers)

    async def _grant(self, http: HttpRequest) -> dict[str, Any]:
        if self._users is None or self._bearers is None:
            message = "this endpoint has no users (--users). Send an API key, where it has keys"
            raise _Refused("unsupported_grant_type", Failure(400, "no_users", message))
        name, password = _check(await self._read(http))
        address = http.client.host if http.client is not None else ""
        user = await self._judge(self._users, name, password, address)
        token = self._bearers.issue(user.name, user.generation)
        return {"access_token": token, "token_type": "bearer", "expires_in": self._bearers.lifetime_s}

    async def _read(self, http: HttpRequest) -> dict[str, str]:
        """The fields of the form, each of which may be there once."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _FORM:
            raise _Refused("invalid_request", Failure(415, "not_a_form", f"the body is no form, expected {_FORM}"))
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in http.stream():
                    parts.append(part)
                    size += len(part)
                    if size > _MAX_BODY_BYTES:
                        message = f"the form has more than {_MAX_BODY_BYTES:,} bytes"
                        raise _Refused("invalid_request", Failure(413, "body_too_large", message))
        except TimeoutError:
            message = f"the form had not arrived after {self._timeout_s:g} s"
            raise _Refused("invalid_request", Failure(408, "body_timeout", message)) from None
        try:
            text = b"".join(parts).decode("ascii")
            pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
        except ValueError:
            # Not what the library says, which shows the bytes, and they may be a password's.
            raise _bad_form("the body can not be read as a form of UTF-8 text") from None
        if len({name for name, _ in pairs}) < len(pairs):
            raise _bad_form("a field is there twice")
        return dict(pairs)

    async def _judge(self, users: Users, name: str, password: str, address: str) -> User:
        """The user, where the password is his; attempts are counted and come one by one."""
        if self._num_waiting >= _MOST_WAITING:
            message = "as many passwords wait to be judged as may. Come back in some seconds"
            busy = Throttled(503, "overloaded", message, retry_after_s=_RETRY_AFTER_S)
            raise _Refused("temporarily_unavailable", busy)
        if (wait_s := self._rates.wait_s(name, address)) is not None:
            message = f"too many attempts for this name or from this address. Come back in {wait_s} s"
            raise _Refused("slow_down", Throttled(429, "too_many_logins", message, retry_after_s=wait_s))
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            user, is_right = await loop.run_in_executor(self._judges, self._verify, users, name, password)
        except UsersUnavailable:
            message = "the database of users does not answer. Come back in some seconds"
            gone = Throttled(503, "users_unavailable", message, retry_after_s=_RETRY_AFTER_S)
            raise _Refused("temporarily_unavailable", gone) from None
        finally:
            self._num_waiting -= 1
        if user is None or not is_right:
            # A name that nobody has isn't told: people type their password into the wrong field.
            log.warning("a login from %s failed: %s", address, user.name if user is not None else "no such user")
            raise _Refused("invalid_grant", _WRONG)
        self._rates.succeeded(name, address)
        return user

    def _verify(self, users: Users, name: str, password: str) -> tuple[User | None, bool]:
        assert self._verifier is not None, "there are users"
        user = users.find(name) if NAME.fullmatch(name) else None
        is_able = user is not None and user.is_enabled
        return user, self._verifier.verify(password, user.password if user is not None and is_able else None)


def _check(form: dict[str, str]) -> tuple[str, str]:
    """Name and password of a form, by the rules of OAuth2 and of FastAPI's `OAuth2PasswordRequestForm`."""
    if form.get("grant_type", "password") != "password":
        message = "grant_type is another than password, which is the only one here"
        raise _Refused("unsupported_grant_type", Failure(400, "unsupported_grant_type", message, "grant_type"))
    if form.get("scope", "").strip():
        message = "there are no scopes here: a token may what its user may"
        raise _Refused("invalid_scope", Failure(400, "unknown_scope", message, "scope"))
    name, password = form.get("username"), form.get("password")
    if not name or not password:
        raise _bad_form("expected a form with username and password")
    if len(password) > MAX_CHARS:
        raise _bad_form(f"the password has more than {MAX_CHARS:,} characters")
    return name, password


def _bad_form(message: str) -> _Refused:
    return _Refused("invalid_request", Failure(400, "bad_form", message))
