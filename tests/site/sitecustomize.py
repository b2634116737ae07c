"""For Python processes with this folder on their path: runs use the deterministic engine, whatever starts them.

So that a test can run a command as a person types it. `TEST_ENGINE_ERROR` is why no engine starts;
`TEST_GPU_ENGINE`: it needs GPUs, by its own word.
"""

import importlib.abc
import os
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pipelines.batch":
            sys.meta_path.remove(self)
            from pipelines import machine, placement
            from tests.deterministic import Starts

            placement.start_of = lambda *_: Starts(os.environ.get("TEST_ENGINE_ERROR"))
            if "TEST_GPU_ENGINE" in os.environ:
                machine.has_gpu_engine = lambda: True


sys.meta_path.insert(0, _Finder())
