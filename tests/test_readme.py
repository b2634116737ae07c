"""What the README shows is what there is."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from jobs import report, score
from jobs.exits import ExitStatus
from pipelines.inputs import SUFFIXES
from tests.conftest import DEMO, ROOT
from tests.published import answered, publish

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (.+)$", README, re.MULTILINE)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("overnight score")])
def test_its_commands_are_taken(command, monkeypatch):
    monkeypatch.setattr(score, "run", lambda settings, allow_errors, with_report: 0)
    monkeypatch.setattr("pipelines.endings.write_end", lambda *_: None)
    monkeypatch.setattr(score, "forecast", lambda settings: 0)
    result = CliRunner().invoke(score.app, shlex.split(command)[2:])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("overnight report")])
def test_its_reports_are_written(command, tmp_path):
    publish(tmp_path / "out", "1", [answered(1, choices=[{"text": "a refund", "finish_reason": "stop"}]), answered(2)])
    words = [str(tmp_path / "out") if word == "out" else word for word in shlex.split(command)[2:]]
    result = CliRunner().invoke(report.app, words)
    assert result.exit_code == 0 and "1 row to read" in result.output, result.output


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z-]+)`?", README))))
def test_its_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_its_links_lead_somewhere():
    assert [path for path in re.findall(r"\]\(([^)#:]+)\)", README) if not (ROOT / path).exists()] == []


def test_the_files_that_it_names_are_there():
    named = set(re.findall(r"`((?:jobs|pipelines|schemas|tests)/[\w/.-]+)`", README))
    assert [path for path in named if not (ROOT / path).exists()] == [] and len(named) > 20


def test_its_numbers_are_the_demos():
    assert f"the {len(DEMO.read_text().splitlines())} lines of" in " ".join(README.split())
    assert all(suffix in README for suffix in SUFFIXES if "." not in suffix[1:])


def test_the_gate_calls_its_test_command():
    assert "make test" in COMMANDS and "\nmake test\n" in (ROOT / ".ci" / "run").read_text()


def test_every_exit_status_stands_in_it():
    table = README[README.index("| exit status") :].split("\n\n", 1)[0]
    assert all(re.search(rf"^\| .*\b{status.value}\b.* \|", table, re.MULTILINE) for status in ExitStatus)
