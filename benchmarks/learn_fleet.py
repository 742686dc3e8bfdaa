"""Processes that learn: several for each device, and what hands them their jobs.

A process compiles while others of its device train, and then waits for its turn.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from learn_models import SIZES, TINY, models
from learn_probes import probe_rows
from learn_run import Corpus, Job, NoTimeError, Row, Shape, Trainee, read_corpus
from protocol import turn
from triton_tuning import Tuning

Message = tuple[str, Any]
Take = Callable[[str, Row], None]


class Settings(NamedTuple):
    """Settings of a process. turn: a file; of the processes with the same one trains at a time.
    until: the time at which all is to end."""

    device: str
    shape: Shape
    folder: str
    states: str | None
    turn: str
    smoke: bool
    until: float


class Trainer:
    """What a process holds: a corpus, and the trainee of its last job."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.tuning = settings, Tuning()
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.corpus: Corpus = read_corpus(Path(settings.folder), self.device)
        self.name: tuple[str, str] = ("", "")
        self.trainee: Trainee | None = None

    def answers(self, job: Job, trainee: Trainee) -> Iterator[Message]:
        """Yield the rows of a training with the tables that they belong to."""
        with turn(Path(self.settings.turn), exclusive=True):
            self.tuning.begin()
            try:
                row = None
                for row in trainee.train(job, self.corpus, self.settings.until):
                    yield "curves", row
                if row is not None and not row["failure"]:
                    self.keep(job, trainee)
                    for found in probe_rows(trainee, Path(self.settings.folder)):
                        yield "probes", {**job._asdict(), **found}
            finally:
                trainee.end()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def trainee_of(self, job: Job) -> Trainee:
        """Return the compiled model of a job, the last job's where it is the same."""
        if self.trainee is None or self.name != (job.mixer, job.size):
            self.trainee = None
            gc.collect()
            torch._dynamo.reset()
            size = TINY if self.settings.smoke else SIZES[job.size]
            make = models(size, self.device.type)[job.mixer]
            self.trainee = Trainee(make, self.device, self.settings.shape)
            self.trainee.compile(self.corpus)
            self.name = job.mixer, job.size
        return self.trainee

    def keep(self, job: Job, trainee: Trainee) -> None:
        """Write the weights, where the settings name a folder for them."""
        if self.settings.states is not None:
            name = f"{job.mixer}-{job.size}-{job.rate:g}-{job.seed}.pt"
            torch.save(trainee.model.state_dict(), Path(self.settings.states) / name)


def serve(settings: Settings, pipe: Connection) -> None:
    """Do the work of a process: answer jobs with rows, until None comes or one fails.

    It says when it has compiled, and then gets the job with its rate, or None to leave it out.
    """
    try:
        trainer = Trainer(settings)
        while (job := pipe.recv()) is not None:
            trainee = trainer.trainee_of(job)
            pipe.send(("ready", None))
            job = pipe.recv()
            try:
                for message in trainer.answers(job, trainee) if job is not None else ():
                    pipe.send(message)
            except NoTimeError as error:
                pipe.send(("left out", str(error)))
            pipe.send(("done", None))
    except Exception:
        # Another process takes its place: the device may be in no good state.
        pipe.send(("failed", traceback.format_exc()))


class Worker:
    """A process, seen from the one that asks it. Tiny models on a CPU are not worth a process."""

    def __init__(self, settings: Settings) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Daemons might not start compilers of their own.
        start = threading.Thread if settings.smoke else context.Process
        self.process = start(target=serve, args=(settings, theirs))
        self.process.start()
        if not settings.smoke:
            theirs.close()  # or the end of the process would not be noticed

    def answers(self, job: Job, with_rate: Callable[[], Job | None]) -> Iterator[Message]:
        """Yield a job's messages. The process is gone if there is no message "done" at the end.

        with_rate: returns the job with its rate, or None to leave it out; called when the process
        has compiled.
        """
        try:
            self.pipe.send(job)
            while True:
                message = self.pipe.recv()
                if message[0] == "ready":
                    self.pipe.send(with_rate())
                    continue
                yield message
                if message[0] == "done":
                    return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            yield "gone", None

    def stop(self) -> None:
        """Ask the process to end."""
        with suppress(BrokenPipeError, OSError):  # of one that has failed
            self.pipe.send(None)

    def kill(self) -> None:
        """End a process that may be in the middle of a job, with those that it started."""
        if isinstance(self.process, mp.process.BaseProcess) and self.process.is_alive():
            self.process.kill()
            self.process.join(5)


class Queue:
    """Jobs in order. A rate that is a rule is known when no job of the lines before has its own.

    rate: of a job by the rule, None for none, or for a training that is there already.
    """

    def __init__(self, lines: Sequence[Sequence[Job]], rate: Callable[[Job], float | None]) -> None:
        self.waiting = [(number, job) for number, line in enumerate(lines) for job in line]
        self.running: list[tuple[int, Job]] = []
        self.rate, self.changed = rate, threading.Condition()

    def take(self, last: tuple[str, str], until: float) -> Job | None:
        """Return the next job, of the mixer and size `last` if there is one in the first line that
        waits; None when there is none, or no time."""
        with self.changed:
            if not self.waiting or time.time() > until:
                return None
            line = [entry for entry in self.waiting if entry[0] == self.waiting[0][0]]
            same = [entry for entry in line if (entry[1].mixer, entry[1].size) == last]
            entry = (same or line)[0]
            self.waiting.remove(entry)
            self.running.append(entry)
            return entry[1]

    def with_rate(self, job: Job) -> Job | None:
        """Return a job that runs with its rate; None to leave it out."""
        if job.rate > 0:
            return job
        with self.changed:
            number = next(line for line, own in self.running if own is job)
            while any(line < number and own.rate > 0 for line, own in self.running):
                self.changed.wait(1.0)
            rate = self.rate(job)
        return None if rate is None else job._replace(rate=rate)

    def done(self, job: Job) -> None:
        """Say that a job is done."""
        with self.changed:
            self.running = [entry for entry in self.running if entry[1] is not job]
            self.changed.notify_all()


def run(every: Sequence[Settings], queue: Queue, take: Take) -> None:
    """Run the jobs by a process for each of the settings; `take` has rows.

    What went wrong in a job is a row of the table "curves" with `failure`. At the time `until`
    processes are killed, and rows so far stay.
    """
    workers: list[Worker] = []
    over = threading.Event()

    def drain(settings: Settings) -> None:
        worker, last = None, ("", "")
        while not over.is_set():
            job = queue.take(last, settings.until)
            if job is None:
                break
            if worker is None:
                worker = Worker(settings)
                workers.append(worker)
            last, alive, problem, known = (job.mixer, job.size), False, "", job

            def with_rate(job: Job = job) -> Job | None:
                nonlocal known
                chosen = queue.with_rate(job)
                known = chosen or job
                return chosen

            for kind, value in worker.answers(job, with_rate):
                if kind in ("curves", "probes"):
                    take(kind, value)
                elif kind == "failed":
                    problem = value
                elif kind == "left out":
                    print(f"left out: {known}: {value}", flush=True)
                elif kind == "done":
                    alive = True
            if not alive and not over.is_set():
                problem = problem or "the process is gone"
                print(f"{known}: {problem}", flush=True)
                take("curves", {**known._asdict(), "failure": problem.strip().splitlines()[-1]})
            if not alive:
                worker, last = None, ("", "")
            queue.done(job)
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=drain, args=(one,), daemon=True) for one in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, every[0].until - time.time()))
    over.set()
    for worker in list(workers):
        worker.kill()
