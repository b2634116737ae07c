"""Files and requests that broke other tools: each line is answered or explained, and costs nobody else."""

import base64
import gzip
import json
import subprocess
import sys
import time

import pyarrow as pa
import pytest

from pipelines.checks import Checks
from pipelines.inputs import find_inputs
from pipelines.read import read_file
from pipelines.validate import Validator
from schemas.limits import ModelLimits
from schemas.requests import Answered, Failed, Request

GOOD = {"prompt": "row one", "max_tokens": 4, "temperature": 0}
LINE = json.dumps(GOOD).encode()
LIMITS = ModelLimits(("smollm2-135m-instruct",), 8192, 49152, 20, 128, 32, chat_template="{{ messages }}")


def judge(path, limits=LIMITS, **options):
    """The rows of a file, as a run would judge them."""
    validator = Validator(Checks("batch", None, limits), **options)
    return [row for block in read_file(find_inputs((str(path),))[0]) for row in validator(block).to_pylist()]


def judged(tmp_path, data, name="in.jsonl", **options):
    path = tmp_path / name
    path.write_bytes(data)
    return judge(path, **options)


def outcomes(rows):
    return [(row["source_line"], row["reason"]) for row in rows]


def answer(engine, rows):
    """What the real engine makes of the accepted rows."""
    sent = [
        engine.submit(Request(row["id"], row["endpoint"], row["request"]), lane="batch")
        for row in rows
        if row["reason"] is None
    ]
    return [future.result(timeout=300) for future in sent]


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_mark_of_byte_order_costs_no_row(tmp_path):
    assert outcomes(judged(tmp_path, b"\xef\xbb\xbf" + LINE + b"\n" + LINE + b"\n")) == [(1, None), (2, None)]


def test_blank_lines_are_no_rows_and_numbers_stay_physical(tmp_path):
    rows = judged(tmp_path, LINE + b"\r\n\r\n   \r\n\t\n" + LINE)
    assert outcomes(rows) == [(1, None), (5, None)]
    assert rows[1]["source_offset"] == len(LINE) + 2 + 2 + 5 + 2


def test_json_that_is_no_object_is_its_own_rows_error(tmp_path):
    envelope = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": "text"}
    rows = judged(tmp_path, b"\n".join([b"[1, 2]", b'"a"', b"null", b"42", json.dumps(envelope).encode(), LINE]))
    assert [row["reason"] for row in rows] == ["not_an_object"] * 4 + ["malformed_envelope", None]
    for row, found in zip(rows, ["an array", "a string", "null", "a number", "'text'"], strict=False):
        assert f"in.jsonl:{row['source_line']}: " in row["message"] and f"found {found}" in row["message"]


@pytest.mark.parametrize(
    "data",
    [
        json.dumps([GOOD, GOOD], indent=2).encode(),
        json.dumps([GOOD, GOOD]).encode(),
        b"\xef\xbb\xbf\n" + json.dumps([GOOD]).encode() + b"\n\n",
        json.dumps(GOOD, indent=4).encode(),
        b"[" + LINE + b",\n" + LINE + b"]\n",
        b"[\n" + LINE + b",\n" + LINE + b"\n]",
        b"{\r\n" + b'"prompt": "a"}',
        LINE.decode().encode("utf-16"),
        b"PAR1" + bytes(100),
        b"PK\x03\x04abc\n" + LINE,
    ],
)
def test_a_file_in_another_form_is_refused_whole_with_what_to_do(tmp_path, data):
    (row,) = judged(tmp_path, data)
    assert (row["source_line"], row["reason"], row["stage"]) == (None, "not_jsonl", "read")
    assert row["message"].split("in.jsonl: ")[1].startswith(("holds", "is "))
    assert "jq -c '." in row["message"] or "save it" in row["message"] or "; " in row["message"]


def test_an_array_on_the_first_of_several_lines_is_that_lines_error(tmp_path):
    assert outcomes(judged(tmp_path, b"[" + LINE + b"]\n" + LINE)) == [(1, "not_an_object"), (2, None)]
    assert outcomes(judged(tmp_path, b"[1, 2]\n")) == [(1, "not_an_object")]


