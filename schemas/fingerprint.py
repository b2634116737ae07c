"""One fingerprint of a request: equal where the answer must be. Deduplication, resume and nightly runs use it alike.

It is made of the canonical body without what can't change the answer, the endpoint, and an identity of what answers:
the model's (or adapter's) files and the engine settings that reach an answer.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from schemas.requests import Endpoint

# Who asks, when, and how the answer travels; and the model's name, for which its identity stands.
_SILENT = frozenset(
    {"model", "request_id", "user", "session_id", "priority", "stream", "stream_options", "stream_interval"}
)


def fingerprint(body: Mapping[str, Any], endpoint: Endpoint, identity: str) -> str:
    """32 hexadecimal digits for a body that was parsed strictly.

    A field that is null is as good as absent: no field of the schemas means something by it. `identity`: what answers.
    """
    said = {name: value for name, value in body.items() if name not in _SILENT and value is not None}
    canonical = json.dumps([endpoint, identity, said], ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def is_deterministic(body: Mapping[str, Any]) -> bool:
    """Whether the same body, sent twice, asks for the same answer: greedy, a beam search, or drawn by a given seed."""
    return body.get("temperature") == 0 or body.get("seed") is not None or bool(body.get("use_beam_search"))
