"""`ray.data.llm`, Ray's own batch inference with vLLM, over completions.

Its generation is from the first request's arrival at the engine, as vLLM has it, to the last row in the reader's hands.
By default its stages tokenize before the engine and detokenize behind it, in processes of their own; tuned, the engine
does both.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.sides.engine import Setting, engine_arguments

# Places in Ray: a scheduler's number, that binds no thread. The default pipeline has three actors, one place each, and
# tasks beside them: on two cores they would wait for one another.
_NUM_PLACES = 8
# All of a benchmark's requests that the engine has room for are in it at once.
_TUNED = {"batch_size": 32, "max_concurrent_batches": 16, "tokenize_stage": False, "detokenize_stage": False}


def run(setting: Setting, requests: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """The pipeline, driven from this process on a Ray of its own; what it did."""
    from pipelines.model import resolve

    # Ray's processes inherit the environment that goes with them.
    arguments = engine_arguments(setting, **engine)
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    ray.init(address="local", include_dashboard=False, num_cpus=_NUM_PLACES, log_to_driver=False)
    config = vLLMEngineProcessorConfig(
        model_source=resolve(None).path,
        engine_kwargs=arguments,
        # Prompts are ready, and go to the engine as they are.
        chat_template_stage=False,
        # Without it, it waits for a GPU.
        placement_group_config={"bundles": [{"CPU": 1}]},
        **(_TUNED if setting == "tuned" else {}),
    )
    processor = build_processor(config, preprocess=_to_engine, postprocess=_from_engine)
    bodies = [json.loads(line) for line in requests.read_text().splitlines()]
    rows = list(processor(ray.data.from_items(bodies)).iter_rows())
    ended = time.time()
    ray.shutdown()
    return {
        "num_rows": len(rows),
        "num_tokens": sum(row["num_tokens"] for row in rows),
        "generation_s": ended - min(row["arrived"] for row in rows),
    }


def _to_engine(body: dict[str, Any]) -> dict[str, Any]:
    names = ("max_tokens", "ignore_eos", "temperature")
    return {"prompt": body["prompt"], "sampling_params": {name: body[name] for name in names}}


def _from_engine(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": row["generated_text"],
        "num_tokens": row["num_generated_tokens"],
        "arrived": row["metrics"]["arrival_time"],
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))))
