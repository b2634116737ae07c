"""`vllm run-batch`, vLLM's own batch runner, over chats in OpenAI's envelopes; it takes no completions.

It is called as its console command calls it; the command itself looks for a distribution of the name `vllm`, which the
CPU build is not. Its generation is from the reading of the file, when the engine and its handlers are up, to the
written answers.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.sides.engine import Setting, engine_arguments
from tests.benchmarks.sides.work import MODEL


def run(setting: Setting, requests: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """The runner in this process; what it did."""
    from pipelines.model import resolve

    arguments = engine_arguments(setting, **engine)
    from vllm.entrypoints.launchers import run_batch as runner

    answers = requests.with_suffix(".answers")
    sys.argv[1:] = ["-i", str(requests), "-o", str(answers), "--model", resolve(None).path]
    sys.argv += ["--served-model-name", MODEL, *make_flags(arguments)]
    at = {}
    read_file, write_file = runner.read_file, runner.write_file

    async def read_timed(*given: Any) -> str:
        at["start"] = time.perf_counter()
        return await read_file(*given)

    async def write_timed(*given: Any) -> None:
        await write_file(*given)
        at["end"] = time.perf_counter()

    runner.read_file, runner.write_file = read_timed, write_timed
    asyncio.run(runner.main(runner.parse_args()))
    usages = [json.loads(line)["response"]["body"]["usage"] for line in answers.read_text().splitlines()]
    answers.unlink()
    return {
        "num_rows": len(usages),
        "num_tokens": sum(usage["completion_tokens"] for usage in usages),
        "generation_s": at["end"] - at["start"],
    }


def make_flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as flags of vLLM's command line."""
    flags = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value)]
    return flags


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))))
