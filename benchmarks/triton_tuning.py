"""When tuners of peers' Triton kernels choose."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any


class Tuning:
    """Times at which the tuners of peers' Triton kernels choose; ours have none.

    While several processes compile on a GPU they try all that they may take and time nothing.
    `begin` lets them choose anew, by short timings: the GPU is this process's alone.
    packages: whose tuners.
    """

    def __init__(self, packages: Sequence[str] = ("mamba_ssm",)) -> None:
        self.packages, self.has_begun = packages, False
        if importlib.util.find_spec("triton") is None:
            return
        testing: Any = importlib.import_module("triton.testing")
        time_it = testing.do_bench

        def bench(call: Callable[[], object], quantiles: Sequence[float], **_: Any) -> Any:
            if self.has_begun:
                return time_it(call, warmup=5, rep=20, quantiles=quantiles)
            call()
            return [1.0] * len(quantiles)

        testing.do_bench = bench

    def begin(self) -> None:
        """Choose anew from now on; once."""
        if not self.has_begun and "triton.runtime" in sys.modules:
            kind = sys.modules["triton.runtime"].Autotuner
            names = [name for name in sys.modules if name.partition(".")[0] in self.packages]
            peers = [sys.modules[name] for name in names]
            for part in (part for module in peers for part in list(vars(module).values())):
                while hasattr(part, "fn") and not isinstance(part, kind):
                    part = part.fn
                if isinstance(part, kind):
                    part.cache.clear()
        self.has_begun = True
