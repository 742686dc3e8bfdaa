"""Tasks by lm-eval-harness, its own or of local files."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from lm_eval import evaluator
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from pararnn.errors import EvaluationError
from pararnn.evaluation.jobs import YAML, Job
from pararnn.evaluation.questions import read_questions
from pararnn.evaluation.texts import LENGTH, carries_states, check_number, first_token
from pararnn.lm.hf import ParaRNNForCausalLM

UNLIMITED = 2**31 - 1
"""Tokens of context that a model without attention takes, as far as lm-eval counts them."""

# Or lm-eval would fork a process a core for it, next to PyTorch's threads.
os.environ.setdefault("DISABLE_MULTIPROC", "1")
RESAMPLED = 1000
"""How often answers are drawn anew for the standard error of a perplexity; lm-eval's 100,000 take
minutes."""


class OtherQuestions(ContextSampler):
    """Draws examples among the other questions of a file.

    lm-eval's own leaves out what equals the question in all fields; here that is by "asked", so
    that the same question with other choices is left out too.
    """

    def __init__(self, df: Any = None, **kwargs: Any) -> None:
        super().__init__(df, **kwargs)
        self.asked = [question["asked"] for question in self.df]
        self.counts = Counter(self.asked)

    def sample(
        self, n: int, eval_doc: Any = None, df: Any = None, **kwargs: Any
    ) -> list[dict[str, Any]]:
        asked = eval_doc["asked"]
        drawn = self.rnd.sample(range(len(self.asked)), n + self.counts[asked])
        return [self.df[index] for index in drawn if self.asked[index] != asked][:n]


class LocalTask(ConfigurableTask):
    """A task whose questions are at hand."""

    def __init__(self, questions: list[dict[str, Any]], config: dict[str, Any]) -> None:
        self.questions = questions
        super().__init__(config=config)

    def download(self, *args: Any, **kwargs: Any) -> None:
        self.dataset = {"test": Dataset.from_list(self.questions)}


class Harness(HFLM):
    """lm-eval's model, which counts the requests that were longer than the model's context."""

    def __init__(self, model: Any, tokenizer: Any, batch: int, length: int | None) -> None:
        if carries_states(model):
            length = UNLIMITED
        elif length is None and isinstance(model, ParaRNNForCausalLM):
            length = LENGTH
        first = first_token(tokenizer)
        if first is None:  # before an empty prompt, and lm-eval wants one in any case
            first = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
        with quiet():
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                backend="causal",
                batch_size=batch,
                max_length=length,
                prefix_token_id=first,
                # Or it is the model's, and 16 bits are too few for logarithms.
                softmax_dtype="float32",
            )
        self.truncated = 0

    def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
        with torch.no_grad():
            return self.model(inps, use_cache=False).logits

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        longest = self.max_length + 1
        self.truncated += sum(len(each[1]) + len(each[2]) > longest for each in requests)
        found = super()._loglikelihood_tokens(requests, *args, **kwargs)
        for log_chance, _ in found:
            check_number(log_chance)
        return found


def load_task(job: Job, seed: int) -> Any:
    """A job's task, or the tasks of its group, as `evaluator.evaluate` takes them.

    seed: of the shots that are drawn. Raises DataError for a corrupt file; EvaluationError for an
    unknown name, for a task that cannot be loaded, and for one that would show its own questions.
    """
    loaded = _local(job) if job.file and job.file.suffix not in YAML else _of_lm_eval(job)
    for name, task in loaded["tasks"].items():
        if job.shots is not None or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=job.shots or 0)
        task.set_fewshot_seed(seed)
        if task.get_config("num_fewshot") and _shows_questions(task):
            raise EvaluationError(
                f"the shots of {name} would be drawn from the questions themselves, with their "
                "answers: it can be asked with 0 shots"
            )
    return loaded


def ask(lm: Harness, job: Job, loaded: Any, limit: int | None) -> list[dict[str, Any]]:
    """Ask a job's tasks: a record for it, or one for each task of a tag."""
    lm.truncated = 0
    with quiet():
        found = evaluator.evaluate(
            lm, loaded, limit=limit, log_samples=False, bootstrap_iters=RESAMPLED
        )
    results = found["results"]
    counts = {name: each["effective"] for name, each in found["n-samples"].items()}
    names = [job.name] if job.name in results else list(loaded["tasks"])
    return [
        {
            "task": name,
            "shots": found["n-shot"].get(name),
            "file": job.file and str(job.file),
            "questions": counts.get(name, sum(counts.values())),
            "version": found["versions"].get(name),
            "truncated": lm.truncated,
            "metrics": _metrics(results[name]),
            **({"subtasks": _subtasks(results, name)} if job.name in loaded["groups"] else {}),
        }
        for name in names
    ]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval's log to errors, as what matters is in the results, and off stdout."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)


def _local(job: Job) -> dict[str, Any]:
    assert job.file is not None
    form, questions = read_questions(job.file)
    alike = max(Counter(each["asked"] for each in questions).values())
    if (job.shots or 0) + alike > len(questions):
        raise EvaluationError(
            f"{job.shots} shots cannot be drawn from {job.file}: a question has "
            f"{len(questions) - alike} others there"
        )
    config = {
        "task": job.name,
        "test_split": "test",
        "fewshot_split": "test",
        "fewshot_config": {"sampler": OtherQuestions},
        "metadata": {"version": 1.0},
        **form.settings,
    }
    return {"tasks": {job.name: LocalTask(questions, config)}, "groups": {}}


@cache
def _manager() -> TaskManager:
    return TaskManager()


def _of_lm_eval(job: Job) -> Any:
    manager = _manager()
    if job.file is None and job.name not in manager.all_tasks:
        near = difflib.get_close_matches(job.name, manager.all_tasks, 1)
        meant = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` shows them"
        raise EvaluationError(f"lm-eval has no task {job.name!r}; {meant}")
    try:
        with quiet():
            return manager.load([job.name if job.file is None else str(job.file)])
    # A task is others' code and data, and may raise anything.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EvaluationError(
            f"the task {job.file or job.name} cannot be loaded: {reason}; without the Hub, give a "
            f"local file {job.name}.jsonl"
        ) from error


def _shows_questions(task: Any) -> bool:
    """Whether lm-eval would draw examples from the questions without leaving out the one asked."""
    if not isinstance(task, ConfigurableTask) or task.fewshot_cfg.samples is not None:
        return False
    config, split = task.config, task.fewshot_cfg.split
    drawn = split or config.training_split or config.validation_split or config.test_split
    asked = config.test_split or config.validation_split
    return drawn == asked and split != config.test_split


def _metrics(found: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """By metric: its value, and its standard error where lm-eval has one."""
    metrics: dict[str, dict[str, float | None]] = {}
    for key, value in found.items():
        name, comma, kind = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        error = found.get(f"{name}_stderr,{kind}")
        number = error if isinstance(error, (int, float)) else None
        metrics[name if kind == "none" else key] = {"value": value, "stderr": number}
    return metrics


def _subtasks(results: dict[str, Any], group: str) -> dict[str, Any]:
    return {name: _metrics(found) for name, found in results.items() if name != group}
