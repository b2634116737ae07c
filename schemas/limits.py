"""Model limits: what a model and its engine can take, as far as a request can break it."""

from dataclasses import dataclass
from typing import Literal

# What a request may bring that can reach further than its own answer: refused unless the operator allows it.
Feature = Literal["chat_template", "prompt_embeds"]

# Most tokens that a beam search may look past: so many that are biased or forbidden, as many that are penalised, and
# the model's own ends.
MAX_BIASED = MAX_PENALISED = 512
MAX_SHIFTED = MAX_BIASED + MAX_PENALISED + 64


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Read from the model's folder without its weights (`pipelines/limits.py`), and from the engine's settings."""

    # The names that requests may ask for the model itself by; the first is what answers say.
    served_names: tuple[str, ...]
    # Most tokens of prompt and answer together.
    context_length: int
    # Token ids lie below it.
    vocab_size: int
    # Most log-probabilities a position; the size of the vocabulary where there is no limit.
    max_logprobs: int
    # Most choices for a prompt.
    max_choices: int
    # The widest beam search.
    max_beams: int
    # The chat template's text; None: the model has none, and can't chat.
    chat_template: str | None = None
    # How the model writes tool calls, by the engine's name of the parser.
    tool_parser: str | None = None
    # How it sets its thoughts apart from its answer, likewise; None: it has none.
    reasoning_parser: str | None = None
    allowed: frozenset[Feature] = frozenset()
    # The names of the adapters that requests may ask for.
    adapter_names: tuple[str, ...] = ()

    @property
    def engine_logprobs(self) -> int:
        """Most log-probabilities that the engine itself must give: a search looks at more than any request may see."""
        return min(self.vocab_size, max(self.max_logprobs, 2 * self.max_beams + MAX_SHIFTED))

    def template_speaks_of(self, name: str) -> bool:
        """Whether the chat template uses a variable; one that doesn't leaves what it holds out of the prompt."""
        return self.chat_template is not None and name in self.chat_template
