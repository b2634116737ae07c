"""What the README shows is what there is."""

import json
import re
import shlex
from pathlib import Path

import jsonschema_rs
import pytest
import ray
import yaml
from typer.testing import CliRunner

from jobs import score
from jobs.exits import ExitStatus
from pipelines.inputs import SUFFIXES
from tests.conftest import DEMO, ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (.+)$", README, re.MULTILINE)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("overnight score")])
def test_its_commands_are_taken(command, monkeypatch):
    monkeypatch.setattr(score, "run", lambda settings, allow_errors: 0)
    monkeypatch.setattr(score, "forecast", lambda settings: 0)
    result = CliRunner().invoke(score.app, shlex.split(command)[2:])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z-]+)`?", README))))
def test_its_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_its_links_lead_somewhere():
    assert [path for path in re.findall(r"\]\(([^)#:]+)\)", README) if not (ROOT / path).exists()] == []


def test_its_numbers_are_the_demos():
    assert f"the {len(DEMO.read_text().splitlines())} lines of" in " ".join(README.split())
    assert all(suffix in README for suffix in SUFFIXES if "." not in suffix[1:])


def test_the_gate_calls_its_test_command():
    assert "make test" in COMMANDS and "\nmake test\n" in (ROOT / ".ci" / "run").read_text()


def test_every_exit_status_stands_in_it():
    table = README[README.index("| exit status") :]
    assert all(re.search(rf"^\| .*\b{status.value}\b.* \|", table, re.MULTILINE) for status in ExitStatus)


def test_the_cluster_file_is_one_that_ray_takes():
    schema = (Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text()
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    jsonschema_rs.validator_for(json.loads(schema)).validate(config)
    assert config["head_node_type"] in config["available_node_types"]
