"""The recipes for every night as they stand in the README: cron, systemd, Kubernetes, Airflow."""

import ast
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from jobs import nightly
from jobs.datasets import read_nightly
from tests.conftest import ROOT, overnight, read_published, read_table, write_lines

README = (ROOT / "README.md").read_text()
SECTION = README[README.index("## Every night") : README.index("## Answer online")]
# What cron gives a job, and nothing else.
BARE = {"HOME": str(Path.home()), "LOGNAME": "root", "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}


def fenced(language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture
def installed(tmp_path):
    """A folder like /srv/overnight, whose file has one dataset with one line that is refused: it needs no engine."""
    script = tmp_path / ".venv" / "bin" / "overnight"
    script.parent.mkdir(parents=True)
    # The model is unpacked already, wherever the tests have it.
    cache = f"OVERNIGHT_CACHE={os.environ['OVERNIGHT_CACHE']}" if "OVERNIGHT_CACHE" in os.environ else ""
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} {cache} exec {sys.executable} -m jobs.cli "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "jobs").mkdir()
    dataset = {"name": "a", "input": "in/{yesterday}.jsonl", "output": "out", "allow_errors": True}
    told = {"state": "state", "time_zone": "UTC", "datasets": [dataset]}
    (tmp_path / "jobs" / "nightly.yaml").write_text(yaml.safe_dump(told))
    (tmp_path / "in").mkdir()
    for days in (0, 1):
        write_lines(tmp_path / "in" / f"{date.today() - timedelta(days=days)}.jsonl", "broken")
    return tmp_path


def crontab(folder):
    """The schedule of the README's line, and its command in another folder."""
    (line,) = re.findall(r"^(?:[-*/,0-9]+ ){5}.+$", fenced("crontab"), re.MULTILINE)
    *schedule, command = line.split(" ", 5)
    # cron takes an unescaped % for the end of the line.
    assert "%" not in command
    return " ".join(schedule), command.replace("/srv/overnight", str(folder))


def assert_done(folder):
    summary = json.loads((folder / "state" / "nightly.json").read_text())
    assert summary["status"] == 3 and [one["outcome"] for one in summary["datasets"]] == ["scored"]
    assert read_table(folder / "out", "errors")["reason"].to_pylist() == ["invalid_json"]
    assert "scored" in (folder / "nightly.log").read_text()


def test_crons_line_works_in_crons_bare_environment(installed):
    _, command = crontab(installed)
    done = subprocess.run(["/bin/sh", "-c", command], env=BARE, cwd="/", capture_output=True, text=True, check=False)
    # Everything that is said stands in the log, so that cron has nothing to mail.
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    assert_done(installed)


# A cron of its own: nobody else sees its folders, and it sees no other jobs.
CRON = """
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/spool && mkdir -p /var/spool/cron/crontabs || exit 77
cp "$1" /var/spool/cron/crontabs/root && chmod 600 /var/spool/cron/crontabs/root
exec "$2" -f
"""


@pytest.mark.slow
def test_cron_itself_runs_its_line(installed):
    cron = shutil.which("cron", path=os.environ["PATH"] + ":/usr/sbin")
    if cron is None or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs cron, and root to run one apart")
    (installed / "crontab").write_text("* * * * * " + crontab(installed)[1] + "\n")
    unshare = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "/bin/sh",
        "-c",
        CRON,
        "cron",
        installed / "crontab",
        cron,
    ]
    with subprocess.Popen(unshare, env=BARE) as job:
        try:
            until = time.monotonic() + 180
            while job.poll() is None and time.monotonic() < until:
                time.sleep(0.5)
                path = installed / "state" / "nightly.json"
                if path.exists() and json.loads(path.read_text())["status"] is not None:
                    break
        finally:
            job.terminate()
    if job.returncode == 77:
        pytest.skip("may not mount here")
    assert_done(installed)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_units(installed):
    for text in re.split(r"^# (?=\S+\.(?:service|timer)$)", fenced("ini"), flags=re.MULTILINE)[1:]:
        name, _, unit = text.partition("\n")
        (installed / name).write_text(
            unit.replace("/srv/overnight", str(installed)).replace("User=overnight", "User=root")
        )
    units = [installed / f"overnight-nightly.{kind}" for kind in ("service", "timer")]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "overnight" in line]
    assert done.returncode == 0 and said == [], done.stderr
    assert "SuccessExitStatus=5 6" in units[0].read_text()


