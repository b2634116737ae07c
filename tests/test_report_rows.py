"""The rows that the verb report shows: which ones, what of them, and nothing live; and the command's own words."""

import json
import re
import shlex

import pytest

from pipelines import report, report_rows, write
from pipelines.published import find_run
from pipelines.report_rows import Wanted, parse_where
from pipelines.storage import Folder
from schemas.failures import UsageError
from tests.conftest import overnight
from tests.published import FILE, HOSTILE, answered, failed, publish

LOGPROBS = {
    "tokens": [" Par", "is"],
    "token_logprobs": [None, -0.5],
    "top_logprobs": [None, {"is": -0.5, "<b>": -0.1}],
}
CHAT = {
    "message": {"content": None, "tool_calls": [{"id": "1"}], "reasoning_content": "hm"},
    "finish_reason": "tool_calls",
    "logprobs": {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}]}]},
}
ROWS = [
    answered(1, choices=[{"text": " Paris", "finish_reason": "stop", "logprobs": LOGPROBS}], total_ms=5_000.0),
    answered(2, request={"prompt": ["a", "b"]}, model="other", completion_tokens=90, extra='{"team": 7}'),
    answered(3, request={"prompt": None, "messages": [{"role": "user", "content": "Grüße"}]}, choices=[CHAT]),
    failed(4),
    answered(5, choices=[{"text": "one", "finish_reason": "stop"}, {"text": "TWO", "finish_reason": "length"}]),
    failed(6, "invalid_json", raw=b"\xff broken"),
]


def rows_of(output, *where, most=100, **given):
    """What the rows' page holds, and the page."""
    run = find_run(Folder.at(str(output)), None, "--output")
    text, _ = report.rows_page(run, Wanted(most, parse_where(list(where)), **given), "report.html")
    (data,) = re.findall(r'<script type="application/json" id="rows">(.*?)</script>', text, re.DOTALL)
    return json.loads(data), text


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    output = tmp_path_factory.mktemp("rows")
    publish(output, "1", ROWS)
    return output


@pytest.mark.parametrize(
    ("where", "given", "lines"),
    [
        ([], {}, [1, 2, 3, 5, 4, 6]),
        ([], {"most": 1}, [1, 4]),
        (["id=ticket-2"], {}, [2]),
        ([f"file={FILE}", "line=6"], {}, [6]),
        (["line=7"], {}, []),
        (["model=other"], {}, [2]),
        (["finish_reason=length"], {}, [5]),
        (["reason=invalid_json"], {}, [6]),
        (["contains=two"], {}, [5]),
        (["contains=BROKEN"], {}, [6]),
        (["contains=ticket 1"], {}, [1]),
        ([], {"order": "slowest", "most": 2}, [1, 2]),
        ([], {"order": "longest", "most": 2}, [2, 1]),
        (["finish_reason=stop"], {"order": "slowest"}, [1, 2, 5]),
    ],
)
def test_the_rows_that_are_asked_for_are_shown(published, monkeypatch, where, given, lines):
    assert [row["line"] for row in rows_of(published, *where, **given)[0]] == lines


def test_rows_are_found_in_many_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "ROW_GROUP_BYTES", 2_000)
    monkeypatch.setattr("schemas.tables.BLOCK_BYTES", 1_000)
    publish(tmp_path, "1", [answered(n, total_ms=float(n * 7 % 100 + 1)) for n in range(1, 100)])
    rows, _ = rows_of(tmp_path, most=3, order="slowest")
    assert [(row["line"], row["usage"]["total_ms"]) for row in rows] == [(57, 100.0), (14, 99.0), (71, 98.0)]
    assert rows_of(tmp_path, "contains=answer 73")[0][0]["choices"][0]["text"] == " answer 73"


def test_a_row_is_shown_with_its_prompt_answers_and_log_probabilities(published):
    completion, several, chat, *_ = rows_of(published)[0]
    assert completion["prompt"] == [["", "Ticket 1"]]
    assert completion["choices"][0]["tokens"] == [[" Par", None, []], ["is", -0.5, [["<b>", -0.1], ["is", -0.5]]]]
    assert json.loads(several["prompt"][0][1]) == ["a", "b"] and several["extra"] == '{"team": 7}'
    assert chat["prompt"] == [["user", "Grüße"]]
    (choice,) = chat["choices"]
    assert json.loads(choice["tool_calls"]) == [{"id": "1"}] and choice["reasoning"] == "hm"
    assert choice["tokens"] == [["a", -1.0, [["a", -1.0]]]]


