"""Model limits from a folder, and prompts counted as the engine counts them."""

import json

import pytest

from pipelines.limits import read_limits
from pipelines.model import Model, resolve
from pipelines.tokens import PromptCounter
from schemas.failures import Failure, UsageError
from schemas.limits import ModelLimits
from schemas.settings import EngineSettings


def limits_of(folder, config, tokenizer=None, **settings):
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return read_limits(Model(str(folder), "m", "m"), (), EngineSettings(**settings))


@pytest.mark.engine
def test_the_embedded_models_limits(engine):
    limits = read_limits(resolve(None), (), EngineSettings())
    assert (limits.context_length, limits.vocab_size, limits.max_logprobs) == (8192, 49152, 20)
    assert limits.served_names == ("smollm2-135m-instruct",) and limits.template_speaks_of("messages")
    assert engine.limits == limits


@pytest.mark.parametrize(
    ("config", "tokenizer", "length"),
    [
        ({"max_position_embeddings": 4096}, None, 4096),
        ({"n_positions": 1024}, {"model_max_length": 10**30}, 1024),
        ({"max_position_embeddings": 4096}, {"model_max_length": 512}, 512),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}}, None, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "yarn", "factor": 4}}, None, 4096),
    ],
)
def test_the_context_follows_the_configuration(tmp_path, config, tokenizer, length):
    assert limits_of(tmp_path, {"vocab_size": 10, **config}, tokenizer).context_length == length


def test_a_text_models_part_of_a_larger_one_counts(tmp_path):
    limits = limits_of(
        tmp_path, {"text_config": {"vocab_size": 7, "max_position_embeddings": 8}}, {"chat_template": "t"}
    )
    assert (limits.vocab_size, limits.context_length, limits.chat_template) == (7, 8, "t")


def test_settings_go_before_the_folder(tmp_path):
    limits = limits_of(
        tmp_path, {"vocab_size": 10, "max_position_embeddings": 99}, max_model_len=9, max_logprobs=-1, max_choices=3
    )
    assert (limits.context_length, limits.max_logprobs, limits.max_choices) == (9, 10, 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [("{}", "no vocab_size"), ('{"vocab_size": 1}', "no context length"), ("[]", "no JSON object"), ("{", "as JSON")],
)
def test_a_folder_that_does_not_say_is_named(tmp_path, config, words):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match=words):
        read_limits(Model(str(tmp_path), "m", str(tmp_path)), (), EngineSettings())


@pytest.fixture(scope="module")
def counter():
    limits = ModelLimits(("m",), 32, 49152, 20, 128, 32, chat_template="x")
    return PromptCounter(resolve(None).path, limits)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"prompt": "The capital of France is"}, 5),
        ({"prompt": ["The capital of France is", "a"]}, 6),
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": [[1], [2, 3]]}, 3),
        ({"prompt": [1] * 16}, 16),
        ({"prompt": [1] * 17}, "found 17 prompt tokens and max_tokens 16 (the default), more than the model's context"),
        ({"prompt": [1] * 17, "max_tokens": 15}, 17),
        ({"prompt": [1] * 99, "max_tokens": 2, "truncate_prompt_tokens": 30}, 30),
        ({"prompt": [1] * 99, "max_tokens": 1, "truncate_prompt_tokens": -1}, 31),
        ({"prompt": [[1], [2] * 40]}, "prompt[1]: found 40 prompt tokens"),
        ({"prompt": "a" * 10_000_000}, "prompt tokens and max_tokens 16"),
        ({"prompt": "a" * 60_000_000, "truncate_prompt_tokens": 9}, 9),
        ({"prompt": "a" * 60_000_000, "truncate_prompt_tokens": -1, "max_tokens": 1}, 31),
        ({"prompt": [1], "max_tokens": 10**12}, "max_tokens 1,000,000,000,000, more than"),
    ],
)
def test_a_prompt_and_its_answer_fit_the_context_or_are_refused(counter, body, found):
    counted = counter.count(body, "/v1/completions")
    if isinstance(found, int):
        assert counted.num_tokens == found
    else:
        assert isinstance(counted, Failure) and counted.reason == "prompt_too_long" and found in counted.message


def test_a_chat_needs_room_for_one_token_at_least(counter):
    def chat(words, **more):
        return counter.count(
            {"messages": [{"role": "system", "content": " a" * words}], **more}, "/v1/chat/completions"
        )

    length = chat(10).num_tokens
    assert chat(10, max_tokens=32 - length).num_tokens == length
    assert "an answer of one token at least" in chat(40).message
    assert chat(10, chat_template_kwargs={"tools": []}).reason == "template_refused"


def test_prompts_are_placed_by_what_the_engine_will_see_of_them(counter):
    from pipelines.prefixes import path_of

    wide = PromptCounter(counter._path, ModelLimits(("m",), 8192, 49152, 20, 128, 32, adapter_names=("formal",)))

    def place(**body):
        return wide.count(body, "/v1/completions").path

    tokens = list(range(100, 200))
    assert place(prompt=tokens) == path_of(tokens, "\0")
    assert place(prompt=[tokens, [1]]) == path_of(tokens, "\0")
    assert place(prompt=tokens, truncate_prompt_tokens=40) == path_of(tokens[-40:], "\0")
    assert place(prompt=tokens, truncate_prompt_tokens=40, truncation_side="right") == path_of(tokens[:40], "\0")
    # Another cache is another root.
    apart = [place(prompt=tokens, **own) for own in ({}, {"model": "formal"}, {"cache_salt": "s"})]
    assert len({path[:4] for path in apart}) == 3
    assert place(prompt=tokens, model="m") == apart[0]
    text = "word " * 100
    assert place(prompt=text) == path_of(wide._encode(text, True), "\0") and len(place(prompt=text)) > 8
