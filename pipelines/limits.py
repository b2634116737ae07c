"""Model limits from a model's folder, without its weights; the engine asserts at its start that they are its own."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.model import Model, read_json
from schemas.failures import UsageError
from schemas.limits import ModelLimits
from schemas.settings import EngineSettings

# Under which names configurations give the longest sequence.
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# These kinds of rotary scaling are part of the length that the configuration gives; others multiply it.
_SCALED_ALREADY = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}


def read_limits(
    model: Model, served_names: tuple[str, ...], settings: EngineSettings, adapter_names: Iterable[str] = ()
) -> ModelLimits:
    """What a model can take under an engine's settings. Raises UsageError where its folder doesn't say, and where an
    adapter has a name of the model itself."""
    folder = Path(model.path)
    config = read_json(folder / "config.json")
    text = config.get("text_config") or config
    tokenizer = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if not isinstance(vocab_size := text.get("vocab_size"), int):
        raise UsageError(f"--model {model.spec}: config.json gives no vocab_size, so requests can't be checked")
    max_logprobs = vocab_size if settings.max_logprobs == -1 else settings.max_logprobs
    served_names = served_names or (model.name,)
    adapter_names = tuple(adapter_names)
    for name in adapter_names:
        if name in served_names:
            raise UsageError(f"--adapter {name}: the model itself is served under this name. Give the adapter another")
    return ModelLimits(
        served_names=served_names,
        adapter_names=adapter_names,
        context_length=settings.max_model_len or _context_length(model, text, tokenizer),
        vocab_size=vocab_size,
        max_logprobs=max_logprobs,
        max_choices=settings.max_choices,
        max_beams=settings.max_beams,
        chat_template=_chat_template(folder, tokenizer),
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        allowed=frozenset(settings.allow),
    )


def _context_length(model: Model, config: dict[str, Any], tokenizer: dict[str, Any]) -> int:
    lengths = [config[key] for key in _CONTEXT_KEYS if isinstance(config.get(key), int)]
    if isinstance(limit := tokenizer.get("model_max_length"), int):
        lengths.append(limit)
    if not lengths:
        raise UsageError(
            f"--model {model.spec}: config.json gives no context length. Give it: --engine max_model_len=N"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = 1 if kind in _SCALED_ALREADY else rope.get("factor") or 1
    return int(min(lengths) * factor)


def _chat_template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    """The text of the template (of all of them, where there are several by name)."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text()
    if (file := folder / "chat_template.json").is_file():
        return json.dumps(read_json(file).get("chat_template"))
    template = tokenizer.get("chat_template")
    return template if isinstance(template, str | None) else json.dumps(template)
