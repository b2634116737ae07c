"""A run over several nodes on this machine, a core each, in a process of its own; nodes may go and come meanwhile."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

from tests.conftest import ROOT, Silence
from tests.deterministic import Starts

Event = Literal["kill", "join"]


def run_on_nodes(path: Path, output: Path, num_nodes: int, *then: Event, **settings: Any) -> dict[str, Any]:
    """The summary's numbers of a run with the deterministic engine.

    `then`: what happens once something is staged: the last node is killed, one joins. `settings`: the engine's, and
    `meeting`, so many engines that have to be up before one answers.
    """
    told = {"path": str(path), "output": str(output), "num_nodes": num_nodes, "then": then, **settings}
    command = [sys.executable, "-m", "tests.nodes", "host", json.dumps(told)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def drive(path: str, output: str, meeting: int = 1, **engine: Any) -> dict[str, Any]:
    """The run, on the cluster that the environment names."""
    from pipelines import batch
    from schemas.settings import EngineSettings, RunSettings

    meet = Path(output).parent / "meeting"
    meet.mkdir()
    engine = {"cores": 1, "max_num_seqs": 64, **engine}
    settings = RunSettings(inputs=(path,), output=output, served_names=("test",), engine=EngineSettings(**engine))
    summary = batch.run(settings, Silence(), Starts(meeting=(str(meet), meeting)))
    return {"replicas": summary.num_replicas, "answered": summary.totals.num_answered}


def host(output: str, num_nodes: int, then: list[Event], **told: Any) -> dict[str, Any]:
    """The nodes, and what happens to them. A process of its own: Ray starts nodes in a main thread alone."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(num_nodes - 1)]
    command = [sys.executable, "-m", "tests.nodes", "drive", json.dumps({"output": output, **told})]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run:
        while not list(Path(output).glob("_work/*/staged/*/*")) and run.poll() is None:
            time.sleep(0.05)
        for event in then:
            if event == "kill":
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            else:
                nodes.append(cluster.add_node(num_cpus=1))
        said = run.communicate()[0]
    cluster.shutdown()
    assert run.returncode == 0
    return json.loads(said.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps({"host": host, "drive": drive}[sys.argv[1]](**json.loads(sys.argv[2]))))
