"""Who may be in an engine together."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Who is in the engine: many together, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        # Those that want to be alone there, or are.
        self._num_alone = 0
        self._is_alone = False

    def enter(self) -> None:
        """Wait while somebody is alone there, or waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_alone)
            self._num_inside += 1

    def leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be there alone for as long as the block lasts. Not for a thread that has entered."""
        with self._changed:
            self._num_alone += 1
            self._changed.wait_for(lambda: not self._num_inside and not self._is_alone)
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._num_alone -= 1
                self._is_alone = False
                self._changed.notify_all()
