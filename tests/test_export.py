"""The verb export: a run as the output and error files of OpenAI's Batch API, each body byte for byte."""

import json
import re
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from pipelines import batch, export, write
from pipelines.storage import Folder
from schemas import tables
from schemas.errors import FailureResponse
from schemas.failures import UsageError
from schemas.settings import RunSettings
from tests.conftest import Run, Silence, overnight, write_lines
from tests.deterministic import Starts

BIG = 2**63 - 1
ENVELOPE = {"method": "POST", "url": "/v1/completions"}
LINES = [
    {
        "custom_id": "first ü \u2028",
        **ENVELOPE,
        "body": {"prompt": "a b", "seed": BIG, "temperature": 0.30000000000000004},
    },
    {"prompt": "no id of its own"},
    {"custom_id": "asks", **ENVELOPE, "body": {"prompt": "please fail"}},
    {"custom_id": "breaks", **ENVELOPE, "body": {"prompt": "c", "n": "two"}},
    "broken",
    {"custom_id": "other", **ENVELOPE, "body": {"prompt": "c", "model": "another"}},
    {"request_id": "007", "prompt": "nan"},
    {"request_id": "008", "prompt": "last"},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory, ray_cluster):
    """One run over LINES, and a file that holds one array over its lines."""
    folder = tmp_path_factory.mktemp("export")
    inputs = (str(write_lines(folder / "a.jsonl", *LINES)), str(write_lines(folder / "b.jsonl", "[", "]")))
    settings = RunSettings(inputs=inputs, output=str(folder / "out"), served_names=("test",))
    show = Silence()
    return Run(folder / "out", batch.run(settings, show, Starts()), show)


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """The two files of the run, as lines of bytes."""
    folder = tmp_path_factory.mktemp("exported")
    export.export(str(run.output), None, str(folder))
    return read_lines(folder)


def read_lines(folder):
    files = [(folder / name).read_bytes() for name in (export.OUTPUT, export.ERRORS)]
    assert all(data == b"" or data.endswith(b"\n") for data in files)
    return [data.split(b"\n")[:-1] for data in files]


def publish(output, run_id, responses=(), errors=()):
    """A run of such rows, without an engine."""
    files = []
    for name, rows in (("responses", responses), ("usage", ()), ("errors", errors)):
        with write.TableWriter(Folder.at(str(output)).join("runs", run_id), name, tables.PUBLISHED[name]) as writer:
            for row in rows:
                writer.write(pa.Table.from_pylist([row], schema=tables.PUBLISHED[name]))
        files += writer.files
    manifest = {"version": tables.VERSION, "run_id": run_id, "files": files}
    write.publish_manifest(Folder.at(str(output)), run_id, manifest)


def answer(line, body):
    row = {"id": f"row {line}", "source_file": "f", "source_line": line, "source_offset": 0, "request": "{}"}
    row |= {"endpoint": "/v1/completions", "model": "m", "text": ["t"], "finish_reason": ["stop"]}
    return {**row, "response": body, "created": datetime.now(UTC)}


def test_a_response_is_a_line_that_holds_its_body_as_it_is_stored(run, exported):
    rows, lines = run.table("responses").to_pylist(), exported[0]
    assert [row["source_line"] for row in rows] == [1, 2, 8]
    for row, line in zip(rows, lines, strict=True):
        value = json.loads(line)
        assert list(value) == ["id", "custom_id", "response", "error"] and value["error"] is None
        assert list(value["response"]) == ["status_code", "request_id", "body"]
        assert value["response"]["status_code"] == 200 and value["response"]["request_id"].startswith("req_")
        assert value["response"]["body"] == json.loads(row["response"])
        assert f'"body": {row["response"]}}}, "error": null}}'.encode() in line
    received = json.loads(json.loads(lines[0])["response"]["body"]["received"])
    assert (received["seed"], received["temperature"]) == (BIG, 0.30000000000000004)


def test_the_custom_id_is_the_callers_or_else_the_place(run, exported):
    assert [json.loads(line)["custom_id"] for line in exported[0]] == [
        "first ü \u2028",
        f"{run.output.parent}/a.jsonl:2",
        "008",
    ]
    assert [json.loads(line)["custom_id"] for line in exported[1]] == [
        "asks",
        "breaks",
        f"{run.output.parent}/a.jsonl:5",
        "other",
        "007",
        f"{run.output.parent}/b.jsonl",
    ]


