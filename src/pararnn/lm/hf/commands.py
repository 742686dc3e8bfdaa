"""Commands of other packages in a process that knows our models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import pararnn.lm.hf
from pararnn.base.errors import PararnnError
from pararnn.lm.checkpoint import CLASSES


class CommandError(PararnnError, LookupError):
    """A command of this environment does not exist."""


def run_command(name: str, arguments: Sequence[str]) -> Any:
    """Run a command that pip has installed, such as transformers or lm_eval; return its result.

    transformers' Auto classes know our models already. Its server looks for a model's class in
    the package itself. CommandError where no such command is installed.
    """
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    if name not in scripts:
        raise CommandError(f"there is no command {name!r} in this environment: install its package")
    # Not by an import: transformers replaces its own module while it is loaded.
    package = sys.modules["transformers"]
    for class_name in CLASSES.values():
        setattr(package, class_name, getattr(pararnn.lm.hf, class_name))
    sys.argv = [name, *arguments]
    return scripts[name].load()()
