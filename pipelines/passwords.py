"""Passwords: kept as argon2id hashes. One that nobody has takes as long to judge as one that is wrong."""

import unicodedata

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from schemas.failures import UsageError

MIN_CHARS, MAX_CHARS = 12, 1024
# argon2-cffi's own choice, which follows RFC 9106 for machines with little memory: 64 MiB and three passes.
_HASHER = PasswordHasher()


def hash_password(password: str) -> str:
    """Its hash, with the salt and the parameters. Raises UsageError for one that is too short or too long."""
    if not MIN_CHARS <= len(password) <= MAX_CHARS:
        raise UsageError(
            f"the password has {len(password)} characters, expected {MIN_CHARS} at least and {MAX_CHARS:,} at most"
        )
    return _HASHER.hash(_normal(password))


class Verifier:
    """Judges passwords. Slow by intent: not for an event loop."""

    def __init__(self) -> None:
        # Nobody's password is judged by this hash: one of the same cost.
        self._nobodys = _HASHER.hash("")

    def verify(self, password: str, hashed: str | None) -> bool:
        """Whether the password is that of the hash. None, of a user that there isn't: no, after the same time."""
        try:
            _HASHER.verify(hashed or self._nobodys, _normal(password))
        except (VerificationError, InvalidHashError):
            return False
        return hashed is not None


def _normal(password: str) -> bytes:
    """One form of what keyboards write in several."""
    return unicodedata.normalize("NFC", password).encode("utf-8", "surrogatepass")
