"""Web search for legacy chats: a function of the operator's, and where what it finds stands in the conversation.

A body asks for a search unless it says otherwise, so without such a function it is answered without one, and told so.
"""

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.failures import UsageError

log = logging.getLogger("overnight.serve")

HEADER = "X-Web-Search"
# Of what a page says, so much is shown to the model; and so many pages.
_MAX_PAGE_CHARS, _MAX_PAGES = 2_000, 5
_TIME_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class WebPage:
    """One result: what the page is called, where it is, and what of it matters."""

    title: str
    url: str
    text: str


# What an operator gives: the words of a person, and the pages that speak of them, the best first.
Provider = Callable[[str], Awaitable[Sequence[WebPage]]]


def load_search(spec: str | None) -> "WebSearch":
    """The search that `--web-search MODULE:FUNCTION` names. Raises UsageError where there is no such function."""
    if spec is None:
        return WebSearch(None)
    module, _, name = spec.partition(":")
    try:
        provider = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--web-search {spec}: expected MODULE:FUNCTION that can be imported ({error})") from None
    if not asyncio.iscoroutinefunction(provider):
        raise UsageError(f"--web-search {spec}: expected an async function of one text, that returns WebPages")
    return WebSearch(provider)


class WebSearch:
    """Searches for legacy bodies."""

    def __init__(self, provider: Provider | None, time_limit_s: float = _TIME_LIMIT_S) -> None:
        self._provider, self._time_limit_s = provider, time_limit_s

    async def add_results(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """A legacy body with what was found before its last question, and what is said of it in `X-Web-Search`: `off`
        (not asked for), `unavailable` (there is no search here), `failed`, or `done`.

        Where results make the conversation longer than the model's context, the ingress leaves them out (`too-long`).
        """
        turns = body["context"]
        asked = [place for place, turn in enumerate(turns) if turn["type"] in ("Human", "Question")]
        if not body.get("web_search", True) or not asked:
            return body, "off"
        if self._provider is None:
            return body, "unavailable"
        try:
            async with asyncio.timeout(self._time_limit_s):
                pages = await self._provider(turns[asked[-1]]["text"])
            texts = [f"{page.title} ({page.url})\n{page.text[:_MAX_PAGE_CHARS]}" for page in pages[:_MAX_PAGES]]
            # Half of a character, where a page was cut in one, is no text that anything takes.
            shown = [text.encode("utf-8", "replace").decode() for text in texts]
        except Exception as error:  # of whatever the operator gave
            log.warning("a web search failed: %s", type(error).__name__)
            return body, "failed"
        if not shown:
            return body, "done"
        found = {"type": "LinkedWebpages", "text": "\n\n".join(shown)}
        return {**body, "context": [*turns[: asked[-1]], found, *turns[asked[-1] :]]}, "done"
