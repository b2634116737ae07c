"""The report's pages in a real browser: what they show, in light and dark, wide and narrow; what they never do."""

import re

import pytest
from PIL import Image

from pipelines.report import write_report
from pipelines.report_rows import Wanted
from tests.browser import Visit, chromium, find_chromium
from tests.published import BEGAN, answered, failed, night, publish

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium on this machine: install chromium or google-chrome to run this"
)

PWNED = "window.pwned=(window.pwned||0)+1"
HOSTILE = [
    f"<script>{PWNED}</script>",
    f"</script><script>{PWNED}</script>",
    f"<img src=x onerror='{PWNED}'><svg onload={PWNED}>",
    f"[click](javascript:{PWNED}) <a href='javascript:{PWNED}'>click</a> <iframe src='http://127.0.0.1:9/x'></iframe>",
    "pay \u202e0001\u202c now \u2066hidden\u2069",
    "a\x00b\x1b[31m",
    "<!--<script>",
    "🙂 שלום </style></title><base href='http://127.0.0.1:9/'>",
    "${7*7} {{7*7}} <%= 7*7 %>",
]
FILLED = "svg.chart path[style*='fill: var(--one)']"
LOGPROBS = {"tokens": [" Par", f"<img src=x onerror='{PWNED}'>"], "token_logprobs": [-0.01, -4.0], "top_logprobs": None}


def rows():
    made = night(900, replicas=3, seed=4)
    for place, text in enumerate(HOSTILE):
        choices = [{"index": 0, "text": text, "finish_reason": "stop"}]
        made[place] = answered(
            place + 1, request={"prompt": text}, choices=choices, id=text, extra=f'{{"x": "{place}"}}'
        )
    made[9] = answered(10, choices=[{"text": " Paris", "finish_reason": "length", "logprobs": LOGPROBS}])
    made[10] = failed(11, message="\n".join(HOSTILE), raw="\n".join(HOSTILE).encode() + b"\xff", param=HOSTILE[0])
    made[11] = answered(12, request={"prompt": "long " * 8_000}, total_ms=60_000.0)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose rows mean harm, with its pages, and its manifest."""
    output = tmp_path_factory.mktemp("pages")
    for day in range(1, 4):
        publish(
            output, f"2026022{day}T010000Z-aaaaaa", night(200 + 50 * day, seed=day), began=BEGAN - (9 - day) * 86_400
        )
    prices = {"prompt": 0.1, "completion": 0.4, "replica_hour": 1.2}
    manifest = publish(output, "20260301T010000Z-bbbbbb", rows(), prices=prices)
    write_report(str(output), None, wanted=Wanted(60))
    return output / "runs" / manifest["run_id"], manifest


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


def lightness(path):
    """Of the page's corner, from 0 to 255."""
    return sum(Image.open(path).convert("RGB").getpixel((3, 3))) / 3


@pytest.mark.parametrize("name", ["report.html", "report-rows.html"])
def test_a_page_fits_wide_and_narrow_light_and_dark_and_asks_for_nothing(run, browser, tmp_path, name):
    path = run[0] / name
    corners = {}
    for scheme in ("light", "dark"):
        for width, height in ((1280, 900), (390, 844)):
            visit = Visit(browser, path, scheme=scheme, width=width, height=height)
            picture = tmp_path / f"{scheme}-{width}.png"
            visit.page.screenshot(path=picture, full_page=True)
            corners[scheme] = lightness(picture)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
            assert visit.page.evaluate("window.pwned") is None
            assert visit.has_kept_to_itself(path), (visit.requests, visit.complaints)
            visit.context.close()
    assert corners["light"] > 240 and corners["dark"] < 40


def test_the_figures_that_are_seen_are_the_manifests(run, browser):
    folder, manifest = run
    page = Visit(browser, folder / "report.html").page
    seen = page.evaluate("[...document.querySelectorAll('[data-figure]')].map(e => [e.dataset.figure, e.innerText])")
    assert len(seen) > 8
    for name, text in seen:
        told = manifest
        for part in name.split("."):
            told = told[part]
        assert text == (f"{told:,.2f}" if isinstance(told, float) else f"{told:,}"), name


