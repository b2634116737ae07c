"""Object stores: the batch door against a real S3 protocol, and against one that throttles, breaks off and refuses."""

import json

import pytest
import s3fs

from pipelines import write
from pipelines.inputs import find_inputs
from pipelines.lease import Lease
from pipelines.model import resolve
from pipelines.storage import Folder
from schemas.failures import EngineUnusable, StorageFailed, UsageError
from tests.deterministic import Starts
from tests.s3 import Fault

NONE = Starts(error="must not start")
NUM_ROWS = 60


@pytest.fixture
def bucket(s3_server, request):
    """A bucket of this test's own."""
    name = f"b{abs(hash(request.node.name)):x}"
    fs = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    fs.mkdir(name)
    return f"s3://{name}", fs


@pytest.fixture
def lines(bucket):
    """The URI of a JSONL file of NUM_ROWS requests and a broken line."""
    uri, fs = bucket
    rows = [json.dumps({"prompt": f"row {n}", "request_id": f"{n}"}) for n in range(NUM_ROWS)]
    fs.pipe_file(f"{uri}/in/a.jsonl", "\n".join([*rows, "broken"]).encode())
    return f"{uri}/in/a.jsonl"


def assert_whole(run):
    assert run.table("responses")["id"].to_pylist() == [f"{n}" for n in range(NUM_ROWS)]
    assert run.table("errors")["reason"].to_pylist() == ["invalid_json"]


def test_a_run_reads_from_a_bucket_and_publishes_into_one(bucket, lines, score):
    uri, fs = bucket
    run = score(f"{uri}/in", output=f"{uri}/out")
    assert_whole(run)
    assert run.table("responses")["source_file"][0].as_py() == lines
    run_folder = f"{uri}/out/runs/{run.summary.run_id}"
    assert fs.exists(f"{run_folder}/_SUCCESS") and not fs.exists(f"{uri}/out/_work")
    (told,) = run.manifest["inputs"]
    assert told["name"] == lines and told["version"] == fs.info(lines)["ETag"]
    for file in run.manifest["files"]:
        assert fs.info(f"{run_folder}/{file['path']}")["size"] == file["bytes"]
    assert score(f"{uri}/in", output=f"{uri}/out", start=NONE).summary.is_repeat
    fs.pipe_file(lines, fs.cat_file(lines) + b"\n{}")
    with pytest.raises(UsageError, match=r"a\.jsonl has changed.*--restart"):
        score(f"{uri}/in", output=f"{uri}/out", start=NONE)


@pytest.mark.slow
def test_a_run_into_a_bucket_goes_on_where_it_was_broken_off(bucket, lines, score):
    output = f"{bucket[0]}/out"
    with pytest.raises(EngineUnusable):
        score(lines, output=output, start=Starts(dies_after=20))
    run = score(lines, output=output)
    assert_whole(run)
    assert 0 < run.manifest["computed"]["rows"] < NUM_ROWS


def test_a_name_is_written_once_and_a_lease_is_held_by_one(bucket):
    folder = Folder.at(f"{bucket[0]}/once")
    assert folder.create_once(b"a", "name") and not folder.create_once(b"b", "name")
    # Past what the look before it would see.
    with pytest.raises(FileExistsError):
        bucket[1].pipe_file(f"{bucket[0]}/once/name", b"c", mode="create")
    with Lease(folder) as held, pytest.raises(UsageError, match="another run writes there"), Lease(folder):
        held.check()
    with Lease(folder):
        pass


def test_a_lease_whose_answer_was_lost_is_held_all_the_same(bucket, s3_server):
    # The first try arrives; what is sent again finds its own file there.
    with s3_server.having(Fault("cut", "PUT .*lease.json", times=1)), Lease(Folder.at(f"{bucket[0]}/out")) as lease:
        lease.check()


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(
            [Fault("throttle", one, times=3, after=after) for after in range(3) for one in ("GET", "PUT", "HEAD")],
            id="throttled",
        ),
        pytest.param(
            [Fault("drop", one, times=2) for one in ("PUT .*staged", "GET .*spool", "GET .*in/a")],
            id="dropped",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [Fault("cut", "GET .*in/a.jsonl", times=2, after=1), Fault("cut", "GET .*staged.*parquet", times=1)],
            id="cut",
            marks=pytest.mark.slow,
        ),
        pytest.param([Fault("slow", "out", times=20, seconds=0.3)], id="slow", marks=pytest.mark.slow),
    ],
)
def test_a_store_with_passing_faults_costs_no_row(bucket, lines, score, s3_server, faults):
    with s3_server.having(*faults):
        run = score(lines, output=f"{bucket[0]}/out")
    assert_whole(run)