def test_a_row_that_is_long_is_cut_and_says_how_to_see_all_of_it(tmp_path):
    long = "x" * 50_000
    publish(tmp_path / "o u't", "1", [answered(1, request={"prompt": long}), answered(2)])
    (row, short_row), _ = rows_of(tmp_path / "o u't")
    assert row["prompt"][0][1].endswith("… [30,000 more characters]") and "more" not in short_row
    verb, *arguments = shlex.split(row["more"])
    assert verb == "overnight"
    told = overnight(*arguments, "--to", str(tmp_path / "whole.html"))
    assert told.status == 0, told.err
    assert long in (tmp_path / "whole-rows.html").read_text() and "1 row to read" in told.out


def test_a_page_has_a_bound_and_says_what_was_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(report_rows, "MAX_PAGE", 20_000)
    publish(tmp_path, "1", [answered(n, request={"prompt": "y" * 3_000}) for n in range(1, 31)])
    rows, text = rows_of(tmp_path)
    assert len(rows) < 30 and f"{30 - len(rows)} more were left out" in text


def test_no_row_ends_the_data_or_is_live(tmp_path):
    publish(tmp_path, "1", [answered(1, id=HOSTILE, request={"prompt": HOSTILE}), failed(2, raw=HOSTILE.encode())])
    rows, text = rows_of(tmp_path)
    assert rows[0]["id"] == HOSTILE and rows[0]["prompt"][0][1] == HOSTILE
    assert text.count("<script") == text.count("</script>") == 2 and "<img" not in text
    assert "\u202e" not in text


def test_what_may_be_said_of_rows_is_one_line_where_it_is_wrong():
    for pairs, words in (
        (["nothing"], "expected FIELD=VALUE, with a field of id, file, line"),
        (["size=1"], "expected FIELD=VALUE"),
        (["id=1", "id=2"], "--where id: found twice"),
        (["line=-1"], "--where line=-1: expected a line's number"),
        (["line=²"], "--where line=²: expected a line's number"),
        (["line=99999999999999999999"], "expected a line's number"),
        (["reason=a", "model=b"], "reason: is of errors"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_where(pairs)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(tmp_path, published):
    told = overnight("report", "--output", str(published), "--to", str(tmp_path / "a.html"), "--rows", "2")
    assert (told.status, told.err) == (0, "")
    assert told.out == f"run 1\n{tmp_path}/a.html\n{tmp_path}/a-rows.html\n4 rows to read\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", ""], "--output: found nothing, expected a path or URI"),
        (["--run", ""], "--run: found nothing, expected the id of a run"),
        (["--output", "/nowhere"], "/nowhere/manifest.json: no such file. Give --output the folder or URI that"),
        (["--run", "2"], "runs/2/manifest.json: no such file. Give --run the name of a folder below"),
        (["--to", "a.txt"], "--to a.txt: expected a file whose name ends with .html"),
        (["--to", "OUT/a.html"], "/a.html: lies within "),
        (["--to", "/dev/null/a.html"], "/dev/null: can't be written to ("),
        (["--sort", "slowest"], "--where, --sort and --whole say which rows --rows shows. Give --rows N with them"),
        (["--rows", "2", "--sort", "fastest"], "--sort fastest: expected input, slowest, longest"),
        (["--rows", "2", "--where", "x"], "--where x: expected FIELD=VALUE"),
    ],
)
def test_wrong_usage_is_one_line_with_status_2(published, arguments, words):
    from typer.testing import CliRunner

    from jobs.report import app

    given = [one.replace("OUT", str(published)) for one in arguments]
    given += [] if "--output" in given else ["--output", str(published)]
    told = CliRunner().invoke(app, given)
    assert told.exit_code == 2 and told.stdout == ""
    assert told.stderr.startswith("overnight: ") and told.stderr.count("\n") == 1 and words in told.stderr
