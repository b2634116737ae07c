"""A model whose template knows tools, and what an operator allows: an engine of its own, so in the long set."""

import base64
import io
import json
import shutil
from pathlib import Path

import pytest

from pipelines.checks import Checks
from pipelines.model import resolve
from pipelines.vllm_engine import VllmEngine
from schemas.failures import Failure
from schemas.requests import Answered, Request
from schemas.settings import EngineSettings

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEMPLATE = """
{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>
{% endfor %}
{%- for document in documents or [] %}<document>{{ document.text }}</document>
{% endfor %}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        # Without it the engine lets arguments follow their schema or not.
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}
QUESTION = [{"role": "user", "content": "How is the weather in Rome?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.fixture(scope="module")
def send(tmp_path_factory):
    """Judges a body as the batch door does, and sends it to the engine."""
    folder = tmp_path_factory.mktemp("model") / "tools"
    shutil.copytree(resolve(None).path, folder, symlinks=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = EngineSettings(
        dtype="float32", max_num_seqs=8, kv_cache_gib=0.5, cores=1, max_model_len=2048, tool_parser="hermes",
        allow=("chat_template", "prompt_embeds"), max_logprobs=-1,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("claims")))
        engine = VllmEngine.start(resolve(str(folder)), (), settings)
    checks = Checks("batch", str(folder), engine.limits)

    def send(endpoint="/v1/chat/completions", **body):
        judged = checks.check(body, endpoint)
        assert not isinstance(judged, Failure), judged
        event = engine.submit(Request("r", endpoint, json.dumps(body)), lane="batch").result(timeout=300)
        assert isinstance(event, Answered), event
        if body.get("prompt_embeds") is None:
            assert event.usage["prompt_tokens"] == judged.num_tokens
        return event.body["choices"][0]

    yield send
    engine.close()


def test_a_tools_call_has_its_form(send):
    for chosen in ("required", {"type": "function", "function": {"name": "weather"}}):
        choice = send(messages=QUESTION, tools=[TOOL], tool_choice=chosen, max_tokens=80, temperature=0)
        assert choice["message"].get("tool_calls"), choice
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in {"Rome", "Oslo"}


@pytest.mark.parametrize("chosen", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_tools_stand_in_the_prompt(send, chosen):
    assert send(messages=QUESTION, tools=[TOOL], max_tokens=8, temperature=0, **chosen)["finish_reason"]


def test_documents_stand_in_the_prompt(send):
    body = {"messages": [{"role": "user", "content": "Say the capital's name."}], "max_tokens": 12, "temperature": 0}
    texts = [send(**body, documents=[{"text": text}])["message"]["content"] for text in ("Paris " * 20, "Oslo " * 20)]
    assert texts[0] != texts[1]


def test_calls_and_their_results_go_back_to_the_model(send):
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "sunny"})
    assert send(messages=messages, max_tokens=8, temperature=0)["message"]["content"]
    del messages[1]["content"]
    assert send(messages=messages, max_tokens=8, temperature=0)["message"]["content"]


def test_a_request_brings_its_template_where_that_is_allowed(send):
    body = {"messages": QUESTION, "max_tokens": 4, "temperature": 0, "chat_template": "The capital of France is"}
    assert "Paris" in send(**body)["message"]["content"]


def test_a_request_brings_embeddings_where_that_is_allowed(send):
    import torch
    from safetensors import safe_open

    with safe_open(next(Path(resolve(None).path).glob("*.safetensors")), "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight")
    buffer = io.BytesIO()
    torch.save(table[[504, 3575, 282, 4649, 314]].float(), buffer)
    embeds = base64.b64encode(buffer.getvalue()).decode()
    choice = send("/v1/completions", prompt_embeds=embeds, max_tokens=4, temperature=0)
    assert choice["text"].startswith(" Paris")


def test_all_the_vocabularys_logprobs_come_where_there_is_no_limit(send):
    choice = send("/v1/completions", prompt="a", max_tokens=1, logprobs=-1)
    assert len(choice["logprobs"]["top_logprobs"][0]) > 40_000
