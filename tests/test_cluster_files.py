"""The files that make a cluster: taken by Ray's own validator, by Serve's schema, and of KubeRay's shapes."""

import copy
import json
import shlex

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from jobs import cli, score, serve
from pipelines.storage import Folder
from schemas.settings import make_serve_settings
from tests.conftest import ROOT, read_table, write_lines
from tests.head import started_head

CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
# Fields of ray.io/v1 in KubeRay 1.5, by object.
OF_JOB = {"entrypoint", "backoffLimit", "activeDeadlineSeconds", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"}
OF_CLUSTER = {"rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs"}
OF_AUTOSCALER = {"idleTimeoutSeconds", "upscalingMode", "version", "resources", "image", "env", "envFrom"}
OF_HEAD = {"rayStartParams", "template", "serviceType", "resources", "labels"}
OF_WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "idleTimeoutSeconds"}
OF_CONTAINER = {"name", "image", "env", "envFrom", "ports", "volumeMounts", "resources"}


def test_ray_takes_the_cluster_file():
    config = prepare_config(copy.deepcopy(CLUSTER))
    validate_config(config)
    worker = config["available_node_types"]["worker"]
    assert worker["min_workers"] == 0 and worker["resources"]["GPU"] == 1
    assert worker["max_workers"] == CLUSTER["max_workers"]
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 4}


def test_three_places_of_the_cluster_file_are_marked():
    text = (ROOT / "cluster.yaml").read_text()
    assert [f"{n} of 3" in text for n in (1, 2, 3, 4)] == [True, True, True, False]


@pytest.mark.parametrize(("name", "kind"), [("rayjob", "RayJob"), ("rayservice", "RayService")])
def test_kuberays_manifests_have_its_fields(name, kind):
    made = yaml.safe_load((ROOT / "jobs" / f"{name}.yaml").read_text())
    assert (made["apiVersion"], made["kind"], set(made)) == (
        "ray.io/v1",
        kind,
        {"apiVersion", "kind", "metadata", "spec"},
    )
    spec = made["spec"]
    cluster = spec["rayClusterSpec" if kind == "RayJob" else "rayClusterConfig"]
    assert set(spec) <= (OF_JOB | {"rayClusterSpec"} if kind == "RayJob" else {"serveConfigV2", "rayClusterConfig"})
    assert set(cluster) <= OF_CLUSTER and set(cluster["autoscalerOptions"]) <= OF_AUTOSCALER
    (workers,) = cluster["workerGroupSpecs"]
    assert set(cluster["headGroupSpec"]) <= OF_HEAD and set(workers) <= OF_WORKERS
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group, gpus in ((cluster["headGroupSpec"], None), (workers, "1")):
        (container,) = group["template"]["spec"]["containers"]
        assert set(container) <= OF_CONTAINER
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in group["template"]["spec"].get("volumes", ())}
    assert cluster["rayVersion"] in CLUSTER["docker"]["head_image"]


def test_the_job_of_the_manifest_is_a_command_that_there_is(monkeypatch):
    seen = []
    monkeypatch.setattr(score, "run", lambda settings, allow_errors, **_: seen.append(settings) or 0)
    monkeypatch.setattr("pipelines.endings.write_end", lambda *_: None)
    python, dash_m, module, *arguments = shlex.split(
        yaml.safe_load((ROOT / "jobs" / "rayjob.yaml").read_text())["spec"]["entrypoint"]
    )
    assert (python, dash_m, module) == ("python", "-m", cli.__name__)
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0 and seen[0].output.startswith("s3://"), result.output


def test_serve_takes_the_configuration_in_the_manifest():
    text = yaml.safe_load((ROOT / "jobs" / "rayservice.yaml").read_text())["spec"]["serveConfigV2"]
    (application,) = ServeDeploySchema(**yaml.safe_load(text)).applications
    assert make_serve_settings(application.args).replicas.max_replicas > 1
    assert application.import_path == f"{serve.__name__}:app"


@pytest.mark.slow
def test_workers_of_the_cluster_file_come_from_nothing_when_a_run_asks_for_them(tmp_path):
    """Its shape, with nodes that Ray pretends to start on this machine, and an engine that is said to need GPUs."""
    types = {
        "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
        "worker": {**CLUSTER["available_node_types"]["worker"], "node_config": {}, "max_workers": 2},
    }
    shape = {"max_workers": CLUSTER["max_workers"], "idle_timeout_minutes": CLUSTER["idle_timeout_minutes"]}
    config = {"cluster_name": "overnight", **shape, "head_node_type": "ray.head.default", "available_node_types": types}
    path = write_lines(tmp_path / "a.jsonl", *({"prompt": f"slow:0.2 row {n}"} for n in range(50)))
    environment = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "TEST_GPU_ENGINE": "1"}
    with started_head(autoscaling=config, **environment) as head:
        arguments = ["score", "--input", str(path), "--output", str(tmp_path / "out")]
        done = head.run("overnight", "submit", "--working-dir", ".", *arguments)
        assert done.returncode == 0, done.stdout
        assert "no GPU is there yet" in done.stdout
    usage = read_table(tmp_path / "out", "usage")
    assert usage.num_rows == 50 and len(set(usage["replica"].to_pylist())) >= 1
    assert json.loads(Folder.at(str(tmp_path / "out")).read("manifest.json"))["rows"]["responses"] == 50
