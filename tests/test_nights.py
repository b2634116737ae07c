"""The pure parts of a night: paths with a date in them, which nights are due, deadlines, which runs are kept, and the
file that says it all."""

from datetime import UTC, date, datetime

import pytest

from jobs.datasets import read_nightly
from jobs.exits import ExitStatus, worst
from pipelines.retention import too_old
from schemas.failures import UsageError
from schemas.nightly import Dataset, Keep, Nightly
from schemas.settings import RunSettings
from schemas.templates import has_date, render

NIGHT = date(2026, 3, 1)


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("s3://b/in/{date:%Y/%m/%d}/*.jsonl", "s3://b/in/2026/03/01/*.jsonl"),
        ("{yesterday}/{date}", "2026-02-28/2026-03-01"),
        ("{date-7:%d.%m.}{date+31:%-d}{yesterday-1:%b}", "22.02.1Feb"),
        ("week-{date:%G-W%V}/{date:%j}", "week-2026-W09/060"),
        ("{{a,b}}/{date:100%%}", "{a,b}/100%"),
        ("plain.jsonl", "plain.jsonl"),
    ],
)
def test_a_path_is_that_of_its_night(template, path):
    assert render(template, NIGHT) == path
    assert has_date(template) == ("date" in template or "yesterday" in template)


@pytest.mark.parametrize(
    "template",
    [
        "{date.year}",
        "{date.__class__.__mro__}",
        "{date!r}",
        "{0}",
        "{}",
        "{today}",
        "{date",
        "date}",
        "{date:%H}",
        "{date:%s}",
        "{date:{date}}",
        "{date:%}",
        "{date: \0}",
        "{date - 1}",
        "{date-99999}",
    ],
)
def test_what_is_no_date_of_a_path_is_refused(template):
    with pytest.raises(ValueError, match=r"expected|brace"):
        render(template, NIGHT)


def test_a_date_before_all_dates_is_refused():
    with pytest.raises(ValueError, match="is none"):
        render("{date-9999}", date(20, 1, 1))


def dataset(*inputs, **more):
    return Dataset(name="a", run=RunSettings(inputs=inputs or ("{date}.jsonl",), output="out"), **more)


@pytest.mark.parametrize(
    ("done", "catch_up", "days"),
    [
        (None, 7, [1]),
        (date(2026, 2, 28), 7, [1]),
        (date(2026, 2, 26), 7, [27, 28, 1]),
        (date(2026, 2, 26), 1, [28, 1]),
        (date(2026, 2, 26), 0, [1]),
        (date(2026, 3, 1), 7, [1]),
        (date(2026, 4, 1), 7, [1]),
    ],
)
def test_missed_nights_are_due_as_far_as_they_are_caught_up(done, catch_up, days):
    assert [night.day for night in dataset(catch_up=catch_up).nights(NIGHT, done)] == days
    assert dataset("a.jsonl", catch_up=catch_up).nights(NIGHT, done) == [NIGHT]


def test_missed_nights_that_are_not_caught_up_are_told():
    assert dataset(catch_up=1).left_out(NIGHT, date(2026, 2, 20)) == (date(2026, 2, 21), date(2026, 2, 27))
    assert dataset(catch_up=8).left_out(NIGHT, date(2026, 2, 20)) is None
    assert dataset("a.jsonl", catch_up=0).left_out(NIGHT, date(2026, 2, 20)) is None
    assert dataset(catch_up=0).left_out(NIGHT, None) is None


def test_the_settings_of_a_night_are_a_run_that_carries_over():
    settings = dataset("in/{yesterday}/{{x}}").settings_for(NIGHT)
    assert settings.inputs == ("in/2026-02-28/{x}",) and settings.changed and settings.output == "out"
    assert settings.labels == {"dataset": "a", "night": "2026-03-01"}


@pytest.mark.parametrize(
    ("zone", "now", "deadline"),
    [
        ("UTC", datetime(2026, 3, 1, 1), datetime(2026, 3, 1, 6)),
        ("UTC", datetime(2026, 3, 1, 6), datetime(2026, 3, 2, 6)),
        ("Europe/Berlin", datetime(2026, 3, 1, 4, 59), datetime(2026, 3, 1, 5)),
        # The night in which clocks go forward, and the one in which they go back.
        ("Europe/Berlin", datetime(2026, 3, 28, 23), datetime(2026, 3, 29, 4)),
        ("Europe/Berlin", datetime(2026, 10, 24, 22), datetime(2026, 10, 25, 5)),
        ("America/New_York", datetime(2026, 3, 1, 1), datetime(2026, 3, 1, 11)),
    ],
)
def test_the_deadline_is_the_next_one_in_its_time_zone(zone, now, deadline):
    told = Nightly(state="s", datasets=(dataset(),), deadline="06:00", time_zone=zone)
    assert told.next_deadline(now.replace(tzinfo=UTC).timestamp()) == deadline.replace(tzinfo=UTC).timestamp()


def test_without_a_deadline_there_is_none():
    assert Nightly(state="s", datasets=(dataset(),)).next_deadline(0.0) is None


def test_runs_are_kept_by_number_or_by_days():
    ids = [f"202603{day:02}T010000Z-abcdef" for day in range(1, 11)]
    now = datetime(2026, 3, 10, 12, tzinfo=UTC).timestamp()
    assert too_old([*ids, "notes", "20260301"], Keep(runs=3), now) == ids[:7]
    assert too_old(ids, Keep(days=2), now) == ids[:8]
    assert too_old(ids, Keep(runs=1, days=4), now) == ids[:6]
    assert too_old(ids, Keep(runs=20, days=1), now) == [] == too_old(ids, Keep(runs=10), now)


