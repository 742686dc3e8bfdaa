"""Tasks by lm-eval: its own, and those of its task files (.yaml), whose data may be local."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import make_table

from pararnn.base.errors import EvaluationError
from pararnn.lab.evaluation.texts import LENGTH, carries_states, check_number, first_token
from pararnn.lm.hf import ParaRNNForCausalLM

UNLIMITED = 2**31 - 1
"""Tokens of context of a model without attention, for lm-eval."""

# Otherwise lm-eval forks a process for each core to bootstrap, next to PyTorch's threads.
os.environ.setdefault("DISABLE_MULTIPROC", "1")
BOOTSTRAP_ITERS = 1000
"""Bootstrap iterations for the standard error of a perplexity; lm-eval's 100,000 take minutes."""


class Harness(HFLM):
    """lm-eval's model, which reads prompts of any length where the model carries states."""

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

    def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
        with torch.no_grad():
            return self.model(inps, use_cache=False).logits

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        results = super()._loglikelihood_tokens(requests, *args, **kwargs)
        for log_likelihood, _ in results:
            check_number(log_likelihood)
        return results


def ask(
    lm: Harness, tasks: Sequence[str], shots: int | None, limit: int | None, seed: int
) -> tuple[dict[str, Any], str]:
    """Return lm-eval's results of tasks by name or task file, and its table in Markdown.

    shots: None is each task's own number. seed: of the examples that are drawn. Raises
    EvaluationError for logits that are NaN, and where lm-eval cannot load or ask a task.
    """
    try:
        with quiet():
            output: Any = evaluator.simple_evaluate(
                lm,
                tasks=list(tasks),
                num_fewshot=shots,
                limit=limit,
                bootstrap_iters=BOOTSTRAP_ITERS,
                log_samples=False,
                fewshot_random_seed=seed,
            )
    except EvaluationError:
        raise
    # A task is foreign code and data, and may raise anything.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EvaluationError(
            f"lm-eval cannot ask {', '.join(tasks)}: {reason}; `lm-eval ls tasks` shows its tasks, "
            "whose data come from the Hub"
        ) from error
    table = make_table(output) + (make_table(output, "groups") if output.get("groups") else "")
    keys = ("results", "groups", "configs", "versions", "n-shot", "n-samples")
    return {key: output[key] for key in keys if key in output}, table


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