def test_a_failed_request_carries_the_status_and_body_that_the_api_gives(run, exported):
    rows = run.table("errors").to_pylist()
    requests = [(row, json.loads(line)) for row, line in zip(rows, exported[1], strict=True) if row["source_line"]]
    assert [(row["reason"], value["response"]["status_code"]) for row, value in requests] == [
        ("asked_to_fail", 400),
        ("schema", 422),
        ("invalid_json", 400),
        ("unknown_model", 404),
        ("unusable_answer", 500),
    ]
    for row, value in requests:
        assert list(value) == ["id", "custom_id", "response", "error"] and value["error"] is None
        body = FailureResponse.model_validate(value["response"]["body"])
        assert body.status_code == body.error.code == row["status_code"] == value["response"]["status_code"]
        told = (body.error.message, body.error.type, body.error.param, body.error.reason)
        assert told == (row["message"], row["type"], row["param"], row["reason"])
        assert bool(body.detail) == (row["status_code"] == 422)


def test_the_fault_of_a_whole_file_was_no_request_and_has_no_response(run, exported):
    places = run.table("errors")["source_line"].to_pylist()
    (value,) = [json.loads(line) for place, line in zip(places, exported[1], strict=True) if place is None]
    assert value["response"] is None and value["error"]["code"] == "not_jsonl"
    assert "b.jsonl" in value["error"]["message"]


def test_the_same_run_gives_the_same_bytes_and_each_line_an_id_of_its_own(run, exported, tmp_path):
    export.export(str(run.output), run.summary.run_id, str(tmp_path))
    assert read_lines(tmp_path) == exported
    ids = [json.loads(line)["id"] for lines in exported for line in lines]
    assert len(set(ids)) == len(ids) == len(LINES) + 1
    assert all(re.fullmatch(r"batch_req_[0-9a-f]{32}", text) for text in ids)


def test_the_lines_are_what_the_openai_clients_types_take(exported):
    from openai.types import Completion

    for line in exported[0]:
        body = json.loads(line)["response"]["body"]
        # The deterministic engine leaves this one out.
        completion = Completion.model_validate({"object": "text_completion", **body})
        assert completion.choices[0].text and completion.usage.total_tokens


def test_several_faults_of_one_file_are_told_apart():
    fault = {"id": "f", "source_file": "f", "source_line": None, "reason": "unreadable_file"}
    lines = {export.error_line({**fault, "message": f"f: breaks off after line {n}"}) for n in (1, 2)}
    assert len({json.loads(line)["id"] for line in lines}) == 2


@pytest.mark.parametrize(
    "body",
    [
        '{"n":12345678901234567890123,"x":1.50,"y":-0.0,"z":1E+5,"tiny":5e-324}',
        '{"x":0.1000000000000000055511151231257827,"a":"\\u00e9 \\ud800 \\/","a":"twice"}',
        '{ "spaces" : [ 1 , 2 ] }',
    ],
)
def test_no_byte_of_a_body_changes(tmp_path, body):
    publish(tmp_path / "out", "1", [answer(1, body)])
    export.export(str(tmp_path / "out"), None, str(tmp_path / "x"))
    (line,) = read_lines(tmp_path / "x")[0]
    assert line.partition(b'"body": ')[2] == f'{body}}}, "error": null}}'.encode()


def test_rows_of_many_files_and_batches_come_in_the_published_order(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "ROW_GROUP_BYTES", 2_000)
    monkeypatch.setattr(write, "PART_BYTES", 10_000)
    publish(tmp_path / "out", "1", [answer(n, json.dumps({"n": n})) for n in range(1, 301)])
    assert len(list((tmp_path / "out/runs/1/responses").iterdir())) > 2
    done = export.export(str(tmp_path / "out"), None, str(tmp_path / "x"))
    bodies = [json.loads(line)["response"]["body"] for line in read_lines(tmp_path / "x")[0]]
    assert bodies == [{"n": n} for n in range(1, 301)]
    assert done.num_lines == {f"{tmp_path}/x/output.jsonl": 300, f"{tmp_path}/x/errors.jsonl": 0}


def test_the_current_run_is_taken_or_the_one_that_is_named(tmp_path):
    for number in (1, 2):
        publish(tmp_path / "out", f"run-{number}", [answer(number, "{}")])
    for run_id, line in ((None, 2), ("run-2", 2), ("run-1", 1)):
        assert export.export(str(tmp_path / "out"), run_id, str(tmp_path / "x")).run_id == f"run-{line}"
        (text,) = read_lines(tmp_path / "x")[0]
        assert json.loads(text)["custom_id"] == f"row {line}"


def test_a_run_without_rows_gives_two_empty_files(tmp_path, score):
    run = score(write_lines(tmp_path / "a.jsonl"), start=Starts(error="must not start"))
    export.export(str(run.output), None, str(tmp_path / "x"))
    assert read_lines(tmp_path / "x") == [[], []]


def test_a_store_is_read_and_written_like_a_folder(run, exported):
    store = Folder.at("memory://export")
    for path in run.output.rglob("*"):
        if path.is_file():
            store.write(path.read_bytes(), "out", str(path.relative_to(run.output)))
    export.export("memory://export/out", None, "memory://export/x")
    assert [store.read("x", name).split(b"\n")[:-1] for name in (export.OUTPUT, export.ERRORS)] == exported


