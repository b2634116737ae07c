"""The Grafana dashboard asks for metrics that there are, by the names and labels that they are exported with."""

import json
import re

import pytest
from ray.util.metrics import Metric

from pipelines.meters import DoorMeters, EngineMeters, RowMeters, TokenMeter
from tests.conftest import ROOT

BOARD = json.loads((ROOT / "jobs" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
# Ray's own labels of every metric.
RAYS_LABELS = {"SessionName", "WorkerId", "le"}


@pytest.fixture(scope="module")
def exported():
    """The labels of each exported name, of the metrics that the code makes."""
    made = [metric for meters in (DoorMeters(), RowMeters(), EngineMeters()) for metric in vars(meters).values()]
    made = [metric.metric if isinstance(metric, TokenMeter) else metric for metric in made]
    made = [metric for metric in made if isinstance(metric, Metric)]
    names = {}
    for metric in made:
        name = f"ray_{metric.info['name']}"
        kind = type(metric).__name__
        suffixes = {"Counter": ["_total"], "Gauge": [""], "Histogram": ["_bucket", "_sum", "_count"]}[kind]
        names |= {name + suffix: set(metric.info["tag_keys"]) for suffix in suffixes}
    return names


def metrics_of(query):
    return set(re.findall(r"ray_\w+", query))


@pytest.mark.parametrize("query", QUERIES)
def test_each_query_is_of_metrics_and_labels_that_there_are(query, exported):
    assert metrics_of(query) <= exported.keys()
    asked = set(re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", query))
    asked |= {one for by in re.findall(r"by \((.*?)\)", query) for one in by.split(", ")}
    known = set().union(*(exported[name] for name in metrics_of(query)))
    assert asked <= known | RAYS_LABELS


def test_each_metric_has_a_panel(exported):
    shown = {re.sub("_(total|bucket|sum|count)$", "", name) for query in QUERIES for name in metrics_of(query)}
    assert shown == {re.sub("_(total|bucket|sum|count)$", "", name) for name in exported}


def test_panels_have_words_and_places_of_their_own():
    assert all(panel["title"] and panel["description"] for panel in BOARD["panels"])
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and all(x < 24 for x, _ in cells)
