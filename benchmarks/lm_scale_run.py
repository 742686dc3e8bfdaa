"""A process of `lm_scale.py`: `pararnn train` itself, with the paper's Mamba2 among its recipes.

    torchrun --standalone --nproc-per-node=8 benchmarks/lm_scale_run.py OPTIONS train gru-7b ...

OPTIONS is JSON: "steps", after which the run ends without a checkpoint and without a model, or null
for a run that ends as any does; "profile", whether rank 0 profiles one step more and leaves
trace.json. The folder of the run (out) gets `parameters`, a number; `pid-RANK`; and `out-of-memory`
where torch.OutOfMemoryError ended it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm_launch import PARAMETERS, TOO_LARGE, TRACE
from torch.profiler import ProfilerActivity, profile, schedule
from train_step import PEER, EndOfTiming, config_of, empty_model

from pararnn.lab import cli
from pararnn.lab.train import setup, trainer
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.recipes import RECIPES
from pararnn.lm.presets import SCALES


class End:
    """Ends a run after some steps; before that, profiles two more, the first of them to warm up."""

    def __init__(self, steps: int, trace: Path | None, first: bool) -> None:
        self.end = steps + (0 if trace is None else 2)
        self.profile_at = steps if trace and first else -1
        self.profiler: profile | None = None
        self.trace = trace

    def begin(self, step: int) -> None:
        """Call before a step, with the number of those before it."""
        if step == self.end:
            raise EndOfTiming
        if step == self.profile_at:
            self.profiler = profile(
                activities=list(activities()),
                schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
                on_trace_ready=lambda each: each.export_chrome_trace(str(self.trace)),
            )
            self.profiler.start()

    def finish(self) -> None:
        """Call after a step."""
        if self.profiler is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # kernels of one step only, and all of them
            self.profiler.step()


def activities() -> set[ProfilerActivity]:
    """Return a GPU's kernels alone: to record what the host does would slow it."""
    on_gpu = torch.cuda.is_available()
    return {ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU}


def ending(options: dict[str, Any]) -> type[trainer.RunTrainer]:
    """Return a `RunTrainer` that ends by the options and writes files for `lm_scale.py`."""

    class Trainer(trainer.RunTrainer):
        def __init__(self, config: RunConfig, *others: Any) -> None:
            super().__init__(config, *others)
            rank, out = os.environ.get("RANK", "0"), Path(config.out)
            (out / f"pid-{rank}").write_text(str(os.getpid()))
            first = self.rank == 0
            self.end: End | None = None
            if first:
                (out / PARAMETERS).write_text(str(sum(each.numel() for each in self.parameters)))
            if options["steps"] is not None:
                trace = out / TRACE if options["profile"] else None
                self.end = End(options["steps"], trace, first)

        def learn(self, parts: Any) -> Any:
            if self.end is None:
                return super().learn(parts)
            self.end.begin(self.step)
            result = super().learn(parts)
            self.end.finish()
            return result

    return Trainer


def register() -> None:
    """Let recipes have Mamba2, whose blocks are not those of an LMConfig."""
    for scale in (*SCALES, "tiny"):
        name = PEER + scale.lower()
        RECIPES[name] = partial(config_of, name)
    setup.bare_model = empty_model


def main() -> None:
    options, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    register()
    trainer.RunTrainer = ending(options)  # type: ignore[misc]
    out = Path(next(text for text in arguments if text.startswith("--out=")).removeprefix("--out="))
    out.mkdir(parents=True, exist_ok=True)
    try:
        code = cli.main(arguments)
    except EndOfTiming:
        code = 0
    except torch.OutOfMemoryError:
        traceback.print_exc()
        (out / TOO_LARGE).touch()
        sys.stdout.flush()
        # Without the end of the interpreter, which may wait for collectives that others wait in.
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