def test_what_follows_an_object_is_an_error_with_its_column(tmp_path):
    rows = judged(tmp_path, b"\n".join([LINE + b",", LINE + LINE, LINE]))
    assert outcomes(rows) == [(1, "invalid_json"), (2, "invalid_json"), (3, None)]
    assert all("more after the end of the JSON value" in row["message"] for row in rows[:2])
    assert f"(column {len(LINE) + 1})" in rows[0]["message"]


def test_bytes_that_are_no_utf8_are_their_own_rows_error(tmp_path):
    rows = judged(tmp_path, b"\n".join([LINE, b'{"prompt": "bad \xff\xfe"}', b'{"prompt": "caf\xe9"}', LINE]))
    assert [row["reason"] for row in rows] == [None, "invalid_json", "invalid_json", None]
    assert rows[1]["source_offset"] == len(LINE) + 1 and b"\xff\xfe" in rows[1]["raw"]


def test_an_empty_file_among_others_costs_nothing(tmp_path, score):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").touch()
    (folder / "b.jsonl").write_bytes(b"\n")
    (folder / "c.jsonl").write_bytes(LINE + b"\n" + LINE)
    run = score(folder)
    assert run.table("responses").num_rows == 2 and run.table("errors").num_rows == 0


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json.gz", "x.jsonl"])
@pytest.mark.parametrize("pack", [gzip.compress, lambda data: pa.compress(data, "zstd").to_pybytes()])
def test_packed_files_are_known_by_content_and_a_cut_one_is_no_whole_run(tmp_path, name, pack):
    packed = pack(LINE + b"\n" + LINE + b"\n")
    assert outcomes(judged(tmp_path, packed, name)) == [(1, None), (2, None)]
    *_, last = judged(tmp_path, packed[:-10], name)
    assert (last["source_line"], last["reason"]) == (None, "unreadable_file") and name in last["message"]


def test_a_line_of_fifty_megabytes_is_refused_quickly_beside_its_neighbours(tmp_path):
    long = json.dumps({"prompt": "a " * 25_000_000, "max_tokens": 1}).encode()
    (tmp_path / "in.jsonl").write_bytes(LINE + b"\n" + long + b"\n" + LINE + b"\n")
    code = (
        "import resource, sys\n"
        "from tests.test_trouble import judge\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = judge(sys.argv[1])\n"
        "print([row['reason'] for row in rows], rows[1]['message'])\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "in.jsonl"], capture_output=True, text=True, check=True
    )
    told, mebibytes = done.stdout.splitlines()
    assert "[None, 'prompt_too_long', None]" in told and "8,192 tokens" in told
    # The tokenizer and its library are in it, too.
    assert int(mebibytes) < 900 and time.monotonic() - began < 60


def test_a_line_beyond_the_limit_is_refused_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.read.MAX_LINE_BYTES", 1000)
    data = LINE + b"\n" + b"x" * 5_000_000 + b"\n" + LINE + b"\n" + b"y" * 5_000
    rows = judged(tmp_path, data)
    assert outcomes(rows) == [(1, None), (2, "line_too_long"), (3, None), (4, "line_too_long")]
    assert rows[1]["status_code"] == 413 and rows[3]["source_offset"] == data.index(b"y")


# --- requests over the real engine ----------------------------------------------------------------------------------


@pytest.mark.engine
def test_one_column_may_hold_every_form_of_prompt_and_content(tmp_path, engine):
    lines = [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"prompt": "hi", "stop": "\n"},
        {"prompt": [1, 2, 3], "stop": ["\n", "."]},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
    ]
    data = b"\n".join(json.dumps({**line, "max_tokens": 4, "temperature": 0}).encode() for line in lines)
    events = answer(engine, judged(tmp_path, data))
    assert [len(event.body["choices"]) for event in events] == [1, 1, 1, 1, 2, 2]
    assert events[0].body["choices"] == events[1].body["choices"]


