"""API keys: random, kept as keyed digests, compared in constant time. Whoever reads the file of keys learns none."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from schemas.failures import UsageError
from schemas.settings import Key

PREFIX = "overnight-"
# A key that somebody made up himself has at least so many characters.
MIN_CHARS = 20


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and the most urgent priority that it may have; lower is earlier.

    `name`: whose requests are counted together, where `requests_per_minute` isn't 0, which means no limit.
    """

    role: str
    most_urgent_priority: int
    name: str = ""
    requests_per_minute: int = 0


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str, salt: bytes | None = None) -> str:
    """The digest of a key: salt and HMAC-SHA256, in hexadecimal digits. The salt is random where none is given."""
    salt = secrets.token_bytes(16) if salt is None else salt
    return f"{salt.hex()}:{hmac.new(salt, key.encode('utf-8', 'surrogatepass'), hashlib.sha256).hexdigest()}"


def own_key(key: str) -> Key:
    """The one key that the environment gave. Raises UsageError when it is too short to be safe."""
    if len(key) < MIN_CHARS:
        raise UsageError(f"OVERNIGHT_API_KEY: found {len(key)} characters, expected {MIN_CHARS} at least")
    return Key(role="default", digest=digest(key))


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a YAML file: a list of `role`, `digest`, `most_urgent_priority` and
    `requests_per_minute`. Raises UsageError."""
    try:
        entries: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # Not what YAML says, which shows lines of the file.
        raise UsageError(f"--keys {path}: it can't be read as YAML ({type(error).__name__})") from None
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"--keys {path}: expected a list of entries, such as --new-key ROLE prints")
    keys = []
    for number, entry in enumerate(entries):
        try:
            keys.append(Key.model_validate(entry))
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            field = ".".join(str(step) for step in first["loc"]) or "the entry"
            raise UsageError(f"--keys {path}: entry {number + 1}, {field}: {first['msg'].lower()}") from None
    return tuple(keys)


class KeyRing:
    """Knows the keys of a file."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = [(key, bytes.fromhex(key.digest.partition(":")[0])) for key in keys]

    def find(self, given: str) -> Caller | None:
        """Whose a key is; None where it is nobody's."""
        # Each is looked at, whichever fits, so that the time tells nothing.
        fitting = [key for key, salt in self._keys if hmac.compare_digest(digest(given, salt), key.digest)]
        if not fitting:
            return None
        key = fitting[0]
        return Caller(key.role, key.most_urgent_priority, f"key:{key.role}", key.requests_per_minute)
