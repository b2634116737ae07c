"""The verb check: everything that a run asks of a line, without an engine."""

import json

import pyarrow.parquet as pq
import pytest

from jobs.options import parse_fill
from pipelines import check
from schemas.failures import UsageError
from schemas.settings import InputSettings
from tests.conftest import Silence, overnight, write_lines

GOOD = {"prompt": "one two three", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def checked(tmp_path, ray_cluster):
    def run(*lines, **settings):
        path = write_lines(tmp_path / "in.jsonl", *lines)
        return check.check(InputSettings(inputs=(str(path),), **settings), Silence())

    return run


def test_a_check_counts_what_a_run_would_take(checked):
    report = checked(GOOD, {"prompt": [1] * 10}, CHAT, {"prompt": ""}, "not json", {**GOOD, "odd": 1, "model": None})
    assert (report.num_rows, report.num_accepted, report.num_rejected) == (6, 4, 2)
    assert report.endpoints == {"/v1/completions": 3, "/v1/chat/completions": 1}
    assert report.reasons == {"empty_prompt": 1, "invalid_json": 1} and report.unknown_fields == {"odd": 1}
    assert report.longest_prompt > 10 and report.prompt_tokens == 3 + 10 + report.longest_prompt + 3
    assert [(row["source_line"], row["reason"]) for row in report.rejections] == [
        (4, "empty_prompt"),
        (5, "invalid_json"),
    ]


def test_settings_decide_what_is_taken_and_how_it_is_judged(checked):
    assert checked(*[GOOD] * 9, limit=4).num_rows == 4
    assert checked(*[GOOD] * 9, sample=5).num_rows == 5
    assert checked({**GOOD, "odd": 1}, strict=True).reasons == {"unknown_field": 1}
    assert checked({"prompt": "a"}, CHAT, endpoint="/v1/completions").num_rejected == 1
    assert checked({"prompt": "a", "model": "other"}, served_names=("other",)).num_accepted == 1


def test_a_field_is_set_where_a_request_lacks_it(checked, tmp_path, score):
    assert checked(GOOD, {"prompt": "a"}, fill={"max_tokens": 9000}).reasons == {"prompt_too_long": 1}
    lines = [
        GOOD,
        {"prompt": "a", "max_tokens": None},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "b"}},
    ]
    run = score(write_lines(tmp_path / "s.jsonl", *lines), fill={"max_tokens": 7, "messages": None})
    bodies = [json.loads(text) for text in run.table("responses")["request"].to_pylist()]
    assert [body["max_tokens"] for body in bodies] == [4, 7, 7] and bodies[0] == GOOD


def test_what_set_takes_is_named():
    assert parse_fill(["max_tokens=256", "stop=\\n", 'stop=["a"]', "user=007x"]) == {
        "max_tokens": 256,
        "stop": ["a"],
        "user": "007x",
    }
    for pair, words in (("max_tokens", "expected FIELD=VALUE"), ("max_token=5", "no request has this field")):
        with pytest.raises(UsageError, match=words):
            parse_fill([pair])


def test_the_command_lists_what_it_refuses(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", GOOD, {"prompt": "a", "n": "two"}, "[1]")
    told = overnight("check", "--input", str(path))
    assert told.status == 3
    assert f'{path}:2: n: found "two", expected integer' in told.out and "1 accepted, 2 refused" in told.out
    as_json = overnight("check", "--input", str(path), "--json", "--limit", "2")
    assert as_json.status == 3 and "1 accepted, 1 refused" in as_json.err
    (row,) = map(json.loads, as_json.out.splitlines())
    assert (row["source_line"], row["param"], row["status_code"]) == (2, "n", 422)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--limit", "1", "--sample", "1"), "Give one"),
        (("--set", "max_token=1"), "--set max_token: no request has this field"),
        (("--endpoint", "chats"), "--endpoint chats: expected completions or chat"),
        (("--engine", "allow=all"), "--engine allow"),
        (("--model", "/nowhere"), "no such folder"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path, arguments, words):
    path = write_lines(tmp_path / "in.jsonl", GOOD)
    told = overnight("check", "--input", str(path), *arguments)
    assert told.status == 2 and words in told.err and "Traceback" not in told.err


def test_the_spool_knows_how_long_prompts_are(tmp_path, score):
    run = score(write_lines(tmp_path / "a.jsonl", GOOD, {"prompt": [1, 2]}), keep_work=True)
    (part,) = (run.output / "_work").glob("*/spool/*.parquet")
    assert pq.read_table(part)["num_prompt_tokens"].to_pylist() == [2, 3]