@pytest.mark.engine
def test_equal_ids_give_as_many_rows_as_lines_and_nobody_elses_text(tmp_path, engine):
    prompts = ["1, 2, 3,", "a, b, c,", "Monday, Tuesday,"]
    ids = ["dup", "dup", ""]
    envelopes = [
        {"custom_id": one, "method": "POST", "url": "/v1/completions", "body": {**GOOD, "prompt": prompt}}
        for one, prompt in zip(ids, prompts, strict=True)
    ]
    bare = [{**GOOD, "prompt": prompt, "request_id": "r"} for prompt in prompts[:2]]
    rows = judged(tmp_path, b"\n".join(json.dumps(line).encode() for line in envelopes + bare))
    assert [row["id"] for row in rows] == ["dup", "dup", f"{tmp_path}/in.jsonl:3", "r", "r"]
    texts = [event.body["choices"][0]["text"] for event in answer(engine, rows)]
    assert len(texts) == 5 and texts[0] == texts[3] and texts[1] == texts[4] and texts[0] != texts[1]


@pytest.mark.engine
def test_prompts_without_a_token_are_refused_and_the_engine_lives_on(tmp_path, engine):
    empty = [{"prompt": p} for p in ("", [""], [], [[]], None, ["ok", ""])] + [{}, {"messages": []}]
    rows = judged(
        tmp_path, b"\n".join(json.dumps({**GOOD, "prompt": None, **b}).encode() for b in empty) + b"\n" + LINE
    )
    assert [row["reason"] for row in rows[:-1]] == ["empty_prompt"] * 8
    (event,) = answer(engine, rows[-1:])
    assert isinstance(event, Answered)
    # The engine, asked past the contract, refuses them, too.
    sent = [engine.submit(Request("e", "/v1/completions", json.dumps(body)), lane="batch") for body in empty[:6]]
    assert all(isinstance(future.result(timeout=60), Failed) for future in sent)


@pytest.mark.engine
def test_no_max_tokens_and_null_mean_the_same(tmp_path, engine):
    bodies = [{"prompt": "Count to fifty:", "temperature": 0}, {"prompt": "Count to fifty:", "temperature": 0}]
    bodies[1]["max_tokens"] = None
    bad = [{"prompt": "x", "max_tokens": value} for value in (0, -1, "8")]
    rows = judged(tmp_path, b"\n".join(json.dumps(body).encode() for body in bodies + bad))
    assert [(row["status_code"], row["reason"]) for row in rows[2:]] == [
        (400, "out_of_range"),
        (400, "out_of_range"),
        (422, "schema"),
    ]
    first, second = answer(engine, rows)
    assert first.usage == second.usage and first.usage["completion_tokens"] == 16
    assert first.body["choices"][0]["finish_reason"] == "length"
    chat = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": None, "temperature": 0}
    (event,) = answer(engine, judged(tmp_path, json.dumps(chat).encode()))
    assert event.body["choices"][0]["finish_reason"] == "stop"


def test_a_prompt_one_token_over_the_context_is_refused_with_the_three_numbers(tmp_path):
    limits = ModelLimits(("m",), 64, 49152, 20, 128, 32)
    words = "a" + " a" * 47
    body = {"prompt": words, "temperature": 0}
    cases = [{"max_tokens": 16}, {"max_tokens": 17}, {}, {"max_tokens": 64}, {"max_tokens": 17}]
    cases[-1]["truncate_prompt_tokens"] = 40
    rows = judged(tmp_path, b"\n".join(json.dumps({**body, **case}).encode() for case in cases), limits=limits)
    assert [row["reason"] for row in rows] == [None, "prompt_too_long", None, "prompt_too_long", None]
    assert [row["num_prompt_tokens"] for row in rows] == [48, None, 48, None, 40]
    message = rows[1]["message"]
    assert "48 prompt tokens" in message and "max_tokens 17" in message and "64 tokens" in message


def test_a_run_with_one_prompt_too_long_answers_all_the_others(tmp_path, score):
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({**GOOD, "prompt": f"row {n}"}) for n in range(200)]
    lines[70] = json.dumps({**GOOD, "prompt": "a " * 9000})
    path.write_text("\n".join(lines))
    run = score(path)
    assert run.table("responses").num_rows == 199
    assert run.table("errors")["reason"].to_pylist() == ["prompt_too_long"]


