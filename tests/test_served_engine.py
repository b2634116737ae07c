"""How an ingress learns whether an engine is up, without Serve."""

import asyncio
import threading
from types import SimpleNamespace

from pipelines import served_engine
from pipelines.served_engine import RemoteEngine
from schemas.requests import RunShare


def _status(num_running: int) -> SimpleNamespace:
    engine = SimpleNamespace(replica_states={"RUNNING": num_running})
    return SimpleNamespace(applications={"app": SimpleNamespace(deployments={"Engine": engine})})


def test_runs_have_equal_parts_of_a_replica_and_none_keeps_another_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(served_engine.time, "monotonic", lambda: now[0])
    runs = served_engine._Runs(8, 0)
    a, b = RunShare("a"), RunShare("b")

    def num_let_in(share: RunShare, number: int) -> int:
        return sum(runs.enter(share) is not None for _ in range(number))

    assert num_let_in(a, 9) == 8
    # Another one comes: the first has no more than half from now on, and gives it up as its requests end.
    assert num_let_in(b, 1) == 1 and num_let_in(a, 1) == 0
    for _ in range(5):
        runs.left(a)
    assert num_let_in(a, 2) == 1 and num_let_in(b, 4) == 3
    # And has all again once the other one is gone.
    for _ in range(4):
        runs.left(b)
    now[0] += 30
    assert num_let_in(a, 5) == 4


def test_a_run_is_as_urgent_as_the_operator_allows():
    runs = served_engine._Runs(8, 3)
    assert [runs.enter(RunShare("a", urgency=urgency)).urgency for urgency in (0, 2, 50)] == [0, 2, 3]


def test_an_older_look_doesnt_take_back_what_a_later_one_saw(monkeypatch):
    """Serve's answer to the first look is from before the engine came up, and comes late."""
    looks, may_answer = iter((0, 1)), threading.Event()

    def status() -> SimpleNamespace:
        if (number := next(looks, 1)) == 0:
            may_answer.wait(10)
        return _status(number)

    monkeypatch.setattr("ray.serve.status", status)

    async def look() -> list[bool]:
        remote, seen = RemoteEngine(None, "app"), []
        looking = asyncio.create_task(remote.keep_looking())
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_later(0.3, may_answer.set)
        for _ in range(20):
            seen.append(await remote.is_ready())
            await asyncio.sleep(0.02)
        looking.cancel()
        return seen

    seen = asyncio.run(look())
    assert seen == sorted(seen) and seen[-1]