def test_what_may_not_be_written_to_is_found_before_the_model_is(bucket, lines, score, s3_server):
    with (
        s3_server.having(Fault("deny", "PUT .*out")),
        pytest.raises(UsageError, match=r"s3://b\w+/out: can't be written to \(Access Denied\).*Give an --output"),
    ):
        score(lines, output=f"{bucket[0]}/out", start=NONE, model="no-such-model")


def test_a_bucket_that_is_not_there_is_named(lines, score):
    with pytest.raises(UsageError, match="s3://nowhere-at-all/out: can't be written to"):
        score(lines, output="s3://nowhere-at-all/out", start=NONE)
    with pytest.raises(UsageError, match="s3://nowhere-at-all/in: no such file or folder"):
        score("s3://nowhere-at-all/in", start=NONE)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("PUT .*spool", id="planning", marks=pytest.mark.slow),
        pytest.param("PUT .*staged", id="answering"),
        pytest.param("PUT .*runs/.*responses", id="publishing", marks=pytest.mark.slow),
    ],
)
def test_a_credential_revoked_in_mid_run_ends_it_with_the_stores_words(bucket, lines, score, s3_server, pattern):
    output = f"{bucket[0]}/out"
    with (
        s3_server.having(Fault("deny", pattern)),
        pytest.raises(StorageFailed, match=r"s3://b\w+/out/\S+: can't be written \(Access Denied\)"),
    ):
        score(lines, output=output)
    assert write.read_manifest(Folder.at(output)) is None
    assert_whole(score(lines, output=output))


def test_an_input_that_a_store_gives_only_half_of_ends_the_run_which_then_goes_on(bucket, lines, score, s3_server):
    output = f"{bucket[0]}/out"
    with (
        s3_server.having(Fault("deny", "GET .*in/a.jsonl", after=1)),
        pytest.raises(StorageFailed, match=r"in/a\.jsonl: can't be read beyond line \d+ \(Access Denied\)$"),
    ):
        score(lines, output=output)
    assert write.read_manifest(Folder.at(output)) is None
    assert_whole(score(lines, output=output))


def test_a_folder_that_a_console_made_is_an_empty_one(bucket):
    uri, fs = bucket
    fs.pipe_file(f"{uri}/made/", b"")
    assert Folder.at(f"{uri}/made").names() == []
    fs.pipe_file(f"{uri}/made/a", b"a")
    assert Folder.at(f"{uri}/made").names() == ["a"]


def test_a_model_is_mirrored_from_a_bucket_again_when_it_changes(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("OVERNIGHT_CACHE", str(tmp_path))
    uri, fs = bucket
    for name, data in {"config.json": b"{}", "model.safetensors": b"w" * 100, "tokenizer.json": b"{}"}.items():
        fs.pipe_file(f"{uri}/models/tiny/{name}", data)
    first = resolve(f"{uri}/models/tiny")
    assert first.name == "tiny" and resolve(f"{uri}/models/tiny").path == first.path
    fs.pipe_file(f"{uri}/models/tiny/model.safetensors", b"v" * 100)
    assert resolve(f"{uri}/models/tiny").path != first.path
    with pytest.raises(UsageError, match="no such folder"):
        resolve(f"{uri}/models/none")


def test_inputs_of_a_bucket_are_found_by_glob(bucket, lines):
    uri, fs = bucket
    fs.pipe_file(f"{uri}/in/b.jsonl", b"{}")
    assert [file.name for file in find_inputs((f"{uri}/in/*.jsonl",))] == [lines, f"{uri}/in/b.jsonl"]
