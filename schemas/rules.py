"""What a JSON Schema can't say of a request: one place, for both doors. Each rule has a `reason` of its own."""

from collections.abc import Callable, Iterator
from typing import Any

from schemas.failures import Failure
from schemas.requests import Endpoint

Rule = Callable[[dict[str, Any], Endpoint], Iterator[Failure]]

# Fields that the engine ignores: names that it took once, and likely mistakes. The second is today's name.
RETIRED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "guided_decoding_backend": "",
    "guided_meta": "",
    "structural_tag": "structured_outputs.structural_tag",
    "best_of": "n",
    "use_beamsearch": "use_beam_search",
    "extra_body": "",
}


def _unserved_endpoint(body: dict[str, Any], endpoint: Endpoint) -> Iterator[Failure]:
    if endpoint == "/external/api/inference":
        message = "context: found a legacy chat body; write its turns as the messages of a chat body"
        yield Failure(400, "unsupported_endpoint", message, "context")


def _retired_fields(body: dict[str, Any], endpoint: Endpoint) -> Iterator[Failure]:
    for name in RETIRED.keys() & body.keys():
        if body[name] is None:
            continue
        new = RETIRED[name]
        advice = f"write it as {new}" if new else "leave it out"
        if name == "extra_body":
            advice = "it is a client library's argument; write its fields beside the others"
        yield Failure(400, "retired_field", f"{name}: this field does nothing; {advice}", name)


def _stream_in_batch(body: dict[str, Any], endpoint: Endpoint) -> Iterator[Failure]:
    for field in ("stream", "stream_options"):
        if body.get(field):
            message = f"{field}: found {body[field]!r}; a batch file has nobody to stream to. Leave the field out."
            yield Failure(400, "stream_in_batch", message, field)


BATCH_RULES: tuple[Rule, ...] = (_unserved_endpoint, _retired_fields, _stream_in_batch)


def broken_rule(body: dict[str, Any], endpoint: Endpoint, rules: tuple[Rule, ...] = BATCH_RULES) -> Failure | None:
    """The first rule that a body breaks, if any. `body` has passed the JSON Schema."""
    return next((failure for rule in rules for failure in rule(body, endpoint)), None)
