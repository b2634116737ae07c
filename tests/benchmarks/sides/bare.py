"""vLLM's `LLM.generate` by itself, over completions: its generation is that call alone."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.sides.engine import Setting, engine_arguments


def run(setting: Setting, requests: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """One call in this process; what it did."""
    from pipelines.model import resolve

    arguments = engine_arguments(setting, **engine)
    from vllm import LLM, SamplingParams

    llm = LLM(resolve(None).path, disable_log_stats=True, **arguments)
    bodies = [json.loads(line) for line in requests.read_text().splitlines()]
    parameters = [
        SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True, output_kind=2) for body in bodies
    ]
    started = time.perf_counter()
    outputs = llm.generate([body["prompt"] for body in bodies], parameters, use_tqdm=False)
    return {
        "generation_s": time.perf_counter() - started,
        "num_rows": len(outputs),
        "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))))
