"""What the program's own loggers show, and where."""

import subprocess
import sys

import pytest

from pipelines import logs

CHOICE = "import logging; logging.getLogger('overnight.engine').info('max_num_seqs=%d: %s', 256, 'wide steps')"


@pytest.mark.parametrize(
    ("variables", "is_shown"),
    [({}, False), (logs.environment(False), False), (logs.environment(True), True)],
)
def test_choices_are_told_to_who_asked(variables, is_shown):
    code = f"from pipelines import logs; logs.show_if_asked(); logs.show_if_asked(); {CHOICE}"
    told = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    ).stderr
    assert told.count("max_num_seqs=256: wide steps\n") == is_shown


def test_a_log_of_objects_has_no_lines_of_ours_beside_them():
    code = f"from pipelines import logs; logs.structure(); assert logs.is_structured(); logs.show(); {CHOICE}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stderr == b""
