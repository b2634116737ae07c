"""Which engine a request goes to: the one that has its session's or its prompt's beginning in its cache, unless that
one is crowded while another is not.

Ray's own router by consistent hashes keeps a key (`session_id` of the handle's call) on one replica, and moves few keys
when replicas come and go. It takes no notice of how much each has to do; this one does.
"""

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

# So many requests more than the least busy engine has may the favourite one have.
DEFAULT_SLACK = 8


class AffinityRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray's classes have no types here
    """Ray's consistent hashes with an eye on crowds. `slack`: requests that the favourite may have more than others."""

    _slack = DEFAULT_SLACK

    def initialize_state(self, **kwargs: Any) -> None:
        self._slack = int(kwargs.pop("slack", DEFAULT_SLACK))
        super().initialize_state(**kwargs)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Groups of replicas to try one after the other; of a group, Ray takes the one with least to do."""
        ranked: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
        has_key = pending_request is not None and pending_request.metadata.session_id
        if len(candidate_replicas) < 2 or not has_key or self._is_crowded(ranked[0][0], candidate_replicas):
            return [candidate_replicas] if candidate_replicas else []
        return [ranked[0], candidate_replicas]

    def _is_crowded(self, favourite: Any, replicas: list[Any]) -> bool:
        busy = {replica.replica_id: self._replica_queue_len_cache.get(replica.replica_id) for replica in replicas}
        known = [number for number in busy.values() if number is not None]
        own = busy[favourite.replica_id]
        return own is not None and own > min(known) + self._slack
