"""Evaluation of a model's folder, with a report."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from pararnn.base.atomic import write_text
from pararnn.base.errors import EvaluationError
from pararnn.base.extras import require
from pararnn.base.version import __version__
from pararnn.lab.evaluation.jobs import Job, plan
from pararnn.lab.evaluation.report import markdown
from pararnn.lab.evaluation.texts import score_texts
from pararnn.lab.records import to_json
from pararnn.lab.train.corpus.sources import LeftOut, documents, files_of, lines_of, sources_of
from pararnn.lab.train.files import check_own
from pararnn.lab.train.run import quiet
from pararnn.lm.hf.load import load_model


def run_evaluation(
    model: str,
    *,
    tasks: Sequence[str] = (),
    preset: str | None = None,
    texts: Sequence[str] = (),
    column: str = "text",
    suffixes: str = "",
    limit: int | None = None,
    shots: int | None = None,
    batch: int = 8,
    length: int | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 1234,
    out: str | None = None,
) -> Path:
    """Evaluate a model; return the path of the report, next to results.json.

    Args:
        model: its folder, or a name on the Hub.
        tasks: names of lm-eval, task files, or folders of them; see `plan`.
        preset: "paper" are the tasks and shots of its Tables 2 and 5.
        texts: files, folders and datasets, `column` and `suffixes`: see `DataConfig`.
        limit: number of questions of each task, and of documents of each text: the first ones.
        shots: examples before a question; None is the task's own number, 0 for files.
        batch: rows that are read at once.
        length: tokens that are read at once; of models with attention it is the context. None is
            the model's own.
        dtype: of the weights; "auto" is that of the files.
        seed: of the sampled examples; lm-eval's own is the default.
        out: the report's folder; None is eval in the model's, or of a name on the Hub eval/name.

    Raises EvaluationError without tasks and texts, and for tasks; DataError for files of tasks and
    texts; CheckpointError for a folder without a model; MissingExtra where tasks need lm-eval;
    TrainingError where a report would replace another file.
    """
    jobs = plan(tasks, shots, preset)
    if not jobs and not texts:
        raise EvaluationError(
            "there is nothing to evaluate: give tasks (--tasks, --preset paper) or texts (--text)"
        )
    for part in (part for source in texts for part in sources_of(source)):
        files_of(part, suffixes)
    folder = _folder(model) if out is None else Path(out)
    check_own(folder, ("results.json", "results.md"), "results.json", "versions")
    with quiet():
        network, tokenizer = load_model(model, dtype)
    network = network.to(device).eval()
    if jobs:
        require("lm_eval")
        # An import of seconds, which texts do not need.
        from pararnn.lab.evaluation.harness import Harness, ask, load_task
    # All tasks are loaded before the first is run: a run may take hours.
    task_sets = [load_task(job, seed) for job in jobs]
    results: dict[str, Any] = {
        "model": model,
        "config": network.config.to_dict(),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "device": str(network.device),
        "dtype": str(network.dtype).removeprefix("torch."),
        "batch": batch,
        "length": length,
        "limit": limit,
        "seed": seed,
        "versions": _versions(jobs),
        "texts": [],
        "tasks": [],
    }
    for source in texts:
        left_out: LeftOut = {}
        first = islice(documents(source, column, suffixes=suffixes, left_out=left_out), limit)
        try:
            score = score_texts(network, tokenizer, first, batch=batch, length=length)
        except EvaluationError as error:
            raise EvaluationError(f"{source}: {error}") from error
        entry = {"source": source, **score.to_dict(), "left_out": lines_of(left_out)}
        results["texts"].append(entry)
    if jobs:
        lm = Harness(network, tokenizer, batch, length)
        for job, task in zip(jobs, task_sets, strict=True):
            results["tasks"] += ask(lm, job, task, limit)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.json", to_json(results, default=str))
    write_text(folder / "results.md", markdown(results))
    return folder / "results.md"


def _folder(model: str) -> Path:
    return Path(model, "eval") if Path(model).exists() else Path("eval", model.replace("/", "--"))


def _versions(jobs: Sequence[Job]) -> dict[str, str]:
    others = ["torch", "transformers", *(["lm-eval"] if jobs else [])]
    return {"pararnn": __version__} | {name: version(name) for name in others}