def test_the_cronjob_starts_a_rayjob_that_runs_the_night(tmp_path):
    documents = list(yaml.safe_load_all((ROOT / "jobs" / "nightly-cronjob.yaml").read_text()))
    kinds = {one["kind"]: one for one in documents}
    assert set(kinds) == {"ServiceAccount", "Role", "RoleBinding", "ConfigMap", "CronJob"}
    config = kinds["ConfigMap"]["data"]
    (tmp_path / "nightly.yaml").write_text(config["nightly.yaml"])
    told = read_nightly(tmp_path / "nightly.yaml")
    assert told.state.startswith("s3://") and all(one.run.output.startswith("s3://") for one in told.datasets)
    pod = kinds["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][-1] == "/etc/overnight/rayjob.yaml" and kinds["CronJob"]["spec"]["timeZone"]
    assert kinds["Role"]["rules"][0]["verbs"][0] == "create"
    spec = yaml.safe_load(config["rayjob.yaml"])["spec"]
    verb, *arguments = spec["entrypoint"].split()[1:]
    assert verb == "nightly" and arguments == ["--config", "/etc/overnight/nightly.yaml"]
    (head,) = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["volumeMounts"] == [{"name": "config", "mountPath": "/etc/overnight"}]
    pinned = re.search(r"ray\[.*\]==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert spec["rayClusterSpec"]["rayVersion"] == pinned[1]


def test_the_dag_gives_a_command_that_is_taken():
    calls = [node for node in ast.walk(ast.parse(fenced("python"))) if isinstance(node, ast.Call)]
    given = {word.arg: word.value for call in calls for word in call.keywords}
    command = given["bash_command"].value.replace("{{ data_interval_end | ds }}", "2026-10-01")
    assert_taken(command.removeprefix(".venv/bin/"))
    assert given["skip_on_exit_code"].value == 6 and given["max_active_runs"].value == 1


@pytest.mark.parametrize("command", re.findall(r"^\$ (overnight nightly.*)$", SECTION, re.MULTILINE))
def test_its_commands_are_taken(command):
    assert_taken(command)


def assert_taken(command):
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr(nightly, "run", lambda told, night: seen.append((told, night)) or 0)
        patch.chdir(ROOT)
        result = CliRunner().invoke(nightly.app, command.split()[2:])
    assert result.exit_code == 0 and len(seen) == 1, result.output


def test_the_sections_fields_are_those_of_the_file():
    from schemas.nightly import Dataset, Nightly

    # Of these, the options of `score` are made.
    own = {"deadline", "time_zone", "state", "datasets"} | set(Dataset.model_fields) - {"run", "has_report"}
    assert [name for name in own | set(Nightly.model_fields) if f"`{name}" not in SECTION] == []


@pytest.mark.slow
@pytest.mark.engine
def test_three_nights_on_the_real_engine_by_the_readmes_own_line(tmp_path):
    """The file as it stands in jobs/, in a folder of its own."""
    (command,) = re.findall(r"^\$ overnight (nightly.*)$", SECTION, re.MULTILINE)
    arguments = command.replace("jobs/nightly.yaml", str(tmp_path / "nightly.yaml")).split()
    text = (ROOT / "jobs" / "nightly.yaml").read_text().replace("out/nightly", str(tmp_path))
    # The hour of this test is none of the night's.
    (tmp_path / "nightly.yaml").write_text(re.sub("^deadline:.*", "", text, flags=re.MULTILINE))
    tickets = [
        {"request_id": f"{n}", "prompt": f"Ticket {n}: the printer on floor {n} is", "max_tokens": 8} for n in range(8)
    ]
    edited = {**tickets[0], "prompt": "Ticket 0: the printer is gone, and"}
    nights = [tickets[:6], [edited, *tickets[1:8]], [edited, *tickets[1:5]]]
    write_lines(tmp_path / "evals.jsonl", {"prompt": "The capital of France is", "max_tokens": 4})
    (tmp_path / "in").mkdir()
    (tmp_path / "evals.jsonl").rename(tmp_path / "in" / "evals.jsonl")
    told = []
    for number, lines in enumerate(nights, start=1):
        folder = tmp_path / "in" / "tickets" / "2026" / "10" / f"{number:02}"
        folder.mkdir(parents=True)
        write_lines(folder / "a.jsonl", *lines)
        done = overnight(*arguments, "--date", f"2026-10-{number + 1:02}")
        assert done.status == 0, done.err
        told.append(json.loads((tmp_path / "state" / "nightly.json").read_text())["datasets"])
    assert [one[0]["rows"]["asked"] for one in told] == [6, 3, 0]
    assert [one[1]["outcome"] for one in told] == ["scored", "unchanged", "unchanged"]
    changes = [{kind: one[0]["changes"][kind] for kind in ("new", "changed", "gone")} for one in told[1:]]
    assert changes == [{"new": 2, "changed": 1, "gone": 0}, {"new": 0, "changed": 0, "gone": 3}]
    assert told[1][0]["computed_tokens"] < told[0][0]["computed_tokens"]
    assert read_published(Path(tmp_path / "tickets"))["settings"]["labels"]["night"] == "2026-10-04"