def test_charts_are_drawn_in_the_colours_of_the_scheme_and_have_names(run, browser):
    shades = []
    for scheme in ("light", "dark"):
        page = Visit(browser, run[0] / "report.html", scheme=scheme).page
        charts = page.get_by_role("img").filter(visible=True)
        assert charts.count() == 9
        boxes = [charts.nth(number).bounding_box() for number in range(charts.count())]
        assert all(box["width"] > 300 and box["height"] > 60 for box in boxes)
        assert page.get_by_role("img", name="The run over time").filter(visible=True).count() == 1
        shades.append(page.evaluate(f"getComputedStyle(document.querySelector({FILLED!r})).fill"))
    assert shades[0] != shades[1] and all(re.fullmatch(r"rgb\(.*\)", shade) for shade in shades)


def test_hostile_rows_execute_nothing_and_hide_nothing(run, browser):
    path = run[0] / "report-rows.html"
    visit = Visit(browser, path)
    page = visit.page
    for summary in page.locator("summary").all():
        summary.click()
    words = page.inner_text("#list")
    assert all(text in words for text in (HOSTILE[0], HOSTILE[1], HOSTILE[3], HOSTILE[6], HOSTILE[8]))
    assert "pay U+202E0001U+202C now U+2066hiddenU+2069" in words and "aU+0000bU+001B[31m" in words
    assert not {"\u202e", "\x00", "\x1b"} & set(words) and "שלום" in words
    page.locator("select[name=kind]").select_option("error")
    assert all(text in page.inner_text("#list") for text in HOSTILE[:4]) and "\\xff" in page.inner_text("#list")
    live = "#list :is(script, img, svg, iframe, base, style, a, [onerror], [onload], [href], [src])"
    assert page.locator(live).count() == 0
    assert page.evaluate("window.pwned") is None
    assert visit.has_kept_to_itself(path), (visit.requests, visit.complaints)


def test_the_policy_refuses_what_would_come_in_all_the_same(run, browser):
    for name in ("report.html", "report-rows.html"):
        visit = Visit(browser, run[0] / name)
        visit.page.evaluate(
            """() => {
                const script = document.createElement("script");
                try { script.textContent = "window.pwned = 1"; } catch {}
                const image = document.createElement("img");
                image.src = "http://127.0.0.1:9/x";
                document.body.append(script, image);
            }"""
        )
        visit.page.wait_for_timeout(200)
        assert visit.page.evaluate("window.pwned") is None
        assert any("Content Security Policy" in text for text in visit.complaints)


def test_rows_are_filtered_sorted_and_paged(run, browser):
    page = Visit(browser, run[0] / "report-rows.html").page
    manifest = run[1]
    shown = 60 + min(60, manifest["rows"]["errors"])
    assert page.inner_text("#where") == f"1\u201320 of {shown}" and page.locator("article").count() == 20
    page.get_by_role("button", name="Next").click()
    assert page.inner_text("#where") == f"21\u201340 of {shown}"
    page.get_by_role("button", name="Previous").click()
    page.get_by_label("Order").select_option("slowest")
    assert "ticket-12" in page.locator("article").first.inner_text()
    page.get_by_label("Text contains").fill("LONG long")
    assert page.inner_text("#where") == "1\u20131 of 1"
    assert page.locator("pre").first.bounding_box()["height"] < 300
    page.get_by_role("button", name=re.compile("Show .* characters")).first.click()
    assert page.locator("pre").first.bounding_box()["height"] > 1_000
    assert "All of it: overnight report --output" in page.inner_text("#list")
    page.get_by_label("Text contains").fill("")
    page.get_by_label("Error reason").select_option("schema")
    assert set(page.locator("article .badge.bad").all_inner_texts()) == {"schema", "422"}
    page.get_by_label("Id or place").fill("nothing is like this")
    assert page.inner_text("#where") == "no row of this page is like that"


def test_tokens_are_coloured_by_their_probability_and_listed(run, browser):
    page = Visit(browser, run[0] / "report-rows.html").page
    page.get_by_label("Finish reason").select_option("length")
    row = page.locator("article", has_text="ticket-10")
    assert row.locator(".token").evaluate_all("all => all.map(one => one.className)") == ["token heat0", "token heat4"]
    row.get_by_text("2 tokens as a table").click()
    assert "1.8 %" in row.locator("table").inner_text() and "-4.000" in row.locator("table").inner_text()
