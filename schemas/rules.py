"""What a JSON Schema can't say of a request: one place, for both doors. Each rule has a `reason` of its own."""

from collections.abc import Callable, Iterator
from typing import Any

from schemas.failures import Failure

Rule = Callable[[dict[str, Any]], Iterator[Failure]]


def _stream_in_batch(body: dict[str, Any]) -> Iterator[Failure]:
    for field in ("stream", "stream_options"):
        if body.get(field):
            message = f"{field}: found {body[field]!r}; a batch file has nobody to stream to. Leave the field out."
            yield Failure(400, "stream_in_batch", message, field)


BATCH_RULES: tuple[Rule, ...] = (_stream_in_batch,)


def broken_rule(body: dict[str, Any], rules: tuple[Rule, ...] = BATCH_RULES) -> Failure | None:
    """The first rule that a body breaks, if any. `body` has passed the JSON Schema."""
    return next((failure for rule in rules for failure in rule(body)), None)
