"""What whoever watches the cluster is told of a run's rows."""

import logging
import time
from typing import Any

from pipelines.engine import Engine
from pipelines.meters import EngineMeters, RowMeters
from pipelines.outcomes import place_of
from pipelines.traces import Traces
from schemas.requests import Answered, Failed

log = logging.getLogger("overnight.replica")

# How the engine is, is shown so often.
_SHOW_S = 1.0


class Witness:
    """Tells whoever watches the cluster what becomes of a run's rows: metrics, spans, and the log; never a prompt."""

    def __init__(self, run_id: str, replica: str) -> None:
        self._about = {"run_id": run_id, "replica": replica}
        self._rows, self._engine, self._traces = RowMeters(), EngineMeters(), Traces()
        self._shown_at = 0.0

    def tell(self, outcomes: list[dict[str, Any]], event: Answered | Failed, sent_s: float, attempt: int) -> None:
        """One request's rows are done; `sent_s`: so long ago it was handed to the engine."""
        for row in outcomes:
            # Not the event's: an answer may have turned out to be one that no table can hold.
            why = row.get("reason")
            self._rows.rows.inc(1, {"outcome": why or "answered"})
            if why is not None:
                named = {"row": place_of(row), "row_id": row["id"], "reason": why, "attempt": attempt}
                log.info("row failed", extra={**self._about, **named})
        self._rows.total.observe(sent_s)
        usage = event.usage if isinstance(event, Answered) else {}
        self._rows.tokens.count(usage)
        first = outcomes[0]
        self._traces.record(
            first["endpoint"],
            event.timing if isinstance(event, Answered) else event.failure,
            time.time() - (event.timing.total_ms / 1000 if isinstance(event, Answered) else sent_s),
            usage,
            {
                "overnight.run_id": self._about["run_id"],
                "overnight.row": place_of(first),
                "overnight.row_id": first["id"],
                "overnight.attempt": attempt,
            },
        )

    def show(self, engine: Engine) -> None:
        now = time.monotonic()
        if now - self._shown_at >= _SHOW_S:
            self._shown_at = now
            self._engine.show(engine.state)

    def warn(self, message: str, **named: Any) -> None:
        log.warning(message, extra={**self._about, **named})

    def close(self) -> None:
        self._traces.close()
