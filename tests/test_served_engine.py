"""How an ingress learns whether an engine is up, without Serve."""

import asyncio
import threading
from types import SimpleNamespace

from pipelines.served_engine import RemoteEngine


def _status(num_running: int) -> SimpleNamespace:
    engine = SimpleNamespace(replica_states={"RUNNING": num_running})
    return SimpleNamespace(applications={"app": SimpleNamespace(deployments={"Engine": engine})})


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
