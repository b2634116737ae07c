"""vLLM's own server over HTTP, as `vllm serve` runs it, until it is ended.

It is called as a module; the console command looks for a distribution of the name `vllm`, which the CPU build is not.
"""

import json
import runpy
import sys

from tests.benchmarks.sides.engine import Setting, engine_arguments
from tests.benchmarks.sides.run_batch import make_flags
from tests.benchmarks.sides.work import MODEL


def run(setting: Setting, port: int, engine: dict) -> None:
    from pipelines.model import resolve

    arguments = engine_arguments(setting, **engine)
    sys.argv[1:] = ["--model", resolve(None).path, "--served-model-name", MODEL, "--host", "127.0.0.1"]
    sys.argv += ["--port", str(port), "--disable-uvicorn-access-log", *make_flags(arguments)]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