def test_retired_and_misspelt_fields_do_not_pass_in_silence(tmp_path):
    fragments = [{"guided_json": {}}, {"use_beamsearch": True}, {"best_of": 3}, {"extra_body": {}}, {"max_token": 5}]
    data = b"\n".join(json.dumps({**GOOD, **fragment}).encode() for fragment in fragments)
    rows = judged(tmp_path, data)
    assert [row["reason"] for row in rows] == ["retired_field"] * 4 + [None]
    assert rows[-1]["unknown_fields"] == ["max_token"]
    strict = judged(tmp_path, data, strict=True)[-1]
    assert (strict["reason"], strict["param"]) == ("unknown_field", "max_token")
    assert "Is max_tokens meant?" in strict["message"]


def test_no_row_of_a_batch_streams(tmp_path):
    fragments = [
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": False, "stream_options": {"include_usage": True}},
        {"use_beam_search": True, "n": 2, "stream": True},
        {"stream": False, "stream_options": None},
    ]
    rows = judged(tmp_path, b"\n".join(json.dumps({**GOOD, **fragment}).encode() for fragment in fragments))
    assert [row["reason"] for row in rows] == ["stream_in_batch"] * 4 + [None]


@pytest.mark.engine
def test_assistants_turns_may_be_empty_and_nulls_survive(tmp_path, engine):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "B"}],
        [
            {"role": "user", "content": "w?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
        [{"role": "user", "content": "w?"}, {"role": "assistant", "content": None, "function_call": call["function"]}],
        [{"role": "user", "content": None}],
    ]
    texts = [json.dumps({"messages": messages, "max_tokens": 4, "temperature": 0}) for messages in turns]
    rows = judged(tmp_path, "\n".join(texts).encode())
    # The schema has no user's turn without content, so that one is a 422.
    assert [row["reason"] for row in rows] == [None, "tools_unsupported", "tools_unsupported", "schema"]
    (event,) = answer(engine, rows)
    assert isinstance(event, Answered)


# --- what reaches the engine ----------------------------------------------------------------------------------------


def test_what_reaches_the_engine_is_what_was_written(tmp_path, score):
    """Through Ray: every accepted line, as canonical JSON; the deterministic engine echoes the body that it got."""
    odd = {
        "prompt": "2024-01-01T00:00:00Z \u2028 \u0000 \U0001f600 \\ud800",
        "temperature": 1e-7,
        "top_p": 0.1 + 0.2,
        "seed": -(2**63),
        "logit_bias": {"00123": -99.5, "7": 1e2},
        "stop": None,
        "user": "",
        "unknown": {"deep": [None, True, 1.0, 10**18, {"": []}]},
        "model": "test",
    }
    lines = [
        odd,
        {"custom_id": "2024-05-01", "method": "POST", "url": "/v1/completions", "body": odd},
        {"prompt": [1, 2, 3], "max_tokens": 8.0},
        {
            "messages": [
                {"role": "assistant", "content": ""},
                {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
            ]
        },
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    run = score(path)
    assert run.table("errors").num_rows == 0, run.table("errors")["message"].to_pylist()
    got = [json.loads(text) for text in run.table("responses")["request"].to_pylist()]
    canonical = [json.dumps(line.get("body", line), sort_keys=True) for line in lines]
    assert [json.dumps(body, sort_keys=True) for body in got] == canonical
    received = [json.loads(text)["received"] for text in run.table("responses")["response"].to_pylist()]
    assert [json.dumps(json.loads(body), sort_keys=True) for body in received] == canonical
    assert run.table("responses")["id"].to_pylist()[1] == "2024-05-01"


def test_bytes_of_a_windows_tool(tmp_path):
    data = base64.b64decode("77u/eyJwcm9tcHQiOiAiYSJ9DQp7InByb21wdCI6ICJiIn0NCg==")
    assert [row["request"] for row in judged(tmp_path, data)] == ['{"prompt": "a"}', '{"prompt": "b"}']
