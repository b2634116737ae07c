"""What is asked of an HTTP request before an engine is: how large it is, what it means, how long it may take.

Judges by the same checks as the batch door.
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from pipelines import web_search
from pipelines.checks import Checks
from pipelines.engine import LATE
from pipelines.keys import Caller
from pipelines.prefixes import first_levels
from pipelines.tokens import Prompt
from schemas.contract import parse_strict
from schemas.dialects import GUIDED, LEGACY, LEGACY_STREAM, to_engine
from schemas.failures import Failure
from schemas.limits import ModelLimits
from schemas.replies import to_json
from schemas.requests import Endpoint, Request
from schemas.rules import max_tokens_of, refuse, show
from schemas.settings import ServeSettings

T = TypeVar("T")

# Larger bodies are read and judged in a thread, so that they hold up nobody's stream.
_MOST_AT_ONCE = 16 << 10
# Blocks of a prompt (32 tokens each) that tell which engine has its beginning.
_AFFINITY_LEVELS = 4
# Fields whose compiling may take seconds.
_COMPILED = ("structured_outputs", "response_format", "tools", *GUIDED)


class Refused(Exception):
    """A request is not taken in."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Taken:
    """A request for an engine. `deadline`: `time.time()` at which to give it up. `affinity`: what keeps it near its
    like. `headers`: of its answer, beside those that all have."""

    request: Request
    priority: int
    deadline: float
    affinity: str
    is_stream: bool
    headers: dict[str, str]


class Intake:
    """Takes bodies in, within the bounds of an endpoint's settings."""

    def __init__(self, settings: ServeSettings, limits: ModelLimits) -> None:
        """Raises UsageError where the search of the web isn't there."""
        self._bounds, self._limits = settings.bounds, limits
        self._context_length = limits.context_length
        self._checks = Checks("online", settings.model, limits)
        self._search = web_search.load_search(settings.web_search)
        # Grammars have a thread of their own: one may take seconds.
        self._judges, self._compiler = ThreadPoolExecutor(2, "judge"), ThreadPoolExecutor(1, "compile")
        # Whatever is slow the first time is so now.
        self._checks.check({"prompt": "a"}, "/v1/completions")

    def prepare_compiler(self) -> None:
        """Start the process that compiles grammars, which takes some seconds, before it is needed."""
        constrained = {"prompt": "a", "structured_outputs": {"choice": ["a"]}}
        self._compiler.submit(self._checks.check, constrained, "/v1/completions")

    async def take(self, http: HttpRequest, endpoint: Endpoint, request_id: str, caller: Caller) -> Taken:
        """What goes to an engine of an HTTP request. `request_id`: for a body that has none. Raises Refused, and
        ClientDisconnect."""
        deadline, headers = time.time() + self._timeout_s(http), dict[str, str]()
        raw = await self._read(http)
        try:
            async with asyncio.timeout(deadline - time.time()):
                body = await self._apart(len(raw), parse_strict, raw, "body")
                if isinstance(body, Failure):
                    raise Refused(body)
                prompt = await self._judge(body, endpoint, len(raw))
                if endpoint in (LEGACY, LEGACY_STREAM):
                    found = await self._add_results(raw, body, endpoint, prompt)
                    raw, body, prompt, headers[web_search.HEADER] = found
        except TimeoutError:
            raise Refused(LATE) from None
        asked = to_engine(body, endpoint, self._limits)
        num_answers, bound = int(asked.get("n") or 1) * prompt.num_prompts, self._bounds.max_output_tokens
        longest, rest = max_tokens_of(asked, endpoint), self._context_length - prompt.num_tokens
        if longest is None and rest * num_answers > bound >= num_answers:
            # A chat that doesn't say how long its answer may be, and would go on to the end of the context.
            longest = bound // num_answers
            raw = await self._apart(len(raw), _to_bytes, {**body, "max_tokens": longest})
        total = (rest if longest is None else longest) * num_answers
        if total > bound:
            most = f"at most {bound:,} for all answers together (--bound max_output_tokens)"
            raise Refused(refuse("too_many_output_tokens", "max_tokens", f"{show(total)} tokens are asked for, {most}"))
        priority = max(int(asked.get("priority") or 0), caller.most_urgent_priority)
        session = asked.get("session_id")
        affinity = f"session {session}" if session else _beginning(prompt)
        request = Request(str(asked.get("request_id") or request_id), endpoint, raw.decode())
        return Taken(request, priority, deadline, affinity, bool(asked.get("stream")), headers)

    async def _add_results(
        self, raw: bytes, body: dict[str, Any], endpoint: Endpoint, prompt: Prompt
    ) -> tuple[bytes, dict[str, Any], Prompt, str]:
        """A legacy body, as text and parsed, with what a search of the web found, as far as the model's context has
        room for it; its prompt; and what is told of the search."""
        searched, told = await self._search.add_results(body)
        if searched is body:
            return raw, body, prompt, told
        # Pages are long, however short the question was.
        written = await asyncio.get_running_loop().run_in_executor(self._judges, _to_bytes, searched)
        try:
            return written, searched, await self._judge(searched, endpoint, len(written)), told
        except Refused as refused:
            if refused.failure.reason != "prompt_too_long":
                raise
            return raw, body, prompt, "too-long"

    def _timeout_s(self, http: HttpRequest) -> float:
        name, most = self._bounds.timeout_header, self._bounds.request_timeout_s
        if (text := http.headers.get(name)) is None:
            return most
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise Refused(refuse("bad_timeout", name, f"found {show(text)}, expected seconds above 0"))
        return min(seconds, most)

    async def _read(self, http: HttpRequest) -> bytes:
        """The body, as far as it may go. Raises Refused, and ClientDisconnect."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also what keeps a page in a browser from sending requests to somebody's own machine.
            found = f"found {show(kind)}" if kind else "found none"
            raise Refused(refuse("not_json", "Content-Type", f"{found}, expected application/json", 415))
        most = self._bounds.max_body_bytes
        length = http.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:19]) > most:
            raise Refused(_too_large(most))
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._bounds.body_timeout_s):
                async for part in http.stream():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise Refused(_too_large(most))
        except TimeoutError:
            message = f"the body hadn't arrived after {self._bounds.body_timeout_s:g} s"
            raise Refused(Failure(408, "body_timeout", message)) from None
        return b"".join(parts)

    async def _judge(self, body: Any, endpoint: Endpoint, size: int) -> Prompt:
        is_constrained = isinstance(body, dict) and any(body.get(name) for name in _COMPILED)
        if is_constrained:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._compiler, self._checks.check, body, endpoint)
        else:
            found = await self._apart(size, self._checks.check, body, endpoint)
        if isinstance(found, Failure):
            raise Refused(found)
        return found

    async def _apart(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """What comes of some work on a body of so many bytes, in a thread where it is large."""
        if size <= _MOST_AT_ONCE:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._judges, work, *arguments)


def _to_bytes(body: dict[str, Any]) -> bytes:
    return to_json(body).encode()


def _beginning(prompt: Prompt) -> str:
    """What prompts have in common that begin alike; "" for one that is too short to have a beginning."""
    beginning = first_levels(prompt.path, 1 + _AFFINITY_LEVELS)
    return beginning.hex() if len(beginning) > len(first_levels(prompt.path, 1)) else ""


def _too_large(most: int) -> Failure:
    return Failure(413, "body_too_large", f"the body has more than {most:,} bytes (--bound max_body_bytes)")
