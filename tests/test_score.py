"""`overnight score` as a user meets it: the demo on the real engine, and one line for each thing that is wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from jobs import score
from tests.conftest import DEMO, ROOT, overnight, read_table, write_lines


@pytest.mark.engine
def test_the_demo_answers_or_explains_every_line(demo):
    assert demo.command.status == 3, demo.command.err
    lines = [number for number, line in enumerate(DEMO.read_bytes().split(b"\n"), start=1) if line.strip()]
    responses, errors = read_table(demo.output, "responses"), read_table(demo.output, "errors")
    answered, failed = responses["source_line"].to_pylist(), errors["source_line"].to_pylist()
    assert sorted(answered + failed) == lines
    assert answered == sorted(answered) and failed == sorted(failed)
    assert len(failed) == 3
    assert set(errors["reason"].to_pylist()) == {"schema", "invalid_json", "unknown_model"}


@pytest.mark.engine
def test_the_demos_texts_read_like_a_models(demo):
    texts = dict(zip(*(read_table(demo.output, "responses")[name].to_pylist() for name in ("id", "text")), strict=True))
    assert texts["tokens-01"][0].startswith(" Paris")
    assert json.loads(texts["extract-01"][0])["city"] == "Seville"
    assert len(texts["beam-01"]) == 3 and " Rome" in texts["beam-01"][0]
    assert texts["seed-01"] == texts["seed-02"] != texts["seed-03"]
    assert texts["stop-01"][0].endswith(" seven")
    assert texts["likelihood-01"] == ["The cat sat on the mat."]
    assert len(texts["list-02"]) == 3


@pytest.mark.engine
def test_the_demos_manifest_equals_its_tables(demo):
    manifest = json.loads((demo.output / "manifest.json").read_text())
    usage = read_table(demo.output, "usage")
    rows = {name: read_table(demo.output, name).num_rows for name in ("responses", "usage", "errors")}
    assert manifest["rows"] == {"input": rows["responses"] + rows["errors"], **rows}
    assert manifest["usage"]["completion_tokens"] == sum(usage["completion_tokens"].to_pylist())
    assert manifest["rows_cut_by_default_max_tokens"] == 2


@pytest.mark.engine
def test_the_demo_says_what_happened_and_nothing_else(demo):
    out, err = demo.command.out, demo.command.err
    assert "56 answered, 3 failed" in out and "2 answers were cut at 16 tokens" in out
    assert all(f"1 {reason}" in out for reason in ("schema", "invalid_json", "unknown_model"))
    assert "duckdb -c" in out
    progress = [line for line in err.splitlines() if not line[:2].isdigit()]
    assert progress == [], "standard error holds lines of progress alone"


@pytest.mark.engine
def test_the_demo_leaves_no_process_behind(demo):
    marks = ("raylet", "gcs_server", "VLLM::", "ray::MapWorker")
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    left = [process for process in psutil.process_iter(["name"]) if any(m in process.info["name"] for m in marks)]
    assert [process for process in left if process.pid not in ours and process.create_time() > START] == []


START = psutil.Process().create_time()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "{}/nowhere.jsonl"], "nowhere.jsonl: no such file or folder. Check --input"),
        (["--input", "{}/empty-folder"], "empty-folder: holds no file that ends in .jsonl"),
        (["--output", "{}/in.jsonl/out"], "in.jsonl/out: can't be written to (not a directory)"),
        (["--output", "/proc/out"], "/proc/out: can't be written to"),
        (["--model", "{}/in.jsonl"], "in.jsonl: is a file, expected a folder"),
        (["--model", "{}/empty-folder"], "empty-folder: not a model folder, it lacks config.json"),
        (["--model", "./no-such-model"], "--model ./no-such-model: no such folder"),
        (["--adapter", "a"], "--adapter a: expected NAME=FOLDER"),
        (
            ["--adapter", "a={}/no-such-folder"],
            "no-such-folder: no such folder. Give a folder with adapter_config.json",
        ),
        (["--adapter", "a={}/empty-folder"], "empty-folder: not an adapter folder, it lacks adapter_config.json"),
        (["--input", ""], "--input: found nothing, expected a path or URI"),
        (["--output", ""], "--output: found nothing, expected a path or URI"),
        (["--model", ""], "--model: found nothing, expected a path or URI"),
        (["--output", "nosuch://bucket/out"], "nosuch://bucket/out: can't be reached"),
        (["--replicas", "many"], "--replicas many: expected a whole number from 1, or auto"),
        (["--engine", "max_seqs=1"], "--engine max_seqs: no such setting"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_status_2(tmp_path, arguments, words):
    (tmp_path / "empty-folder").mkdir()
    write_lines(tmp_path / "in.jsonl", {"prompt": "a"})
    given = [argument.format(tmp_path) for argument in arguments]
    for name, value in (("--input", f"{tmp_path}/in.jsonl"), ("--output", f"{tmp_path}/out")):
        given += [] if name in given else [name, value]
    command = overnight("score", *given)
    assert command.status == 2 and command.out == ""
    said = [line for line in command.err.splitlines() if not line[:2].isdigit()]
    assert len(said) == 1 and said[0].startswith("overnight: ") and words in said[0]
    assert "starting" not in command.err, "before any engine, or Ray, starts"


def test_an_input_on_a_device_that_fails_is_named(tmp_path):
    command = overnight("score", "--input", "/proc/self/mem", "--output", str(tmp_path / "out"))
    assert command.status == 2 and "/proc/self/mem: can't be read (" in command.err


def test_a_cluster_that_does_not_answer_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    arguments = ("--input", str(path), "--output", str(tmp_path / "out"))
    command = overnight("score", *arguments, RAY_ADDRESS="127.0.0.1:1")
    assert command.status == 2, command.err
    assert "overnight: RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there" in command.err


def test_an_engine_that_needs_gpus_does_not_wait_for_one_on_a_machine_without(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    arguments = ("--input", str(path), "--output", str(tmp_path / "out"), "--served-name", "test")
    environment = {"PYTHONPATH": f"{ROOT / 'tests' / 'site'}{os.pathsep}{ROOT}", "TEST_GPU_ENGINE": "1"}
    command = overnight("score", *arguments, **environment, timeout=120)
    assert command.status == 2, command.err
    assert "is the build for GPUs, and Ray finds no GPU on this machine" in command.err


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_a_run_with_its_own_status_and_no_process_left(tmp_path, number, status, word):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    command = [Path(sys.executable).parent / "overnight", "score", "--input", path, "--output", tmp_path / "out"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        said = []
        for line in run.stderr:
            said.append(line)
            if "starting 1 engine" in line:
                children = psutil.Process(run.pid).children(recursive=True)
                run.send_signal(number)
    assert run.returncode == status, said
    assert said[-1] == f"overnight: {word}; what is finished is kept: the same command goes on from there\n"
    assert children and not [child for child in children if child.is_running()]


def test_an_unknown_option_is_wrong_usage():
    command = overnight("score", "--inptu", "x")
    assert command.status == 2 and "--inptu" in command.err and "Traceback" not in command.err


def test_an_empty_input_gives_empty_tables_without_an_engine(tmp_path):
    command = overnight("score", "--input", str(write_lines(tmp_path / "a.jsonl")), "--output", str(tmp_path / "out"))
    assert command.status == 0, command.err
    assert "0: 0 answered, 0 failed" in command.out and "engine" not in command.err
    assert read_table(tmp_path / "out", "responses").num_rows == 0


def test_settings_come_from_flags_else_the_environment_else_the_file(tmp_path, monkeypatch):
    config = tmp_path / "nightly.yaml"
    config.write_text(
        "input: [a.jsonl]\noutput: file\nengine: {max_num_seqs: 8}\nadapter: {a: b}\nkeep-work: true\nreplicas: 3\n"
    )
    seen = []
    monkeypatch.setattr(score, "run", lambda settings, allow_errors, with_report: seen.append(settings) or 0)
    monkeypatch.setattr("pipelines.endings.write_end", lambda *_: None)

    def settings_of(*arguments, **environment):
        result = CliRunner().invoke(score.app, ["--config", str(config), *arguments], env=environment)
        assert result.exit_code == 0, result.output
        return seen[-1]

    from_file = settings_of()
    assert (from_file.inputs, from_file.output, from_file.replicas) == (("a.jsonl",), "file", 3)
    assert from_file.adapters == {"a": "b"}
    assert settings_of(OVERNIGHT_ADAPTER="c=d e=f=g").adapters == {"c": "d", "e": "f=g"}
    assert settings_of(OVERNIGHT_SERVED_NAME="a", OVERNIGHT_SET="n=2 seed=1").fill == {"n": 2, "seed": 1}
    assert seen[-1].served_names == ("a",)
    assert from_file.engine.max_num_seqs == 8 and from_file.keep_work is True
    assert settings_of(OVERNIGHT_OUTPUT="environment", OVERNIGHT_REPLICAS="2").output == "environment"
    assert settings_of(OVERNIGHT_INPUT="b.jsonl c.jsonl").inputs == ("b.jsonl", "c.jsonl")
    assert settings_of("--output", "flag", OVERNIGHT_OUTPUT="environment").output == "flag"


@pytest.mark.parametrize(
    ("text", "words"), [("inptu: x\n", "no option is named 'inptu'"), ("- a\n", "expected"), ("a: [\n", "nightly.yaml")]
)
def test_a_wrong_config_file_is_named(tmp_path, text, words):
    (tmp_path / "nightly.yaml").write_text(text)
    command = overnight("score", "--config", str(tmp_path / "nightly.yaml"), COLUMNS="300")
    assert command.status == 2 and words in command.err and "Traceback" not in command.err


@pytest.mark.parametrize("command", [[sys.executable, "jobs/score.py"], [sys.executable, "-m", "jobs.cli", "score"]])
def test_help_is_light(command):
    before = os.times()
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    after = os.times()
    assert "--input" in done.stdout and "Exit status" in done.stdout
    spent = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    assert spent < 1.0, f"{spent:.2f} s of CPU time"


@pytest.mark.parametrize("verb", ["score", "check", "export", "nightly"])
def test_help_imports_nothing_heavy(verb):
    code = (
        f"import sys; sys.argv = ['{verb}.py', '--help']\n"
        "import runpy\n"
        f"try: runpy.run_path('jobs/{verb}.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('HEAVY', *{'ray', 'torch', 'vllm', 'transformers', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY"