def spoil(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda part: part.unlink(), "part-00000.parquet: no such file. Restore the run's folder"),
        (lambda part: part.write_bytes(part.read_bytes()[:-9]), "part-00000.parquet: isn't the file that the run"),
        (spoil, "part-00000.parquet: isn't the file that the run published (its checksum differs). Restore"),
        (lambda part: part.unlink() or part.mkdir(), "part-00000.parquet: can't be read (is a directory)"),
    ],
)
@pytest.mark.parametrize("table", ["responses", "errors"])
def test_a_table_that_is_not_what_was_published_is_named_and_nothing_is_written(tmp_path, table, harm, words):
    publish(tmp_path / "out", "1", [answer(1, "{}")])
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "output.jsonl").write_text("of before")
    harm(tmp_path / "out" / "runs" / "1" / table / "part-00000.parquet")
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}/out/runs/1/{table}/{words}")):
        export.export(str(tmp_path / "out"), None, str(tmp_path / "x"))
    assert [(path.name, path.read_text()) for path in (tmp_path / "x").iterdir()] == [("output.jsonl", "of before")]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"text"', "{}", '{"run_id": "1", "version": "1", "files": [{"path": "a"}]}', "\xff"]
)
def test_a_manifest_that_is_none_is_named(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"manifest\.json: isn't the manifest of a run\. Give --from"):
        export.export(str(tmp_path), None, str(tmp_path / "x"))


def test_tables_of_another_version_are_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"run_id": "1", "version": "99", "files": []}')
    with pytest.raises(UsageError, match=f"found tables of version 99, expected {tables.VERSION}"):
        export.export(str(tmp_path), None, str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("source", "run_id", "target", "words"),
    [
        ("nowhere", None, "x", "nowhere/manifest.json: no such file. Give --from the folder or URI that"),
        ("file", None, "x", "file/manifest.json: can't be read (not a directory). Give --from"),
        ("out/runs/1", None, "x", "out/runs/1: is the folder of one run. Give --from the folder above its `runs`"),
        ("nosuch://bucket/out", None, "x", "nosuch://bucket/out: can't be reached"),
        ("out", "2", "x", "out/runs/2/manifest.json: no such file. Give --run the name of a folder below"),
        ("out", "../runs/1", "x", "--run ../runs/1: there is no such run. Give --run the name of a folder below"),
        ("out", None, "file", "file: can't be written to (file exists). Give an --output folder that can"),
        ("out", None, "file/x", "file/x: can't be written to (not a directory). Give an --output folder that can"),
        ("out", None, "taken", "taken: can't be written to (is a directory). Give an --output folder that can"),
        ("out", None, "out", "out: lies within "),
        ("out", None, "out/runs/1", "out/runs/1: lies within "),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(tmp_path, source, run_id, target, words):
    publish(tmp_path / "out", "1", [answer(1, "{}")])
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "output.jsonl").mkdir(parents=True)
    source = source if "://" in source else f"{tmp_path}/{source}"
    with pytest.raises(UsageError, match=re.escape(words)) as raised:
        export.export(source, run_id, f"{tmp_path}/{target}")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "x").exists() and not (tmp_path / "out" / "output.jsonl").exists()


def test_a_place_that_fills_up_is_named_and_holds_no_half_file(tmp_path, monkeypatch):
    publish(tmp_path / "out", "1", [answer(1, "{}")])

    def fill_up(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "_write", fill_up)
    with pytest.raises(UsageError, match=r"x: can't be written to \(no space left on device\)"):
        export.export(str(tmp_path / "out"), None, str(tmp_path / "x"))
    assert list((tmp_path / "x").iterdir()) == []


def test_the_command_says_how_many_lines_are_in_which_file(tmp_path):
    publish(tmp_path / "out", "1", [answer(1, "{}")])
    told = overnight("export", "--from", str(tmp_path / "out"), "--output", str(tmp_path / "x"))
    assert told.status == 0 and told.err == ""
    assert told.out == f"run 1\n{tmp_path}/x/output.jsonl: 1 line\n{tmp_path}/x/errors.jsonl: 0 lines\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", ""], "--from: found nothing, expected a path or URI. Is a variable unset?"),
        (["--output", ""], "--output: found nothing, expected a path or URI. Is a variable unset?"),
        (["--run", ""], "--run: found nothing, expected the id of a run. Is a variable unset?"),
        (["--from", "/nowhere"], "/nowhere/manifest.json: no such file"),
    ],
)
def test_wrong_usage_is_one_line_with_status_2(tmp_path, arguments, words):
    given = [*arguments]
    for flag in ("--from", "--output"):
        given += [] if flag in given else [flag, str(tmp_path / "x")]
    told = overnight("export", *given)
    assert told.status == 2 and told.out == ""
    assert told.err.startswith("overnight: ") and told.err.count("\n") == 1 and words in told.err
