"""Reading: bytes to lines with their place, and inputs that can't be read."""

import gzip
import os

import pyarrow as pa
import pytest

from pipelines.inputs import InputFile, find_inputs
from pipelines.read import Selection, lines, read_file, read_slice, slices
from schemas.failures import StorageFailed, UsageError


def zstd(data):
    return pa.compress(data, "zstd").to_pybytes()


def lines_of(path, **options):
    file = find_inputs((str(path),))[0]
    return pa.concat_tables(read_file(file, **options)).to_pylist()


def test_lines_carry_physical_numbers_and_byte_offsets(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes("ä\r\n\n   \nb".encode())
    rows = lines_of(path)
    assert [(row["source_line"], row["source_offset"], row["line"]) for row in rows] == [
        (1, 0, "ä".encode()),
        (4, 9, b"b"),
    ]
    assert path.read_bytes()[9:] == b"b"


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert [row["line"] for row in lines_of(path)] == [b"one", b"two"]


def test_only_a_line_feed_ends_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes("a\u2028b\x85\x0b\x0cc\rd\n".encode())
    assert [row["line"] for row in lines_of(path)] == ["a\u2028b\x85\x0b\x0cc\rd".encode()]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl"])
def test_gzip_is_known_by_its_content(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert [row["line"] for row in lines_of(path)] == [b"one", b"two"]


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl"])
def test_zstd_is_known_by_its_content(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(zstd(b"one\n") + zstd(b"two\n"))
    assert [row["line"] for row in lines_of(path)] == [b"one", b"two"]


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_truncated_archive_keeps_its_lines_and_says_where_it_breaks(tmp_path, codec):
    path = tmp_path / "a.jsonl"
    text = b"".join(os.urandom(40).hex().encode() + b"\n" for _ in range(20_000))
    packed = gzip.compress(text) if codec == "gzip" else zstd(text)
    path.write_bytes(packed[:-10])
    *rows, last = lines_of(path)
    assert last["line"] is None
    assert f"a.jsonl: breaks off after line {len(rows)}" in last["message"]
    assert text.startswith(b"\n".join(row["line"] for row in rows))


def test_a_corrupt_archive_is_a_fault_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    packed = bytearray(gzip.compress(b"".join(os.urandom(40).hex().encode() + b"\n" for _ in range(20_000))))
    for place in range(len(packed) // 2, len(packed) // 2 + 100):
        packed[place] ^= 0xFF
    path.write_bytes(packed)
    *_, last = lines_of(path)
    assert last["line"] is None and "a.jsonl.gz: breaks off after line" in last["message"]


def test_blocks_are_bounded(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"0123456789\n" * 100)
    blocks = list(read_file(find_inputs((str(path),))[0], block_bytes=100))
    assert [block.num_rows for block in blocks] == [10] * 10 + [0]


def test_an_empty_file_is_a_file_without_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.touch()
    assert lines_of(path) == []


def test_folders_and_globs_give_their_files_in_order_and_once(tmp_path):
    for name in ("b.jsonl", "a.ndjson", "c.jsonl.gz", "notes.txt", "_SUCCESS.jsonl", ".hidden.jsonl"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.jsonl").write_text("x\n")
    found = find_inputs((str(tmp_path), str(tmp_path / "b.jsonl"), str(tmp_path / "*.txt")))
    assert [os.path.relpath(file.name, tmp_path) for file in found] == [
        "a.ndjson",
        "b.jsonl",
        "c.jsonl.gz",
        "deep/d.jsonl",
        "notes.txt",
    ]
    assert [file.index for file in found] == [0, 1, 2, 3, 4]


def test_folders_behind_links_are_read_and_no_file_twice(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.jsonl").write_text("x\n")
    (tmp_path / "in" / "a.jsonl").write_text("x\n")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "same.jsonl").symlink_to(tmp_path / "in" / "a.jsonl")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    found = find_inputs((f"{tmp_path}/in", f"{tmp_path}/in/../in/a.jsonl", f"file://{tmp_path}/elsewhere"))
    assert [os.path.relpath(file.name, tmp_path) for file in found] == ["in/a.jsonl", "in/link/b.jsonl"]


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*b?.jsonl", "a::b.jsonl", "a#b c.jsonl", "~a.jsonl", "ü.jsonl"])
def test_a_file_with_an_odd_name_is_that_file(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("x\n")
    (tmp_path / "axb1.jsonl").write_text("y\n")
    monkeypatch.chdir(tmp_path)
    for spec in (f"{tmp_path}/{name}", f"./{name}"):
        (file,) = find_inputs((spec,))
        assert [row["line"] for row in pa.concat_tables(read_file(file)).to_pylist()] == [b"x"]


def test_a_name_that_no_table_can_hold_is_refused(tmp_path):
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text("x\n")
    with pytest.raises(UsageError, match=r"the file's name isn't UTF-8"):
        find_inputs((str(tmp_path),))


def test_names_stay_as_the_user_wrote_them(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("x\n")
    monkeypatch.chdir(tmp_path)
    assert find_inputs(("a.jsonl",))[0].name == "a.jsonl"
    assert find_inputs((f"{tmp_path}/a.jsonl",))[0].name == f"{tmp_path}/a.jsonl"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{}/nowhere.jsonl", "no such file or folder"),
        ("{}/*.jsonl", "no file matches"),
        ("{}", "holds no file that ends in .jsonl"),
        ("nosuch://bucket/x", "can't be reached"),
    ],
)
def test_an_input_that_is_not_there_is_named(tmp_path, spec, words):
    spec = spec.format(tmp_path)
    with pytest.raises(UsageError, match="^" + spec.replace("*", r"\*").split("://")[0]) as caught:
        find_inputs((spec,))
    assert words in str(caught.value)


@pytest.mark.parametrize("uri", ["memory://gone.jsonl", "/nowhere/gone.jsonl", "nosuch://bucket/gone.jsonl"])
def test_a_store_that_fails_midway_is_no_fault_of_the_file(uri):
    """What it would have given is neither lost nor answered: the run ends, and goes on when the store does."""
    with pytest.raises(StorageFailed, match=r"gone\.jsonl: can't be re"):
        list(read_file(InputFile(0, "gone.jsonl", uri, 1, "")))


@pytest.mark.parametrize("slice_bytes", [1, 2, 7, 64, 1000])
def test_slices_of_a_file_give_its_lines_with_their_numbers_once(tmp_path, monkeypatch, slice_bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbfone\n\n\r\ntwo\n" + b"x" * 200 + b"\n\nlast")
    whole = lines_of(path)
    file = find_inputs((str(path),))[0]
    pieces = slices(file, slice_bytes)
    assert len(pieces) == -(-file.size_bytes // slice_bytes) or len(pieces) == 1
    rows = [row for piece in pieces for row in pa.concat_tables(read_slice(piece)).to_pylist()]
    assert rows == whole and [row["source_line"] for row in rows] == [1, 4, 5, 7]


def test_a_packed_file_is_one_slice(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b"one\n" * 100))
    assert len(slices(find_inputs((str(path),))[0], slice_bytes=10)) == 1


@pytest.fixture
def two_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{name}{n}\n\n" for n in range(50)))
    return find_inputs((str(tmp_path),))


def taken(dataset):
    return [row["line"].decode() for row in dataset.iter_rows() if row["line"] is not None]


def test_a_limit_takes_the_first_lines(two_files, ray_cluster):
    assert taken(lines(two_files, Selection(limit=3))) == ["a0", "a1", "a2"]
    assert len(taken(lines(two_files, Selection(limit=60)))) == 60
    assert len(taken(lines(two_files, Selection(limit=1000)))) == 100


def test_a_sample_takes_lines_by_chance_from_everywhere_the_same_each_time(two_files, ray_cluster):
    sample = taken(lines(two_files, Selection(sample=20)))
    assert len(sample) == 20 == len(set(sample)) and {line[0] for line in sample} == {"a", "b"}
    assert sorted(taken(lines(two_files, Selection(sample=20)))) == sorted(sample)
    assert len(taken(lines(two_files, Selection(sample=1000)))) == 100
