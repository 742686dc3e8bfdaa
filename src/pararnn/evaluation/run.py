"""An evaluation from a model's folder to a report."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from pararnn.atomic import write_text
from pararnn.errors import EvaluationError
from pararnn.evaluation.jobs import Job, plan
from pararnn.evaluation.report import markdown
from pararnn.evaluation.texts import score_texts
from pararnn.extras import require
from pararnn.lm.hf.load import load_model
from pararnn.records import to_json
from pararnn.train.corpus.sources import LeftOut, documents, files_of, sources_of
from pararnn.train.files import check_own
from pararnn.train.run import quiet
from pararnn.version import __version__


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
    """Evaluate a model; the report's path, beside which results.json is.

    Args:
        model: its folder, or a name on the Hub.
        tasks: names of lm-eval, task files, or folders of them; see `plan`.
        preset: "paper" are the tasks and shots of its Tables 2 and 5.
        texts: files, folders and datasets, `column` and `suffixes`: see `corpus.sources.pieces`.
        limit: only the first so many questions of each task, and documents of each text.
        shots: examples before a question; None is the task's own number, 0 for files.
        batch: rows that are read at once.
        length: tokens that are read at once; of models with attention it is the context. None is
            the model's own.
        dtype: of the weights; "auto" is that of the files.
        seed: of the examples that are drawn; lm-eval's own is the default.
        out: the report's folder; None is eval in the model's, or of a name on the Hub eval/name.

    Raises EvaluationError where nothing is asked, and for tasks; DataError for files of tasks and
    texts; CheckpointError for what is no model; MissingExtra where tasks need lm-eval;
    TrainingError where a report would replace a file that is none.
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
        found, tokenizer = load_model(model, dtype)
    found = found.to(device).eval()
    loaded = _load_tasks(jobs, seed)
    results: dict[str, Any] = {
        "model": model,
        "config": found.config.to_dict(),
        "parameters": sum(parameter.numel() for parameter in found.parameters()),
        "device": str(found.device),
        "dtype": str(found.dtype).removeprefix("torch."),
        "batch": batch,
        "length": length,
        "limit": limit,
        "seed": seed,
        "versions": _versions(jobs),
        "texts": [],
        "tasks": [],
    }
    for source in texts:
        left_out = LeftOut()
        read = documents(source, column, suffixes=suffixes, left_out=left_out)
        try:
            score = score_texts(
                found,
                tokenizer,
                islice(read, limit),
                batch=batch,
                length=length,
            )
        except EvaluationError as error:
            raise EvaluationError(f"{source}: {error}") from error
        entry = {"source": source, **score.to_dict(), "left_out": left_out.lines()}
        results["texts"].append(entry)
    if jobs:
        from pararnn.evaluation.harness import Harness, ask

        lm = Harness(found, tokenizer, batch, length)
        for job, task in zip(jobs, loaded, strict=True):
            results["tasks"] += ask(lm, job, task, limit)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.json", to_json(results, default=str))
    write_text(folder / "results.md", markdown(results))
    return folder / "results.md"


def _load_tasks(jobs: Sequence[Job], seed: int) -> list[Any]:
    """All before the first is asked, which may take hours."""
    if not jobs:
        return []
    require("lm_eval")
    from pararnn.evaluation.harness import load_task  # seconds, which texts do not wait for

    return [load_task(job, seed) for job in jobs]


def _folder(model: str) -> Path:
    return Path(model, "eval") if Path(model).exists() else Path("eval", model.replace("/", "--"))


def _versions(jobs: Sequence[Job]) -> dict[str, str]:
    others = ["torch", "transformers", *(["lm-eval"] if jobs else [])]
    return {"pararnn": __version__} | {name: version(name) for name in others}
