"""Who may use the endpoint, and how much: keys of a file, users with tokens and keys of their own, or, without either,
this machine alone. The one place that decides; the ingress asks."""

import asyncio
import hmac
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cachetools import TTLCache
from starlette.requests import Request as HttpRequest

from pipelines.bearers import Bearers, Claims, Expired, Forged
from pipelines.keys import Caller, KeyRing, digest
from pipelines.logins import Logins
from pipelines.throttle import LoginRates, Rates
from pipelines.users import User, UserKey, Users, UsersUnavailable, key_id
from schemas.failures import Failure, Throttled
from schemas.settings import ServeSettings, is_loopback

_T = TypeVar("_T")

_SCHEME = "bearer "
# Users and keys that are remembered for a while; the rest is looked up each time.
_MOST_CACHED = 4096
# A database that says nothing for so long is taken for gone.
_PATIENCE_S = 10.0
_HOW = "Send the header Authorization: Bearer KEY, with an API key or a token"
_MISSING = Failure(401, "missing_key", f"found no key. {_HOW}", "Authorization")
_TWICE = Failure(401, "missing_key", f"found more than one header. {_HOW}", "Authorization")
_WRONG = Failure(401, "wrong_key", "this key or token is none that is known here", "Authorization")
_EXPIRED = Failure(401, "expired_token", "this token has expired. Get another one at token", "Authorization")
_REVOKED = Failure(401, "revoked", "this key or token is good no more", "Authorization")
_LOOPBACK = Failure(
    401,
    "loopback_only",
    "this endpoint has neither users nor keys, and answers its own machine alone. Give it some (--users, --keys)",
)
_UNAVAILABLE = Failure(503, "users_unavailable", "the database of users doesn't answer. Come back in some seconds")


class Access:
    """Decides; of one ingress process. What it read of users and keys, it believes for `user_cache_s`."""

    def __init__(self, settings: ServeSettings) -> None:
        """Raises UsageError, and UsersUnavailable."""
        bounds, self._settings = settings.bounds, settings
        self._anonymous = Caller("anonymous", bounds.most_urgent_priority)
        self._keys = KeyRing(settings.keys)
        self._rates = Rates(settings.ingress_replicas)
        self._users = Users.open(settings.users.get_secret_value()) if settings.users is not None else None
        self._bearers = Bearers(self._users.secret(), bounds.token_lifetime_s) if self._users is not None else None
        self.logins = Logins(
            self._users,
            self._bearers,
            LoginRates(bounds.logins_per_minute, settings.ingress_replicas),
            bounds.body_timeout_s,
        )
        self._readers = ThreadPoolExecutor(4, "users")
        self._found_users: TTLCache[str, User | None] = TTLCache(_MOST_CACHED, bounds.user_cache_s)
        self._found_keys: TTLCache[str, tuple[UserKey, User] | None] = TTLCache(_MOST_CACHED, bounds.user_cache_s)

    async def identify(self, http: HttpRequest) -> Caller | Failure:
        """Who sent a request, which is counted; a Failure where he may not: 401, 429, or 503 where nobody can tell."""
        try:
            caller = await self._who(http)
        except (UsersUnavailable, TimeoutError):
            return _UNAVAILABLE
        if isinstance(caller, Failure):
            return caller
        wait_s = self._rates.wait_s(caller.name, caller.requests_per_minute)
        if wait_s is None:
            return caller
        message = f"{caller.requests_per_minute:,} requests a minute are allowed. Come back in {wait_s} s"
        return Throttled(429, "rate_limited", message, retry_after_s=wait_s)

    async def _who(self, http: HttpRequest) -> Caller | Failure:
        if self._settings.is_guarded:
            given = _read_header(http)
            return given if isinstance(given, Failure) else self._keys.find(given) or await self._owner(given)
        # However the application was deployed, nobody from elsewhere gets in without a key. The name that it was asked
        # by, too: a page from elsewhere may have one that leads to this machine.
        host = http.client.host if http.client is not None else ""
        is_own = is_loopback(host) and is_loopback(http.url.hostname or "")
        return self._anonymous if is_own or self._settings.allow_unauthenticated else _LOOPBACK

    async def _owner(self, given: str) -> Caller | Failure:
        """Whose key or token it is, of the users."""
        if self._users is None or self._bearers is None:
            return _WRONG
        if (id := key_id(given)) is not None:
            return await self._owner_of_key(self._users, given, id)
        try:
            return await self._owner_of_token(self._users, self._bearers.read(given))
        except Expired:
            return _EXPIRED
        except Forged:
            return _WRONG

    async def _owner_of_key(self, users: Users, given: str, id: str) -> Caller | Failure:
        found = await self._look_up(self._found_keys, id, users.find_key)
        if found is None:
            return _WRONG
        key, user = found
        salt = bytes.fromhex(key.digest.partition(":")[0])
        if not hmac.compare_digest(digest(given, salt), key.digest):
            return _WRONG
        return self._as_caller(user) if user.is_enabled else _REVOKED

    async def _owner_of_token(self, users: Users, claims: Claims) -> Caller | Failure:
        user = await self._look_up(self._found_users, claims.name, users.find)
        if user is None or not user.is_enabled or user.generation != claims.generation:
            return _REVOKED
        return self._as_caller(user)

    async def _look_up(self, cache: "TTLCache[str, _T]", name: str, read: Callable[[str], _T]) -> _T:
        try:
            return cache[name]
        except KeyError:
            pass
        asked = time.monotonic()
        async with asyncio.timeout(_PATIENCE_S):
            found = await asyncio.get_running_loop().run_in_executor(self._readers, read, name)
        # What was long on its way is as old as the question.
        if time.monotonic() - asked < self._settings.bounds.user_cache_s / 2:
            cache[name] = found
        return found

    def _as_caller(self, user: User) -> Caller:
        role = self._settings.roles[user.role]
        return Caller(user.role, role.most_urgent_priority, f"user:{user.name}", role.requests_per_minute)


def _read_header(http: HttpRequest) -> str | Failure:
    """The key or token that a request brings."""
    headers = http.headers.getlist("authorization")
    if len(headers) > 1:
        return _TWICE
    if not headers or headers[0][: len(_SCHEME)].lower() != _SCHEME:
        return _MISSING
    return headers[0][len(_SCHEME) :].strip()


def headers_of(failure: Failure) -> dict[str, str]:
    """The headers that a failure has, whatever the route: how to say who one is (RFC 6750), and when to come back."""
    if isinstance(failure, Throttled):
        return {"Retry-After": str(failure.retry_after_s)}
    if failure.status_code != 401:
        return {}
    is_given = failure.reason not in {_MISSING.reason, _LOOPBACK.reason}
    return {"WWW-Authenticate": 'Bearer error="invalid_token"' if is_given else "Bearer"}
