"""Imports run one way."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_the_import_contracts_are_kept():
    command = [Path(sys.executable).parent / "lint-imports"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
