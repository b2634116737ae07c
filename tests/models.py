"""Small models and adapters with random weights, that a test writes for itself. Seeded: the same ones every time."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pipelines.model import resolve


def write_llama(folder: Path, *, num_layers: int = 2, num_heads: int = 4, hidden: int = 128) -> Path:
    """A Llama with the embedded model's tokenizer."""
    embedded = Path(resolve(None).path)
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*embedded.glob("tokenizer*"), *embedded.glob("*.jinja")):
        shutil.copy(file, folder)
    config = json.loads((embedded / "config.json").read_text()) | {
        "dtype": "float32",
        "hidden_size": hidden,
        "head_dim": hidden // num_heads,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 512,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "num_hidden_layers": num_layers,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    random = np.random.default_rng(0)
    tensors = {
        # Norms of one; the rest wide enough that the likeliest token stands out.
        f"{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of one layer, as (outputs, inputs)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write_adapter(
    folder: Path, model: Path, *, rank: int = 8, seed: int = 0, strength: float = 1.0, **more: Any
) -> Path:
    """A LoRA on q_proj and v_proj of a Llama's folder, as PEFT saves one. `more`: fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in ("self_attn.q_proj", "self_attn.v_proj"):
            outputs, inputs = _layer_shapes(config)[name]
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = random.normal(0, inputs**-0.5, (rank, inputs)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = random.normal(0, strength, (outputs, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter | more))
    return folder


# ChatML that tells of tools in the way of Hermes models, which vLLM's parser of that name reads.
TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}To call a tool, write <tool_call>
{"name": ..., "arguments": {...}}
</tool_call>. The tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif not (tools and loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def with_template(folder: Path, template: str = TOOL_TEMPLATE) -> Path:
    """The embedded model with another chat template."""
    folder.mkdir()
    for file in Path(resolve(None).path).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(template)
    return folder
