"""Web search: what a provider finds stands before the question, and its faults are nobody else's."""

import asyncio

import pytest

from pipelines.web_search import WebPage, WebSearch, load_search
from schemas.failures import UsageError

BODY = {"context": [{"type": "System", "text": "Be kind."}, {"type": "Human", "text": "dogs?"}]}


async def find(text):
    return [WebPage("Dogs", "http://dogs.example", f"of {text} " + "woof " * 1_000)] * 9


async def find_briefly(text):
    return [WebPage("Dogs", "http://dogs.example", "woof")]


async def fail(text):
    raise RuntimeError(text)


async def hang(text):
    await asyncio.sleep(60)


async def find_nothing(text):
    return []


def add_results(provider, body=BODY):
    return asyncio.run(WebSearch(provider, time_limit_s=0.2).add_results(body))


def test_what_is_found_stands_before_the_question_and_is_bounded():
    body, said = add_results(find)
    assert said == "done" and [turn["type"] for turn in body["context"]] == ["System", "LinkedWebpages", "Human"]
    text = body["context"][1]["text"]
    assert text.startswith("Dogs (http://dogs.example)\nof dogs? woof") and 5 * 2_000 < len(text) < 5 * 2_100
    assert len(BODY["context"]) == 2


def test_a_page_that_was_cut_in_a_character_is_text_all_the_same():
    async def find_half(text):
        return [WebPage("Dogs", "http://dogs.example", "woof \ud83d")]

    body, said = add_results(find_half)
    assert said == "done" and body["context"][1]["text"].encode().endswith(b"woof ?")


@pytest.mark.parametrize(
    ("provider", "body", "said"),
    [
        (None, BODY, "unavailable"),
        (find, {**BODY, "web_search": False}, "off"),
        (find, {"context": BODY["context"][:1]}, "off"),
        (fail, BODY, "failed"),
        (hang, BODY, "failed"),
        (find_nothing, BODY, "done"),
    ],
)
def test_without_results_a_body_stays_as_it_was(provider, body, said):
    assert add_results(provider, body) == (body, said)


@pytest.mark.parametrize("spec", ["no.such.module:f", "json:nothing", "json", "json:dumps"])
def test_a_provider_that_isnt_one_is_refused(spec):
    with pytest.raises(UsageError, match=f"--web-search {spec}: expected"):
        load_search(spec)


def test_a_provider_is_named_by_its_module():
    search = load_search("tests.test_web_search:find")
    assert asyncio.run(search.add_results(BODY))[1] == "done"
