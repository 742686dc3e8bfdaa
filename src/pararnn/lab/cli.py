"""The command line: `pararnn` and its commands, from `demo` to `tasks`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from signal import SIGINT

import pararnn.base.intact  # noqa: F401  where another distribution's __init__.py does not check
from pararnn.base.errors import PararnnError
from pararnn.base.extras import require
from pararnn.base.version import __version__

SIGPIPE = 13
"""Number of the signal by which other programs end there; Windows has none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, or 1 if the demo's check fails; exit with 2 for bad values.

    A signal ends it with 130, and with 141 a reader of its output that has ended. Without a command
    it prints the help.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"pararnn: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        sys.exit(128 + SIGINT)
    except BrokenPipeError:
        # What is not written yet goes nowhere: Python would try again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + SIGPIPE)
    except (PararnnError, OSError) as error:
        print(f"pararnn: error: {error}", file=sys.stderr)
        sys.exit(2)


def _run(arguments: Sequence[str]) -> int:
    if "--version" in arguments[:1]:
        print(f"pararnn {__version__}")
        return 0
    require("tyro")
    from pararnn.lab.commands import COMMANDS, call  # tyro, which --version does without

    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print("usage: pararnn COMMAND ...\n\nNonlinear RNNs trained in parallel, exactly.\n")
        for command, function in COMMANDS.items():
            print(f"  {command:9} {(function.__doc__ or '').splitlines()[0]}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(COMMANDS)}"
        raise PararnnError(f"there is no command {name!r}: {hint}")
    return call(COMMANDS[name], f"pararnn {name}", arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
