"""What an exception that Ray raises is about, said as ours.

Ray wraps what a task or an actor raises, in words of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from schemas.failures import EngineUnusable, StorageFailed


@contextmanager
def as_ours(actor_died: str | None = None) -> Iterator[None]:
    """Raise EngineUnusable or StorageFailed for what Ray raises in the block because of one, and others as they are.

    `actor_died`: what it says of an engine when an actor's process has died for good.
    """
    try:
        yield
    except Exception as error:
        failure = _cause_of(error, actor_died)
        if failure is None or failure is error:
            raise
        # Frames of Ray's hold actors, which would live, with their cores, for as long as somebody keeps the error.
        _drop_frames(error)
        raise failure from None


def _drop_frames(error: BaseException) -> None:
    """Forget where an exception, and all that it came of, was raised."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += filter(None, (one.__cause__, one.__context__, getattr(one, "cause", None)))


def _cause_of(error: Exception, actor_died: str | None) -> EngineUnusable | StorageFailed | None:
    """What of ours an exception is about; None where it is about something else."""
    import ray.exceptions

    for cause in _chain(error):
        # Ray also raises a class of its own that derives from ours; that one's text is a traceback.
        if type(cause) is EngineUnusable:
            return cause if cause is error else EngineUnusable(cause.reason)
        if type(cause) is StorageFailed:
            return cause if cause is error else StorageFailed(cause.reason)
        if actor_died is not None and isinstance(cause, ray.exceptions.RayActorError):
            return EngineUnusable(actor_died)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes, Ray's kind of them first."""
    while error is not None:
        yield error
        error = getattr(error, "cause", None) or error.__cause__