def test_of_several_exit_statuses_the_worst_is_told():
    assert worst([]) == worst([0, 0]) == 0
    assert worst([0, 3]) == 3 and worst([5, 3]) == 5 and worst([5, 4, 3]) == 4
    assert worst([4, 2]) == 2 and worst([1, 2, 5]) == 1 and worst([1, 130]) == 130
    assert all(worst([status]) == status for status in ExitStatus)


# --- the file -------------------------------------------------------------------------------------------------------

GOOD = """
state: s3://b/state
time-zone: Europe/Berlin
deadline: 22:30
defaults:
  model: m
  set: {max_tokens: 9, stop: ["a"]}
  keep: {runs: 3}
datasets:
  - {name: second, input: b.jsonl, output: out/b, priority: 1}
  - name: first
    input: [a.jsonl, "in/{date}/*"]
    output: out/a
    model: n
    max-errors: 5%
    allow-errors: true
    catch-up: 2
    keep: {days: 30}
    missing: skip
"""


def test_a_dataset_takes_the_options_of_score_by_its_parsers(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERNIGHT_INPUT", "elsewhere.jsonl")
    monkeypatch.setenv("OVERNIGHT_MAX_ERRORS", "7")
    (tmp_path / "n.yaml").write_text(GOOD)
    told = read_nightly(tmp_path / "n.yaml")
    assert told.state == "s3://b/state" and (told.deadline.hour, told.deadline.minute) == (22, 30)
    first, second = told.in_order
    assert (first.name, second.name) == ("first", "second")
    assert first.run.inputs == ("a.jsonl", "in/{date}/*") and first.run.model == "n" and first.run.max_errors == 0.05
    assert first.allow_errors and first.catch_up == 2 and first.missing == "skip" and first.keep == Keep(days=30)
    assert second.run.fill == {"max_tokens": 9, "stop": ["a"]} and second.keep == Keep(runs=3)
    assert second.run.inputs == ("b.jsonl",) and second.run.max_errors is None and not second.is_dated


def one(text, top="state: s"):
    return f"{top}\ndatasets:\n  - {{name: a, {text}}}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "expected `option: value` lines"),
        ("state: s", "datasets: found nothing, expected a list"),
        ("state: s\ndatasets: [3]", "datasets[0]: found 3, expected `field: value` lines"),
        (one("input: a, output: b", top="dedline: 1"), "dedline: no such field. There are: state, time_zone, deadline"),
        (one("input: a, output: b", top="state: s\ntime_zone: Mars"), "time_zone: found 'Mars', expected the"),
        (one("input: a, output: b", top="state: s\ndeadline: noon"), "deadline: found 'noon', expected a time of day"),
        (one("input: a, output: b", top="state: s\ndeadline: 6"), "deadline: found 6, expected a time of day"),
        (one("input: a, output: b", top=""), "state: found nothing"),
        (one("output: b"), "datasets[0] (a): Missing option '--input'"),
        (one("input: a, output: b, inptu: c"), "datasets[0] (a): inptu: no such option. There are: adapter, allow_e"),
        (one("input: a, output: b, limit: 0"), "datasets[0] (a): Invalid value for '--limit'"),
        (one("input: a, output: [b, c]"), "datasets[0] (a): output: found ['b', 'c'], expected one value"),
        (one("input: a, output: b, strict: maybe"), "datasets[0] (a): strict: found 'maybe', expected true or false"),
        (one("input: a, output: b, model: "), "datasets[0] (a): model: found nothing, expected one value"),
        (one("input: a, output: b, max-errors: x"), "datasets[0] (a): --max-errors x: expected a number of rows"),
        (one("input: a, output: b, engine: {max_seqs: 1}"), "datasets[0] (a): --engine max_seqs: no such setting"),
        (one("input: a, output: b, restart: true"), "datasets[0] (a): restart: has no place here"),
        (one("input: a, output: b, log_format: json"), "datasets[0] (a): log_format: is a matter of the whole night"),
        (one("input: '{date.x}', output: b"), "datasets[0] (a): {date.x}: found {date.x}, expected {date}"),
        (one("input: a, output: 'b/{date}'"), "datasets[0] (a): b/{date}: found a date in the output"),
        (one("input: a, output: b, catch_up: -1"), "datasets[0] (a): catch_up: found -1, input should be greater"),
        (one("input: a, output: b, keep: {runs: 0}"), "datasets[0] (a): keep.runs: found 0"),
        (one("input: a, output: b, missing: maybe"), "datasets[0] (a): missing: found 'maybe', input should be 'fail'"),
        (one("input: a, output: b") + "  - {name: a, input: a, output: c}", "name a: found twice"),
        (one("input: a, output: b") + "  - {name: c, input: a, output: b/}", "output b: found twice"),
        (one("input: a, output: s"), "state s: is the output of a dataset, too"),
        ("state: s\ndatasets:\n  - {input: a, output: b}", "datasets[0]: name: found nothing"),
        (one("input: a, output: b").replace("name: a", "name: ../a"), "name: found '../a', string should match"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_its_field(tmp_path, text, words):
    (tmp_path / "n.yaml").write_text(text)
    with pytest.raises(UsageError) as raised:
        read_nightly(tmp_path / "n.yaml")
    assert str(raised.value).startswith(f"{tmp_path}/n.yaml: ") and words in str(raised.value)
    assert "\n" not in str(raised.value)
