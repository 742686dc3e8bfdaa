"""Tasks by lm-eval-harness: its own, and questions of local files."""

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

from pararnn.base.errors import EvaluationError
from pararnn.lab.evaluation.jobs import YAML, Job
from pararnn.lab.evaluation.questions import read_questions
from pararnn.lab.evaluation.texts import LENGTH, carries_states, check_number, first_token
from pararnn.lm.hf import ParaRNNForCausalLM

UNLIMITED = 2**31 - 1
"""Tokens of context of a model without attention, for lm-eval."""

# Otherwise lm-eval forks a process for each core to bootstrap, next to PyTorch's threads.
os.environ.setdefault("DISABLE_MULTIPROC", "1")
BOOTSTRAP_ITERS = 1000
"""Bootstrap iterations for the standard error of a perplexity; lm-eval's 100,000 take minutes."""


class OtherQuestions(ContextSampler):
    """Sampler of examples among the other questions of a file.

    lm-eval's own leaves out questions that are equal in all fields; this one those of the same text
    under "question", whatever their choices are.
    """

    def __init__(self, df: Any = None, **kwargs: Any) -> None:
        super().__init__(df, **kwargs)
        self.texts = [question["question"] for question in self.df]
        self.counts = Counter(self.texts)

    def sample(
        self, n: int, eval_doc: Any = None, df: Any = None, **kwargs: Any
    ) -> list[dict[str, Any]]:
        question = eval_doc["question"]
        indices = self.rnd.sample(range(len(self.texts)), n + self.counts[question])
        return [self.df[index] for index in indices if self.texts[index] != question][:n]


class Harness(HFLM):
    """lm-eval's model, with a count of the requests that were longer than the model's context."""

    def __init__(self, model: Any, tokenizer: Any, batch: int, length: int | None) -> None:
        if carries_states(model):
            length = UNLIMITED
        elif length is None and isinstance(model, ParaRNNForCausalLM):
            length = LENGTH
        first = first_token(tokenizer)
        if first is None:  # lm-eval needs one, for an empty prompt
            first = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
        with quiet():
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                backend="causal",
                batch_size=batch,
                max_length=length,
                prefix_token_id=first,
                # By default it is the model's: 16 bits are too few for logarithms.
                softmax_dtype="float32",
            )
        self.truncations = 0

    def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
        with torch.no_grad():
            return self.model(inps, use_cache=False).logits

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        longest = self.max_length + 1
        self.truncations += sum(len(each[1]) + len(each[2]) > longest for each in requests)
        results = super()._loglikelihood_tokens(requests, *args, **kwargs)
        for log_likelihood, _ in results:
            check_number(log_likelihood)
        return results


def load_task(job: Job, seed: int) -> Any:
    """Load a job's task, or the tasks of its group, for `evaluator.evaluate`.

    seed: of the sampled shots. Raises DataError for a corrupt file; EvaluationError for an
    unknown name, for a task that cannot be loaded, and for one that would show its own questions.
    """
    tasks = _local(job) if job.file and job.file.suffix not in YAML else _of_lm_eval(job)
    for name, task in tasks["tasks"].items():
        if job.shots is not None or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=job.shots or 0)
        task.set_fewshot_seed(seed)
        if task.get_config("num_fewshot") and _shows_questions(task):
            raise EvaluationError(
                f"the shots of {name} would be drawn from the questions themselves, with their "
                "answers: it can be asked with 0 shots"
            )
    return tasks


def ask(lm: Harness, job: Job, tasks: Any, limit: int | None) -> list[dict[str, Any]]:
    """Ask a job's tasks; return a record for it, or one for each task of a tag."""
    lm.truncations = 0
    with quiet():
        output = evaluator.evaluate(
            lm, tasks, limit=limit, log_samples=False, bootstrap_iters=BOOTSTRAP_ITERS
        )
    results = output["results"]
    counts = {name: each["effective"] for name, each in output["n-samples"].items()}
    names = [job.name] if job.name in results else list(tasks["tasks"])
    return [
        {
            "task": name,
            "shots": output["n-shot"].get(name),
            "file": job.file and str(job.file),
            "questions": counts.get(name, sum(counts.values())),
            "version": output["versions"].get(name),
            "truncated": lm.truncations,
            "metrics": _metrics(results[name]),
            **({"subtasks": _subtasks(results, name)} if job.name in tasks["groups"] else {}),
        }
        for name in names
    ]


@contextmanager
def quiet() -> Iterator[None]:
    """Limit lm-eval's log to errors, and move its output from stdout to stderr."""
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
    format_, questions = read_questions(job.file)
    equal = max(Counter(each["question"] for each in questions).values())
    if (job.shots or 0) + equal > len(questions):
        raise EvaluationError(
            f"{job.shots} shots cannot be drawn from {job.file}: a question has "
            f"{len(questions) - equal} others there"
        )
    config = {
        "task": job.name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(questions)},
        "test_split": "test",
        "fewshot_split": "test",
        "fewshot_config": {"sampler": OtherQuestions},
        "metadata": {"version": 1.0},
        **format_.settings,
    }
    with quiet():
        return {"tasks": {job.name: ConfigurableTask(config=config)}, "groups": {}}


@cache
def _manager() -> TaskManager:
    return TaskManager()


def _of_lm_eval(job: Job) -> Any:
    manager = _manager()
    if job.file is None and job.name not in manager.all_tasks:
        near = difflib.get_close_matches(job.name, manager.all_tasks, 1)
        hint = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` shows them"
        raise EvaluationError(f"lm-eval has no task {job.name!r}; {hint}")
    try:
        with quiet():
            return manager.load([job.name if job.file is None else str(job.file)])
    # A task is foreign code and data, and may raise anything.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EvaluationError(
            f"the task {job.file or job.name} cannot be loaded: {reason}; without the Hub, give a "
            f"local file {job.name}.jsonl"
        ) from error


def _shows_questions(task: Any) -> bool:
    """Return True if lm-eval would draw examples that include the question itself."""
    if not isinstance(task, ConfigurableTask) or task.fewshot_cfg.samples is not None:
        return False
    config, split = task.config, task.fewshot_cfg.split
    examples = split or config.training_split or config.validation_split or config.test_split
    questions = config.test_split or config.validation_split
    return examples == questions and split != config.test_split


def _metrics(results: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return value and standard error, None if lm-eval has none, by metric."""
    metrics: dict[str, dict[str, float | None]] = {}
    for key, value in results.items():
        name, comma, kind = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        error = results.get(f"{name}_stderr,{kind}")
        number = error if isinstance(error, (int, float)) else None
        metrics[name if kind == "none" else key] = {"value": value, "stderr": number}
    return metrics


def _subtasks(results: dict[str, Any], group: str) -> dict[str, Any]:
    return {name: _metrics(each) for name, each in results.items() if name != group}
