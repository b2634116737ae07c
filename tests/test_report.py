"""The verb report: figures that are the manifest's, charts in words, pages that hold nothing live."""

import html.parser
import re
import tomllib
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
import s3fs

from jobs import report as report_job
from pipelines import report, report_figures, write
from pipelines.published import find_run
from pipelines.report_pages import as_json, clock, short, visible
from pipelines.report_rows import Wanted
from pipelines.storage import Folder
from schemas.failures import UsageError
from tests.conftest import ROOT, read_published, write_lines
from tests.published import BEGAN, HOSTILE, answered, failed, night, publish

PRICES = {"prompt": 0.1, "completion": 0.4, "replica_hour": 1.2}


class Page(html.parser.HTMLParser):
    """The elements of a page, the figures that name where in the manifest they stand, and its words."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.figures, self.words = [], {}, []
        self._figure = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._figure = dict(attributes).get("data-figure", self._figure)

    def handle_endtag(self, tag):
        self._figure = None

    def handle_data(self, data):
        self.words.append(data)
        if self._figure is not None:
            self.figures[self._figure] = data

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def named(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]


def look(output, run_id=None, **given):
    """The page of a run."""
    written = report.write_report(str(output), run_id, **given)
    folder, _, name = written.paths[0].rpartition("/")
    return Page(Folder.at(folder).read(name).decode())


def figures(output):
    return report_figures.figures_of(find_run(Folder.at(str(output)), None, "--output"))


def entry(manifest, path):
    for name in path.split("."):
        manifest = manifest[name]
    return manifest


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_figures_on_the_page_are_the_manifests(tmp_path):
    manifest = publish(tmp_path, "1", night(600), prices=PRICES)
    page = look(tmp_path)
    assert {"rows.input", "rows.errors", "usage.completion_tokens", "plan.cached_tokens", "cost"} < page.figures.keys()
    assert sum(name.startswith("errors_by_reason.") for name in page.figures) == len(manifest["errors_by_reason"]) > 1
    for name, shown in page.figures.items():
        told = entry(manifest, name)
        assert shown == (f"{told:,.2f}" if name == "cost" else f"{told:,}"), name


def test_the_bill_adds_up_to_the_cost(tmp_path):
    manifest = publish(tmp_path, "1", night(300), prices={**PRICES, "cached": 0.02})
    assert sum(item.cost for item in report.bill_of(manifest)) == pytest.approx(manifest["cost"], abs=1e-6)


def test_rates_are_added_up_exactly_wherever_spans_begin_and_end():
    chance = np.random.default_rng(3)
    starts = np.concatenate([chance.uniform(0, 90, 300), [0.0, 10.0, 99.0]])
    ends = np.minimum(100.0, starts + np.concatenate([chance.exponential(8, 300) + 1e-3, [100.0, 10.0, 1.0]]))
    amounts = chance.uniform(0, 50, len(starts))
    course = report_figures.Course(20, 5.0)
    for half in (slice(0, 150), slice(150, None)):
        course.add(starts[half], ends[half], amounts[half])
    shares = [
        np.clip(np.minimum(ends, end) - np.maximum(starts, start), 0, None) / (ends - starts)
        for start, end in pairwise(np.arange(0, 101, 5.0))
    ]
    assert course.amounts() == pytest.approx([float((share * amounts).sum()) for share in shares])
    assert course.amounts().sum() == pytest.approx(amounts.sum())


def test_what_goes_on_over_time_is_all_that_engines_answered(tmp_path):
    rows = night(800, replicas=3)
    publish(tmp_path, "1", rows)
    told = figures(tmp_path)
    timed = [row for row in rows if row.get("total_ms") and not row["is_deduplicated"] and not row["is_carried"]]
    assert told.num_timed == len(timed)
    assert told.tokens_per_s.sum() * told.cell_s == pytest.approx(sum(row["completion_tokens"] for row in timed))
    assert told.waiting.sum() * told.cell_s == pytest.approx(sum(row["queue_ms"] for row in timed) / 1000, rel=1e-6)
    in_flight = sum(one.in_flight for one in told.replicas)
    assert in_flight == pytest.approx(told.waiting + told.running, abs=1e-6)
    assert sum(one.num_rows for one in told.replicas) == len(timed)


def test_a_replica_is_busy_while_a_row_is_in_it(tmp_path):
    at = {"queue_ms": 0.0, "first_token_ms": 1_000.0, "completion_tokens": 100}
    rows = [
        answered(1, BEGAN, total_ms=40_000.0, replica="one", **at),
        answered(2, BEGAN + 10, total_ms=10_000.0, replica="one", **at),
        answered(3, BEGAN + 30, total_ms=10_000.0, replica="two", **at),
    ]
    publish(tmp_path, "1", rows)
    told = figures(tmp_path)
    assert [(one.name, round(one.busy_s), one.num_tokens) for one in told.replicas] == [
        ("one", 40, 200),
        ("two", 10, 100),
    ]
    assert told.running[[5, 15, 25, 35]] == pytest.approx([1, 2, 1, 2])


def test_rows_that_took_anothers_answer_have_no_part_in_times(tmp_path):
    free = [answered(2, BEGAN - 9_000, is_carried=True, total_ms=9e6), answered(3, is_deduplicated=True, total_ms=9e6)]
    publish(tmp_path, "1", [answered(1), *free])
    told = figures(tmp_path)
    assert (told.num_rows, told.num_timed, told.times["total_ms"].most) == (3, 1, 1_000.0)
    assert told.savings["prompt"] == {"computed": 10, "cached": 0, "deduplicated": 10, "carried": 10}
    assert [row["source_line"] for row in told.slowest] == [1]


def test_quantiles_are_right_to_a_percent_and_of_whole_numbers_exact():
    values = np.random.default_rng(5).lognormal(6, 2, 20_000)
    times, tokens = report_figures.Distribution(1.02), report_figures.Distribution()
    for part in np.array_split(values, 7):
        times.add(part)
        tokens.add(part.astype(np.int64))
    for share in (0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert times.quantile(share) == pytest.approx(exact, rel=0.011)
        assert tokens.quantile(share) == int(exact)
    assert sum(times.binned([0.0, 10.0, 1e9])) == len(values)


@pytest.mark.parametrize("values", [[5_000.0], [10.0], [1_999.0], [5_000.0] * 90 + [5_300.0] * 10])
def test_a_chart_of_times_has_all_of_them(values):
    times = report_figures.Distribution(growth=1.02)
    times.add(np.array(values))
    assert sum(times.binned([min(values), max(values) + 1.0])) == len(values)


def test_many_row_groups_give_the_same_figures(tmp_path, monkeypatch):
    rows = night(500)
    counts = publish(tmp_path / "one", "1", rows)["errors_by_reason"]
    monkeypatch.setattr(write, "ROW_GROUP_BYTES", 3_000)
    monkeypatch.setattr(write, "PART_BYTES", 20_000)
    monkeypatch.setattr("schemas.tables.BLOCK_BYTES", 2_000)
    publish(tmp_path / "many", "1", rows)
    assert len(list((tmp_path / "many/runs/1/responses").iterdir())) > 2
    one, many = figures(tmp_path / "one"), figures(tmp_path / "many")
    assert many.tokens_per_s == pytest.approx(one.tokens_per_s) and many.slowest == one.slowest
    assert many.savings == one.savings and many.finish_reasons == one.finish_reasons
    errors = [
        report_figures.first_errors(find_run(Folder.at(str(tmp_path / name)), None, "--output"))
        for name in ("one", "many")
    ]
    assert errors[0] == errors[1]
    assert {reason: len(lines) for reason, lines in errors[0].items()} == {
        reason: min(3, number) for reason, number in counts.items()
    }


def test_the_slowest_rows_are_told_slowest_first(tmp_path):
    publish(tmp_path, "1", [answered(line, total_ms=1_000.0 + line * 37 % 101) for line in range(1, 101)])
    slow = sorted((1_000.0 + line * 37 % 101 for line in range(1, 101)), reverse=True)[:10]
    assert [row["total_ms"] for row in figures(tmp_path).slowest] == slow


def test_more_replicas_than_are_told_apart_are_summed(tmp_path, monkeypatch):
    monkeypatch.setattr(report_figures, "MAX_REPLICAS", 4)
    publish(tmp_path, "1", [answered(line, BEGAN + line, replica=f"r{line:02}") for line in range(1, 11)])
    told = figures(tmp_path).replicas
    assert [(one.name, one.num_rows) for one in told] == [("r01", 1), ("r02", 1), ("r03", 1), ("others", 7)]


def test_tables_that_do_not_add_up_to_the_manifest_are_refused(tmp_path):
    publish(tmp_path, "1", night(50), usage={"prompt_tokens": 1, "completion_tokens": 2})
    with pytest.raises(
        UsageError, match=r"runs/1/usage: holds [\d,]+ prompt tokens, and the manifest says 1\. Restore"
    ):
        look(tmp_path)
    assert not (tmp_path / "runs/1/report.html").exists()


def test_a_table_that_is_missing_or_broken_is_named(tmp_path):
    publish(tmp_path, "1", night(50))
    part = tmp_path / "runs/1/usage/part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"usage/part-00000.parquet: can't be read"):
        look(tmp_path)
    part.unlink()
    with pytest.raises(UsageError, match=r"usage/part-00000.parquet: no such file. Restore the run's folder"):
        look(tmp_path)


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "No engine answered anything in this run."),
        ([failed(1)], "No engine answered anything in this run."),
        ([answered(1, is_carried=True)], "No engine answered anything in this run."),
        ([answered(1)], "1 replica as a table"),
        ([answered(1, queue_ms=None, first_token_ms=None, cached_tokens=None, total_ms=0.0)], "1 replica as a table"),
        ([answered(1, choices=[{"text": None, "finish_reason": None}])], "finish_reason None"),
    ],
)
def test_a_run_of_little_has_a_page_too(tmp_path, rows, words):
    publish(tmp_path, "1", rows)
    assert words in look(tmp_path).text


def test_each_chart_is_whole_and_tells_in_words_what_it_shows(tmp_path):
    for number in (1, 2):
        publish(tmp_path, str(number), night(200))
    look(tmp_path)
    text = (tmp_path / "runs/2/report.html").read_text()
    charts = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    assert len(charts) == 11
    ids = []
    for chart in charts:
        svg = ET.fromstring(chart)  # noqa: S314 - our own
        ids += [one.get("id") for one in svg.iter() if one.get("id")]
        told = [one.text for one in svg if one.tag.endswith(("}title", "}desc"))]
        assert len(told) == 2 and all(told) and svg.get("role") == "img"
        for reference in re.findall(r"url\(#(.*?)\)", chart):
            assert f'id="{reference}"' in chart
    assert len(set(ids)) == len(ids)
    assert not re.search(r"#0101\d\d|#000000|#ffffff", "".join(charts)), "a colour that isn't the page's"


def test_nothing_of_a_row_is_live_on_the_page(tmp_path):
    publish(tmp_path, "1", [answered(1, id=HOSTILE, replica=HOSTILE), failed(2, message=HOSTILE, raw=HOSTILE.encode())])
    page = look(tmp_path)
    assert page.named("script", "img", "a", "iframe", "link", "object", "base") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count("<img src=x onerror=alert(2)> [U+202E]drowssap[U+202C] [U+0000] $x^2$ {{ 7*7 }}") == 4
    assert "\u202e" not in page.text and "\x00" not in page.text
    (policy,) = [one["content"] for one in page.named("meta") if "content" in one and "default-src" in one["content"]]
    assert policy.startswith("default-src 'none'") and "script-src" not in policy


def test_bytes_that_are_no_text_are_shown_by_their_numbers(tmp_path):
    publish(tmp_path, "1", [failed(1, raw=b"\xff\xfe{" + b"x" * 1_000)])
    assert r"\xff\xfe{xxx" in look(tmp_path).text and "x" * 401 not in look(tmp_path).text


def test_several_runs_have_a_trend_up_to_the_one_that_is_shown(tmp_path):
    for number in (1, 2, 3):
        publish(tmp_path, f"run-{number}", night(50 * number), began=BEGAN + number * 86_400)
    (tmp_path / "runs" / "run-0").mkdir()
    (tmp_path / "runs" / "run-00").mkdir()
    (tmp_path / "runs" / "run-00" / "manifest.json").write_text("{")
    assert "The last 3 runs" in look(tmp_path).text
    page = look(tmp_path, "run-2")
    assert "The last 2 runs" in page.text and "run-3" not in page.text and "2026-03-02 01:00" in page.text
    assert "The last" not in look(tmp_path, "run-1").text


def test_the_nights_differences_are_shown_where_the_manifest_has_them(tmp_path):
    publish(tmp_path, "1", night(20))
    assert "Differences" not in look(tmp_path).text
    publish(tmp_path, "2", night(20), changes={"against": "1", "new": 3, "changed_answer": 1_002, "gone": 0})
    text = look(tmp_path).text
    assert "Differences from 1 Rows, by kind new 3 changed answer 1,002 gone 0" in text
    assert "3 new, 1,002 changed answer" in text


def test_a_store_is_read_and_written_like_a_folder():
    publish("memory://report/out", "1", night(50))
    assert "Run 1" in look("memory://report/out").text
    assert "Run 1" in look("memory://report/out", to="memory://report/page.html").text


def test_a_buckets_run_has_its_page_in_the_bucket(s3_server):
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("reported")
    publish("s3://reported/out", "1", night(300))
    written = report.write_report("s3://reported/out", None, wanted=Wanted(5))
    assert written.paths == tuple(f"s3://reported/out/runs/1/{name}.html" for name in ("report", "report-rows"))
    assert "Run 1" in look("s3://reported/out").text


def test_the_page_of_a_run_of_the_batch_door_has_its_figures(tmp_path, score):
    lines = [{"prompt": f"word {n}", "temperature": 0} for n in (1, 2, 3, 3)] + [{"prompt": "fail"}, {"n": 1}]
    run = score(write_lines(tmp_path / "a.jsonl", *lines))
    page = look(run.output)
    assert page.figures["rows.responses"] == "4" and page.figures["rows.errors"] == "2"
    assert {name: f"{entry(run.manifest, name):,}" for name in page.figures} == page.figures


def test_the_demos_page_is_in_its_runs_folder_and_has_its_figures(demo):
    manifest = read_published(demo.output)
    path = demo.output / "runs" / manifest["run_id"] / "report.html"
    # A terminal's width may fold the line.
    assert f"report{path}" in "".join(demo.command.out.split())
    page = Page(path.read_text())
    assert {name: f"{entry(manifest, name):,}" for name in page.figures} == page.figures
    assert "Beam searches computed" in page.text and "1 replica as a table" in page.text


def test_a_page_that_cannot_be_written_fails_no_run(tmp_path, capsys):
    publish(tmp_path, "1", night(20), usage={"prompt_tokens": 1, "completion_tokens": 2})
    assert report_job.write_beside(str(tmp_path), "1") is None
    told = capsys.readouterr().err
    assert told.startswith("overnight: the run is published, and its report isn't written: ") and told.count("\n") == 1


# --- small parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\u202e\x00\x1b", "[U+202E][U+0000][U+001B]"),
        ("Grüße 🙂 שלום", "Grüße 🙂 שלום"),
        (None, ""),
    ],
)
def test_what_hides_is_shown(text, shown):
    assert visible(text) == shown


def test_numbers_are_short():
    assert [short(value) for value in (0, 7, 999.7, 1_234, 35_000_000, 2e15)] == [
        "0",
        "7",
        "1k",
        "1.23k",
        "35M",
        "2e+03T",
    ]
    assert [clock(value) for value in (0, 0.52, 42, 3_723)] == ["0:00", "0.5 s", "0:42", "1:02:03"]
    assert as_json("</script>&\u2028") == '"\\u003c/script\\u003e\\u0026\\u2028"'


def test_the_pages_are_part_of_what_is_installed():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["pipelines"]
    found = {path for pattern in packaged for path in (ROOT / "pipelines").glob(pattern)}
    assert found == set((ROOT / "pipelines" / "pages").iterdir()) and len(found) == 5
