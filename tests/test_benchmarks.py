"""The parts of the benchmarks that need no engine: their work, what could be cached of it, and the form of figures."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pipelines.engine import Engine
from tests.benchmarks import report
from tests.benchmarks.sides import Run, interleave, run_batch, work
from tests.benchmarks.sides.watched import Watched

FIGURES = [
    report.Figure("speed", [30.0, 10.0, 20.0], [5.0, 10.0, 20.0], aim=1.5, unit="rows/s"),
    report.Figure("alone", [1.0, 3.0], [], aim=None, unit="s"),
]


def test_the_same_work_is_made_again():
    assert work.make_requests(20) == work.make_requests(20)
    assert work.make_shared_prefixes(40) == work.make_shared_prefixes(40)
    assert len({body["prompt"] for body in work.make_requests(20)}) == 20


def test_a_watched_engine_is_an_engine(tmp_path):
    names = {name for name in vars(Engine) if not name.startswith("_")}
    inner = SimpleNamespace(**dict.fromkeys(names, len))
    assert "submit" in names and all(hasattr(Watched(inner, str(tmp_path)), name) for name in names)


def test_chats_ask_what_the_completions_ask():
    completions = work.make_requests(5)
    for completion, line in zip(completions, work.as_chats(completions), strict=True):
        body = line["body"]
        assert line["url"] == "/v1/chat/completions"
        assert body["messages"][0]["content"] == completion["prompt"]
        assert all(body[name] == completion[name] for name in ("max_tokens", "ignore_eos", "temperature"))


def test_a_fifth_of_the_requests_over_shared_prefixes_are_repetitions():
    made = work.make_shared_prefixes(100, num_prefixes=4)
    assert len(made.requests) == 100 and len(set(made.prompts)) == 80
    beginnings = Counter(next(p for p in made.prefixes if prompt.startswith(p)) for prompt in set(made.prompts))
    assert set(beginnings.values()) == {20}
    assert all(400 <= len(prefix.split()) <= 601 for prefix in made.prefixes)


@pytest.mark.parametrize(
    ("prompts", "most"),
    [
        ([], 0),
        ([[1] * 10, [1] * 10], 0),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], 0),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 4),
        ([[1, 2, 3, 4, 5], [1, 2, 9, 9, 9], [7, 7, 7]], 2),
        # The last token of a prompt is computed, and with it its block.
        ([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]], 2),
    ],
)
def test_each_block_of_the_tree_of_prompts_is_computed_once(prompts, most):
    assert work.count_shareable(prompts, block_size=2) == most


def test_every_second_round_goes_backwards(capsys):
    order = []

    def side(name):
        def measure():
            order.append(name)
            return Run(num_rows=2, num_tokens=30, generation_s=2.0, whole_s=5.0)

        return measure

    runs = interleave({"one": side("one"), "two": side("two")}, 3)
    assert order == ["one", "two", "two", "one", "one", "two"]
    assert list(runs) == ["one", "two"] and all(len(done) == 3 for done in runs.values())
    assert "one: 1.000 rows/s, 15.0 tokens/s over 2.0 s of 5.0 s" in capsys.readouterr().err


def test_engine_arguments_become_flags():
    flags = run_batch.make_flags({"block_size": 32, "enforce_eager": True})
    assert flags == ["--block-size", "32", "--enforce-eager"]


def test_a_figure_is_the_ratio_of_medians():
    assert FIGURES[0].to_json() == {
        "figure": "speed",
        "ours": 20.0,
        "peer": 10.0,
        "ratio": 2.0,
        "aim": 1.5,
        "unit": "rows/s",
        "rounds": [[30.0, 5.0], [10.0, 10.0], [20.0, 20.0]],
    }
    assert FIGURES[1].to_json()["ratio"] is None


@pytest.mark.parametrize(("ending", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_figures_of_several_files_are_shown_and_drawn(tmp_path, ending, begins):
    for number, figure in enumerate(FIGURES):
        (tmp_path / f"{number}.json").write_text(json.dumps([figure.to_json()]))
    app = report.typer.Typer()
    app.command()(report.main)
    chart = tmp_path / f"chart.{ending}"
    done = CliRunner().invoke(app, [str(tmp_path / "0.json"), str(tmp_path / "1.json"), "--chart", str(chart)])
    assert done.exit_code == 0 and "speed" in done.output and "alone" in done.output
    assert chart.read_bytes().startswith(begins)
