"""Adapters: checked against their model before an engine is taken, and answered with by name on the real engine."""

import json
import tempfile
from pathlib import Path
from typing import get_args

import fsspec
import pytest

from pipelines import adapters
from pipelines.adapters import Adapter, lora_arguments, resolve_adapters
from pipelines.check import check
from pipelines.limits import read_limits
from pipelines.model import Model, resolve
from pipelines.vllm_engine import VllmEngine
from schemas.failures import EngineUnusable, UsageError
from schemas.requests import Answered, Request
from schemas.settings import EngineSettings, InputSettings
from tests.conftest import Silence, write_lines
from tests.models import write_adapter, write_llama

SMALL = EngineSettings(dtype="float32", max_num_seqs=16, kv_cache_gib=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return resolve(str(write_llama(tmp_path_factory.mktemp("models") / "llama")))


def of(spec, model):
    return resolve_adapters({"a": str(spec)}, model)["a"]


def test_an_adapter_of_the_model_is_taken_with_its_largest_rank(tmp_path, model):
    folder = write_adapter(tmp_path / "lora", Path(model.path), rank=8)
    assert of(folder, model) == Adapter(str(folder), 8, str(folder))
    patterned = write_adapter(tmp_path / "patterned", Path(model.path), rank=2, rank_pattern={"v_proj": 24})
    assert of(patterned, model).rank == 24


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"r": 0}, "found rank 0 in adapter_config.json, expected 1 to 512"),
        ({"r": 1024}, "found rank 1024"),
        ({"r": "8"}, "found rank '8'"),
        ({"r": None}, "found rank None"),
        ({"rank_pattern": [3]}, r"found rank \[3\]"),
        ({"r": 4}, "adapter_config.json says rank 4, the weights of .* have"),
        ({"peft_type": "IA3"}, "its peft_type is IA3, expected LORA"),
        ({"use_dora": True, "bias": "all"}, "vLLM has no use_dora and no bias of adapters"),
    ],
)
def test_a_configuration_that_vllm_cannot_take_is_named(tmp_path, model, more, words):
    folder = write_adapter(tmp_path / "lora", Path(model.path), **more)
    with pytest.raises(UsageError, match=f"^--adapter a={folder}: {words}"):
        of(folder, model)


@pytest.mark.parametrize(
    ("other", "words"), [({"hidden": 64}, r"matrix A .* is 8 x 64, .* 128 x 128"), ({"num_layers": 3}, "2 layers")]
)
def test_another_models_adapter_is_named(tmp_path, model, other, words):
    folder = write_adapter(tmp_path / "lora", write_llama(tmp_path / "other", **other))
    with pytest.raises(UsageError, match=f"another model's adapter: .*{words}"):
        of(folder, model)


def test_files_that_are_cut_or_missing_are_named(tmp_path, model):
    folder = write_adapter(tmp_path / "lora", Path(model.path))
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"adapter_model.safetensors: can't be read as safetensors"):
        of(folder, model)
    weights.unlink()
    with pytest.raises(UsageError, match="not an adapter folder, it lacks weights"):
        of(folder, model)
    weights.touch()
    config.write_text("{")
    with pytest.raises(UsageError, match=r"adapter_config.json: can't be read as JSON"):
        of(folder, model)


def test_an_adapter_in_an_object_store_is_brought_here(tmp_path, model, monkeypatch):
    monkeypatch.setenv("OVERNIGHT_CACHE", str(tmp_path))
    folder, store = write_adapter(tmp_path / "lora", Path(model.path)), fsspec.filesystem("memory")
    for file in folder.iterdir():
        store.pipe(f"/adapters/lora/{file.name}", file.read_bytes())
    found = of("memory://adapters/lora", model)
    assert found.spec == "memory://adapters/lora" and (Path(found.path) / "adapter_config.json").is_file()


def test_a_name_belongs_to_the_model_or_to_one_adapter(model):
    with pytest.raises(UsageError, match="--adapter llama: the model itself is served under this name"):
        read_limits(model, (), EngineSettings(), ["llama"])
    assert read_limits(model, ("other",), EngineSettings(), ["llama"]).adapter_names == ("llama",)


def test_a_check_knows_the_names_of_adapters(tmp_path, ray_cluster, model):
    folder = write_adapter(tmp_path / "lora", Path(model.path))
    lines = ({"prompt": "a", "model": name} for name in ("llama", "formal", "nobody"))
    path = write_lines(tmp_path / "a.jsonl", *lines)
    settings = InputSettings(inputs=(str(path),), model=model.spec, adapters={"formal": str(folder)})
    report = check(settings, Silence())
    assert report.num_accepted == 2 and report.reasons == {"unknown_model": 1}
    assert "served here is llama or formal" in report.rejections[0]["message"]


def test_the_engine_has_room_for_the_largest_of_all_adapters():
    assert lora_arguments({}) == {}
    two = {"a": Adapter("", 3, ""), "b": Adapter("", 17, "")}
    assert lora_arguments(two) == {"enable_lora": True, "max_loras": 3, "max_lora_rank": 32}


