"""How often somebody may ask, over a window that slides: requests of a caller, and attempts to log in.

Counted in this process. The limits library does the counting; memory is bounded by counting into a fixed number of
buckets where those who ask choose their names themselves.
"""

import hashlib
import math
import secrets
import time
from ipaddress import IPv6Address, ip_address

from cachetools import LRUCache
from limits import RateLimitItem, RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

# Names and addresses of strangers are counted in so many buckets each, by a hash that they can't foresee. More than
# can be filled: what a minute of hashing passwords takes is less.
NUM_BUCKETS = 4096
# Names at addresses from which they have logged in; the oldest is forgotten.
_MOST_KNOWN = 4096
# Attempts of one address, by those of one name.
_NAMES_AN_ADDRESS = 3


class Rates:
    """Requests of callers that are known."""

    def __init__(self, num_doors: int) -> None:
        """`num_doors`: how many processes share a caller's requests; each allows its part."""
        self._num_doors = num_doors
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())

    def wait_s(self, name: str, per_minute: int) -> int | None:
        """Count a request. None: it may go on; else the seconds after which the next may. 0 a minute: no limit."""
        if not per_minute:
            return None
        return _hit(self._limiter, _part(per_minute, self._num_doors), name)


class LoginRates:
    """Attempts to log in, right ones and wrong ones, of a user name and of an address.

    Who logs in from an address where he has done so before is counted apart: whoever tries his name from elsewhere
    can't keep him out.
    """

    def __init__(self, per_minute: int, num_doors: int) -> None:
        self._of_name = _part(per_minute, num_doors)
        self._of_address = _part(_NAMES_AN_ADDRESS * per_minute, num_doors)
        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)
        self._key = secrets.token_bytes(16)
        self._known: LRUCache[bytes, None] = LRUCache(_MOST_KNOWN)

    def wait_s(self, name: str, address: str) -> int | None:
        """Count an attempt. None: it may be judged; else the seconds after which the next may."""
        waits = [
            _hit(self._limiter, self._of_address, "address", self._bucket(_network(address))),
            _hit(self._limiter, self._of_name, *self._who(name, address)),
        ]
        return max((wait for wait in waits if wait is not None), default=None)

    def succeeded(self, name: str, address: str) -> None:
        """The attempt was right: the name's count begins anew. The address's doesn't, or one right name would let it
        try as many others as it likes."""
        self._limiter.clear(self._of_name, *self._who(name, address))
        self._known[self._pair(name, address)] = None

    @property
    def num_counted(self) -> int:
        """How many counts are held."""
        return len(self._storage.storage)

    def _who(self, name: str, address: str) -> tuple[str, str]:
        pair = self._pair(name, address)
        return ("known", pair.hex()) if pair in self._known else ("name", self._bucket(name))

    def _pair(self, name: str, address: str) -> bytes:
        return self._hash(f"{name}\0{_network(address)}", 16)

    def _bucket(self, text: str) -> str:
        return str(int.from_bytes(self._hash(text, 8)) % NUM_BUCKETS)

    def _hash(self, text: str, size: int) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size, key=self._key).digest()


def _part(per_minute: int, num_doors: int) -> RateLimitItem:
    return RateLimitItemPerMinute(math.ceil(per_minute / num_doors))


def _hit(limiter: SlidingWindowCounterRateLimiter, item: RateLimitItem, *identifiers: str) -> int | None:
    if limiter.hit(item, *identifiers):
        return None
    return max(1, math.ceil(limiter.get_window_stats(item, *identifiers).reset_time - time.time()))


def _network(address: str) -> str:
    """What one client has of addresses: of IPv6, whoever has one has the 2^64 beside it."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return parsed.packed[:8].hex()
    return address
