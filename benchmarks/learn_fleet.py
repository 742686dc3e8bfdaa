"""Processes that learn: one for each mixer and device, and what hands them their jobs."""

from __future__ import annotations

import multiprocessing as mp
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from learn_layers import layer_rows
from learn_models import models, tiny
from learn_run import Corpus, Row, Shape, Trainee, read_corpus
from triton_tuning import Tuning

ENDING = 5.0
"""Seconds that a process may take to end."""


class Failed(RuntimeError):
    """Error of a process."""


class Settings(NamedTuple):
    """Settings of a process."""

    name: str
    device: str
    shape: Shape
    folders: tuple[str, ...]
    states: str
    size: str
    smoke: bool


def serve(settings: Settings, pipe: Connection) -> None:
    """Return a process's life: compile, say so, then answer requests (name, arguments) with rows.

    A row is sent as ("row", row), an answer's end as ("done", value), what goes wrong as ("failed",
    its traceback).
    """
    try:
        device = torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        tuning = Tuning()
        corpora = {Path(each).name: read_corpus(Path(each), device) for each in settings.folders}
        make = (tiny() if settings.smoke else models(settings.size))[settings.name]
        trainee = Trainee(make, device, settings.shape)
        trainee.compile(next(iter(corpora.values())))
        free(trainee, device)
        pipe.send(("done", trainee.parameters))
        while True:
            request = pipe.recv()
            if request is None:
                return
            tuning.begin()
            for row in answers(settings, trainee, corpora, request):
                pipe.send(row)
            free(trainee, device)
    except Exception:
        # The requesting process prints it, goes on with the other mixers and then fails.
        pipe.send(("failed", traceback.format_exc()))


def free(trainee: Trainee, device: torch.device) -> None:
    """Give memory back to the GPU, which other processes use too."""
    trainee.end()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def answers(
    settings: Settings, trainee: Trainee, corpora: Mapping[str, Corpus], request: tuple[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the messages of a process for a request."""
    what, argument = request
    if what == "speed":
        yield "done", trainee.speed(next(iter(corpora.values())), argument)
    elif what == "train":
        for row in trainee.train(argument, corpora[argument.corpus]):
            yield "row", row
        if argument.stage == "final" and argument.seed == 0:
            torch.save(trainee.model.state_dict(), state_path(settings, argument.corpus))
        yield "done", None
    else:
        corpus, until = argument
        state = torch.load(state_path(settings, corpus), map_location=settings.device)
        config = trainee.model.config
        for row in layer_rows(settings.name, config, state, corpora[corpus], until):
            yield "row", row
        yield "done", None


def state_path(settings: Settings, corpus: str) -> Path:
    return Path(settings.states) / f"{settings.name}-{corpus}.pt"


class Worker:
    """A process, seen from the one that asks it."""

    def __init__(self, settings: Settings) -> None:
        self.name = settings.name
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Tiny models are not worth a process. Daemons might not start compilers of their own.
        start = threading.Thread if settings.smoke else context.Process
        self.process = start(target=serve, args=(settings, theirs))
        self.process.start()
        if not settings.smoke:
            theirs.close()  # or the end of the process would not be noticed

    def ask(self, *request: Any) -> Iterator[Row]:
        """Yield rows as they come; `value` is the answer's end. Raises Failed."""
        self.pipe.send(request)
        yield from self.rows()

    def rows(self) -> Iterator[Row]:
        """Yield the rows of an answer that are still to come."""
        while True:
            try:
                kind, value = self.pipe.recv()
            except EOFError:
                raise Failed(f"{self.name}: the process is gone") from None
            if kind == "failed":
                raise Failed(f"{self.name}: {value}")
            if kind == "done":
                self.value = value
                return
            yield value

    def result(self, *request: Any) -> Any:
        """Return the result of an answer without rows."""
        for _ in self.ask(*request):
            raise AssertionError("expected no rows")
        return self.value


class Fleet:
    """A worker for each mixer on each device; mixers that fail are left out of what follows."""

    def __init__(self, settings: Sequence[Settings], devices: Sequence[str]) -> None:
        self.devices, self.failures = list(devices), dict[str, str]()
        self.workers = {(each.name, each.device): Worker(each) for each in settings}
        self.mixers = list(dict.fromkeys(each.name for each in settings))
        for worker in self.workers.values():
            self._guard(worker.name, partial(list, worker.rows()))

    def speeds(self, steps: int) -> dict[str, tuple[float, float]]:
        """Return tokens/s and seconds of a validation by mixer, of its slower process."""
        times: dict[str, list[tuple[float, float]]] = {mixer: [] for mixer in self.mixers}

        def one(mixer: str, device: str) -> None:
            times[mixer].append(self.workers[mixer, device].result("speed", steps))

        def every(device: str) -> None:
            for mixer in times:
                if mixer in self.mixers:
                    self._guard(mixer, partial(one, mixer, device))

        self._on_devices(every)
        return {
            mixer: (min(speed for speed, _ in times[mixer]), max(look for _, look in times[mixer]))
            for mixer in self.mixers
        }

    def run(
        self,
        jobs: Iterable[tuple[str, tuple[Any, ...]]],
        take: Callable[[Row], None],
        fits: Callable[[tuple[Any, ...]], bool] = lambda request: True,
    ) -> None:
        """Jobs (mixer, request), each on the first device that is free; `take` is given rows.

        fits: of a request, whether there is still time for it; the others are left out.
        """
        waiting, lock = list(jobs), threading.Lock()

        def one(mixer: str, request: tuple[Any, ...], device: str) -> None:
            for row in self.workers[mixer, device].ask(*request):
                take(row)

        def drain(device: str) -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    mixer, request = waiting.pop(0)
                if mixer in self.mixers and fits(request):
                    self._guard(mixer, partial(one, mixer, request, device))

        self._on_devices(drain)

    def _on_devices(self, call: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(len(self.devices)) as pool:
            list(pool.map(call, self.devices))

    def stop(self) -> None:
        """End the processes."""
        for worker in self.workers.values():
            with suppress(BrokenPipeError):  # of one that has failed
                worker.pipe.send(None)
        for worker in self.workers.values():
            worker.process.join(ENDING)
            if isinstance(worker.process, BaseProcess) and worker.process.is_alive():
                worker.process.terminate()

    def _guard(self, mixer: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Failed as error:
            print(f"left out from here on: {error}", flush=True)
            self.failures[mixer] = str(error)
            self.mixers = [each for each in self.mixers if each != mixer]
