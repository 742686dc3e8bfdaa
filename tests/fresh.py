"""Python code in new processes, which begin where `import torch` has ended."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO, cast

# Outside of the loop is a child: what it raises, prints and exits with is as that of any program.
SERVER = """
import json, os, sys, torch
while True:
    request = sys.stdin.readline()
    child = os.fork() if request else os._exit(0)
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
code, args, environment, *files = json.loads(request)
for handle, file in enumerate((os.devnull, *files)):
    os.dup2(os.open(file, os.O_RDWR), handle)
os.environ.clear()
os.environ.update(environment)
sys.argv[1:] = args
exec(code)
"""


@cache
def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # which is read by `import torch`
        text=True,
    )


def run_fresh(
    code: str, *args: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As `python -c CODE ARGS...` on one thread; nothing but torch is imported."""
    server = _server()
    requests, answers = cast(IO[str], server.stdin), cast(IO[str], server.stdout)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        environment = {**os.environ, **(environment or {})}
        requests.write(json.dumps([code, args, environment, *map(str, files)]) + "\n")
        requests.flush()
        status = int(answers.readline())
        return subprocess.CompletedProcess(["-c"], status, *(file.read_text() for file in files))
