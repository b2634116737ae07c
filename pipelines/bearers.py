"""Bearer tokens: JWT, signed with HS256 and nothing else, by a secret that all ingress replicas share.

A token says whose it is and until when. What its owner may is not in it but in the database, where it can change.
"""

import time
from dataclasses import dataclass
from typing import Any

import jwt

ALGORITHM = "HS256"
# What tells an access token from other tokens that somebody may have signed with the same secret (RFC 9068).
_TYPE = "at+jwt"
_ISSUER = _AUDIENCE = "overnight"
_CLAIMS = ["iss", "aud", "sub", "iat", "exp", "generation"]
# HMAC-SHA256 takes no shorter secret (RFC 7518, 3.2).
MIN_SECRET_BYTES = 32
# Ours have about 300 characters.
_MAX_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Claims:
    """Of a token that is good: whose it is, and of which generation of his tokens."""

    name: str
    generation: int


class Expired(Exception):
    """The token was good once."""


class Forged(Exception):
    """The token isn't one of ours."""


class Bearers:
    """Gives out tokens, and knows them again."""

    def __init__(self, secret: bytes, lifetime_s: int) -> None:
        assert len(secret) >= MIN_SECRET_BYTES
        self._secret, self.lifetime_s = secret, lifetime_s

    def issue(self, name: str, generation: int) -> str:
        now = int(time.time())
        claims = {
            "iss": _ISSUER,
            "aud": _AUDIENCE,
            "sub": name,
            "iat": now,
            "exp": now + self.lifetime_s,
            "generation": generation,
        }
        return jwt.encode(claims, self._secret, ALGORITHM, headers={"typ": _TYPE})

    def read(self, token: str) -> Claims:
        """Whose a token is. Raises Expired and Forged."""
        if len(token) > _MAX_CHARS:
            raise Forged
        try:
            whole: dict[str, Any] = jwt.decode_complete(
                token,
                self._secret,
                algorithms=[ALGORITHM],
                issuer=_ISSUER,
                audience=_AUDIENCE,
                options={"require": _CLAIMS},
            )
        except jwt.ExpiredSignatureError:
            raise Expired from None
        except (jwt.InvalidTokenError, ValueError):
            raise Forged from None
        name, generation = whole["payload"]["sub"], whole["payload"]["generation"]
        if whole["header"].get("typ") != _TYPE or not isinstance(generation, int):
            raise Forged
        return Claims(name, generation)
