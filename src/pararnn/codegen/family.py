"""A family of kernels: one record of what generates and declares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pararnn.codegen.interface import Structs
from pararnn.program.program import Program


@dataclass(frozen=True, eq=False)
class Family:
    """Kernels that share solvers, functions, launch structs and headers.

    name: the folder of their headers, and the family of the programs whose steps they run. steps:
    these steps, for messages. solvers: each has a header of its name. why_not(program): the reason
    why there are no kernels for a step of the family, or None. functions(program, dtype, target):
    emitted code for gates of a dtype, of the usual variant where a target has several.
    constants(program, dtype, target): lines of C++ in front of them, which depend on the gates'
    dtype.
    structs(target, solver): fields by struct; in C++, ForwardLaunch and BackwardLaunch are the
    arguments of kernels. header: what emitted code needs.
    """

    name: str
    steps: str
    solvers: tuple[str, ...]
    why_not: Callable[[Program], str | None]
    functions: Callable[[Program, torch.dtype, str], str]
    constants: Callable[[Program, torch.dtype, str], list[str]]
    structs: Callable[[str, str], Structs]
    header: str = "functions.h"
