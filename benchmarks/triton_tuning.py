"""When tuners of peers' Triton kernels choose."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class _SubmittedError(Exception):
    """A kernel is compiled by another thread, so it is not launched."""


class Tuning:
    """Times at which the tuners of peers' Triton kernels choose; ours have none.

    While several processes compile on a GPU they try all that they may take and time nothing.
    `begin` lets them choose anew, by short timings: the GPU is this process's alone.
    packages: whose tuners. threads: they compile at once, and nothing but the first setting of each
    kernel runs before `begin`; None: one after the other, and all run.
    """

    def __init__(
        self, packages: Sequence[str] = ("mamba_ssm",), threads: int | None = None
    ) -> None:
        self.packages, self.has_begun = packages, False
        self._pool = ThreadPoolExecutor(threads) if threads else None
        self._futures: list[Future[Any]] = []
        if importlib.util.find_spec("triton") is None:
            return
        testing: Any = importlib.import_module("triton.testing")
        time_it = testing.do_bench

        def bench(call: Callable[[], object], quantiles: Sequence[float], **_: Any) -> Any:
            if self.has_begun:
                return time_it(call, warmup=5, rep=20, quantiles=quantiles)
            self._compile(call)
            return [1.0] * len(quantiles)

        testing.do_bench = bench

    def submit(self, key: Any, compile_kernel: Callable[[], Any], finalize: Any) -> Any:
        """Compile by a thread into the cache on disk, as Triton's mode of this method's name."""
        assert self._pool is not None
        self._futures.append(self._pool.submit(compile_kernel))
        raise _SubmittedError

    def wait(self) -> None:
        """Wait for all threads; what one could not compile fails or is passed over when it is
        launched."""
        for future in self._futures:
            future.exception()

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

    def _compile(self, call: Callable[[], object]) -> None:
        if self._pool is None:
            call()
            return
        mode = importlib.import_module("triton.runtime._async_compile").active_mode
        token = mode.set(self)
        try:
            call()
        except _SubmittedError:
            pass
        finally:
            mode.reset(token)
