"""The settings under which peers run vLLM's engine."""

import os
from typing import Any, Literal

# What we give ourselves (threads bound to all cores, libraries loaded before all others, block size, width and token
# budget of a step, number type, eager mode); that without the libraries; vLLM's; vLLM's in the number type that suits
# the machine.
Setting = Literal["tuned", "no-preload", "default", "default-dtype"]


def engine_arguments(setting: Setting, **given: Any) -> dict[str, Any]:
    """Arguments of vLLM's engine; sets the environment that goes with them.

    `given`: settings of ours (`EngineSettings`) that hold with every setting.
    """
    from pipelines import machine
    from pipelines.limits import read_limits
    from pipelines.model import resolve
    from schemas.settings import EngineSettings

    settings = EngineSettings(**given)
    limits = read_limits(resolve(None), (), settings)
    chosen = {choice.name: choice.value for choice in machine.cpu_arguments(settings, 1, limits)}
    if settings.max_model_len is not None:
        chosen["max_model_len"] = settings.max_model_len
    if setting in {"default", "default-dtype"}:
        # Its share of all memory is more than is free on a machine that does anything else.
        kept = {"kv_cache_memory_bytes", "max_model_len"} | ({"dtype"} if setting == "default-dtype" else set())
        return {name: value for name, value in chosen.items() if name in kept}
    for choice in machine.cpu_environment(list(range(machine.count_cores())), 1):
        if choice.name != "LD_PRELOAD" or setting != "no-preload":
            os.environ[choice.name] = choice.value
    return chosen