@pytest.mark.engine
def test_the_ranks_are_vllms():
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == adapters.RANKS


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The real engine on the embedded model with two adapters of it, in float32 as the shared engine is."""
    folder = tmp_path_factory.mktemp("adapters")
    base = resolve(None)
    # The second is much weaker, and has another rank.
    strong = write_adapter(folder / "strong", Path(base.path), rank=8, strength=1.0)
    weak = write_adapter(folder / "weak", Path(base.path), rank=12, seed=1, strength=0.2)
    with pytest.MonkeyPatch.context() as patch:
        # Core claims of its own: the shared engine holds all cores.
        patch.setattr(tempfile, "tempdir", str(folder))
        loaded = resolve_adapters({"strong": str(strong), "weak": str(weak)}, base)
        engine = VllmEngine.start(base, (), SMALL, adapters=loaded)
    yield engine
    engine.close()


PROMPT = "The capital of France is"


def ask(engine, endpoint="/v1/completions", **body):
    body = {"temperature": 0, "max_tokens": 8, **body}
    return engine.submit(Request("r", endpoint, json.dumps(body)), lane="batch").result(timeout=120)


def texts(event):
    assert isinstance(event, Answered), event
    return [choice.get("text") or choice["message"]["content"] for choice in event.body["choices"]]


@pytest.mark.engine
@pytest.mark.slow
def test_the_models_own_answers_are_as_without_adapters(adapted, engine):
    for body in ({"prompt": PROMPT}, {"prompt": PROMPT, "model": "smollm2-135m-instruct", "logprobs": 2}):
        with_adapters, without = ask(adapted, **body), ask(engine, **body)
        assert texts(with_adapters) == texts(without)
        assert with_adapters.body["model"] == without.body["model"] == "smollm2-135m-instruct"


@pytest.mark.engine
@pytest.mark.slow
def test_a_request_that_names_an_adapter_is_answered_with_it(adapted):
    names = ("smollm2-135m-instruct", "strong", "weak")
    events = {name: ask(adapted, prompt=PROMPT, model=name, logprobs=1) for name in names}
    assert texts(events["strong"]) != texts(events["smollm2-135m-instruct"])
    told = [event.body["choices"][0]["logprobs"]["token_logprobs"] for event in events.values()]
    assert len({tuple(logprobs) for logprobs in told}) == 3
    assert all(event.body["model"] == name for name, event in events.items())
    chat = ask(
        adapted, "/v1/chat/completions", model="strong", messages=[{"role": "user", "content": "What is a cat?"}]
    )
    assert isinstance(chat, Answered) and chat.body["model"] == "strong"


@pytest.mark.engine
@pytest.mark.slow
def test_equal_prompts_side_by_side_keep_to_their_own_adapter(adapted):
    """Also where their prefixes are cached: an adapter's cache is its own."""
    names, prompt = ["smollm2-135m-instruct", "strong", "weak"], "word " * 100 + PROMPT
    alone = [texts(ask(adapted, prompt=prompt, model=name)) for name in names]
    bodies = [json.dumps({"prompt": prompt, "model": name, "temperature": 0, "max_tokens": 8}) for name in names * 3]
    sent = [adapted.submit(Request("r", "/v1/completions", body), lane="batch") for body in bodies]
    assert [texts(future.result(timeout=120)) for future in sent] == alone * 3


@pytest.mark.engine
@pytest.mark.slow
def test_prompts_that_are_computed_in_one_step_keep_to_their_own_adapter(adapted):
    """Nothing of them is cached: the rows without an adapter stand beside those with one from the first token on."""
    names = ["smollm2-135m-instruct", "strong", "weak"]
    alone = [texts(ask(adapted, prompt=PROMPT, model=name, cache_salt="alone")) for name in names]
    bodies = [
        json.dumps({"prompt": PROMPT, "model": name, "temperature": 0, "max_tokens": 8, "cache_salt": f"{index}"})
        for index, name in enumerate(names * 2)
    ]
    sent = [adapted.submit(Request("r", "/v1/completions", body), lane="batch") for body in bodies]
    assert [texts(future.result(timeout=120)) for future in sent] == alone * 2


@pytest.mark.engine
@pytest.mark.slow
def test_beams_search_with_the_adapter(adapted):
    """The best answer of a search is at least as likely, under the adapter itself, as its likeliest next tokens."""
    found = ask(adapted, prompt=PROMPT, model="strong", use_beam_search=True, n=3, ignore_eos=True, logprobs=1)
    own = ask(adapted, prompt=PROMPT, use_beam_search=True, n=3, ignore_eos=True)
    assert found.body["model"] == "strong" and not set(texts(found)) & set(texts(own))
    greedy = ask(adapted, prompt=PROMPT, model="strong", ignore_eos=True, logprobs=1)
    likelihood = sum(greedy.body["choices"][0]["logprobs"]["token_logprobs"])
    best = found.body["choices"][0]
    assert best["cumulative_logprob"] >= likelihood - 1e-3
    echoed = ask(adapted, prompt=PROMPT + best["text"], model="strong", echo=True, max_tokens=0, logprobs=1)
    scored = echoed.body["choices"][0]["logprobs"]["token_logprobs"][-8:]
    assert sum(scored) == pytest.approx(best["cumulative_logprob"], abs=0.05)


@pytest.mark.engine
@pytest.mark.slow
def test_a_name_that_nobody_has_is_a_404(adapted):
    event = ask(adapted, prompt=PROMPT, model="nobody")
    assert (event.failure.status_code, event.failure.param) == (404, "model")


@pytest.mark.engine
@pytest.mark.slow
def test_an_adapter_that_the_engine_cannot_load_ends_its_start_in_one_line(tmp_path, model, own_core_claims):
    folder = write_adapter(tmp_path / "lora", Path(model.path), target_modules="all-linear", init_lora_weights="pissa")
    with pytest.raises(
        EngineUnusable, match=r"the engine didn't start: .*adapter a can't be loaded: .*pissa"
    ) as caught:
        VllmEngine.start(model, (), SMALL, adapters=resolve_adapters({"a": str(folder)}, model))
    assert "\n" not in caught.value.reason
