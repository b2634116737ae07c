"""Validation: each line becomes a request or a rejection, never both, never neither."""

import pyarrow as pa

from pipelines.checks import Checks
from pipelines.validate import Validator
from schemas import tables


def check_lines(lines, **options):
    return Validator(Checks("batch"), **options)(lines)


def check(*texts, **options):
    rows = [
        {"source_index": 0, "source_file": "f.jsonl", "source_line": 7 + n, "source_offset": n, "line": text}
        for n, text in enumerate(texts)
    ]
    return check_lines(pa.Table.from_pylist(rows, schema=tables.LINES), **options).to_pylist()


def test_an_accepted_line_travels_as_the_text_it_was():
    text = b'  {"prompt":"00123", "seed": 9007199254740993, "temperature": 0.10 , "request_id": "r-1"}'
    (row,) = check(text)
    assert row["request"] == text.decode()
    assert (row["id"], row["endpoint"], row["reason"]) == ("r-1", "/v1/completions", None)


def test_a_line_without_an_id_is_known_by_its_place():
    assert [row["id"] for row in check(b'{"prompt": "a"}', b'{"prompt": "a", "request_id": ""}')] == [
        "f.jsonl:7",
        "f.jsonl:8",
    ]


def test_rejections_name_file_line_and_field_and_keep_the_line():
    bad, worse = check(b'{"prompt": "a", "n": "two", "request_id": "r"}', b"not json")
    assert (bad["id"], bad["stage"], bad["status_code"], bad["param"]) == ("r", "validate", 422, "n")
    assert bad["message"] == 'f.jsonl:7: n: found "two", expected integer'
    assert bad["raw"] == b'{"prompt": "a", "n": "two", "request_id": "r"}' and bad["request"] is None
    assert (worse["id"], worse["reason"], worse["type"]) == ("f.jsonl:8", "invalid_json", "BadRequestError")


def test_an_envelope_gives_its_body_its_id_and_what_stands_beside_them():
    body = b'{"prompt":"x","seed":9007199254740993}'
    (row,) = check(b'{"custom_id":"00123","method":"POST","url":"/v1/completions","body":' + body + b',"tag":1.50}')
    assert (row["id"], row["endpoint"], row["extra"]) == ("00123", "/v1/completions", '{"tag":1.5}')
    assert row["request"] == body.decode() and row["unknown_fields"] == []


def test_fields_that_no_schema_knows_are_counted():
    with_model, without = check(b'{"model":"m","prompt":"a","max_token":5}', b'{"prompt":"a","max_token":5}')
    assert with_model["unknown_fields"] == without["unknown_fields"] == ["max_token"]
    assert with_model["extra"] is None and without["extra"] == '{"max_token":5}'


def test_a_line_whose_shape_is_not_taken_keeps_its_callers_id():
    (row,) = check(b'{"custom_id": "b", "params": {}}')
    assert (row["id"], row["reason"], row["param"]) == ("b", "unsupported_shape", "params")


def test_what_is_kept_of_a_line_is_capped():
    (row,) = check(b'{"prompt": ' + b"9" * 200_000)
    assert len(row["raw"]) == tables.RAW_BYTES


def test_a_fault_of_a_whole_file_has_no_line():
    line = {"source_index": 0, "source_file": "f.gz", "reason": "unreadable_file"}
    line["message"] = "f.gz: breaks off after line 3"
    (row,) = check_lines(pa.Table.from_pylist([line], schema=tables.LINES)).to_pylist()
    assert (row["stage"], row["reason"], row["source_line"]) == ("read", "unreadable_file", None)
    assert (row["id"], row["message"]) == ("f.gz", "f.gz: breaks off after line 3")
