"""CUDA kernels under compute-sanitizer."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sanitize.py")


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize(
    ("part", "count"), [("elementwise", "[1-9]"), ("mixing", "4$"), ("clusters", "5$")]
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool, part, count):
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []  # libraries probe
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *options]
    process = subprocess.run(
        [*command, sys.executable, str(SCRIPT), part], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-2000:]
    assert re.search(f"^ran {count}", process.stdout, re.MULTILINE)
