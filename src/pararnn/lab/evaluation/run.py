"""Evaluation of a model's folder, with a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from pararnn.base.atomic import write_text
from pararnn.base.errors import EvaluationError
from pararnn.base.extras import require
from pararnn.base.version import __version__
from pararnn.lab.evaluation.texts import score_texts
from pararnn.lab.folders import make_folder
from pararnn.lab.records import to_json
from pararnn.lab.train.corpus.sources import LeftOut, documents, files_of, lines_of, sources_of
from pararnn.lab.train.files import check_writable
from pararnn.lab.train.run import quiet
from pararnn.lm.checkpoint import model_folder
from pararnn.lm.hf.load import load_model

PRESETS = {
    "paper": (
        *(("arc_challenge", 25), ("arc_challenge", 3), ("hellaswag", 10), ("hellaswag", 0)),
        *(("openbookqa", 10), ("openbookqa", 0), ("winogrande", 5), ("winogrande", 0)),
        *(("piqa", 0), ("mmlu", 0)),
    )
}
"""Tasks and shots by preset: those of the paper's Tables 2 and 5."""


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
        model: its folder, a training run's, or a name on the Hub.
        tasks: names of lm-eval, or its task files (.yaml), whose data may be local.
        preset: "paper" are the tasks and shots of its Tables 2 and 5.
        texts: files, folders and datasets, `column` and `suffixes`: see `DataConfig`.
        limit: number of questions of each task, and of documents of each text: the first ones.
        shots: examples before a question, of `tasks`; None is the task's own number.
        batch: rows that are read at once.
        length: tokens that are read at once; of models with attention it is the context. None is
            the model's own.
        dtype: of the weights; "auto" is that of the files.
        seed: of the sampled examples; lm-eval's own is the default.
        out: the report's folder; None is eval in the model's, or of a name on the Hub eval/name.

    Raises EvaluationError without tasks and texts, and for tasks; DataError for texts;
    CheckpointError for a folder without a model; MissingExtra where tasks need lm-eval;
    TrainingError where a report would replace another file, or cannot be written.
    """
    sets: dict[int | None, list[str]] = {shots: list(tasks)} if tasks else {}
    for name, count in PRESETS[preset] if preset else ():
        sets.setdefault(count, []).append(name)
    if not sets and not texts:
        raise EvaluationError(
            "there is nothing to evaluate: give tasks (--tasks, --preset paper) or texts (--texts)"
        )
    for path in (path for source in texts for path in sources_of(source)):
        files_of(path, suffixes)
    if Path(model).exists():
        model = str(model_folder(model))
    folder = _folder(model) if out is None else Path(out)
    check_writable(folder, ("results.json", "results.md"), "results.json", "versions")
    with quiet():
        network, tokenizer = load_model(model, dtype)
    network = network.to(device).eval()
    make_folder(folder)  # now, not after the measurements
    if sets:
        require("lm_eval")
        # An import of seconds, which texts do not need.
        from pararnn.lab.evaluation.harness import Harness, ask
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
        "versions": _versions(bool(sets)),
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
    tables = [_texts_table(results["texts"])] if texts else []
    if sets:
        lm = Harness(network, tokenizer, batch, length)
        for examples, names in sets.items():
            answers, table = ask(lm, names, examples, limit, seed)
            results["tasks"].append(answers)
            tables.append(table)
    write_text(folder / "results.json", to_json(results, default=str))
    write_text(folder / "results.md", _head(results) + "\n\n".join(tables) + "\n")
    return folder / "results.md"


def _folder(model: str) -> Path:
    return Path(model, "eval") if Path(model).exists() else Path("eval", model.replace("/", "--"))


def _versions(with_tasks: bool) -> dict[str, str]:
    packages = ["torch", "transformers", *(["lm-eval"] if with_tasks else [])]
    return {"pararnn": __version__} | {name: version(name) for name in packages}


def _head(results: dict[str, Any]) -> str:
    """Return the head of the report: the model, the device and versions."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    limit = results["limit"]
    return (
        f"# {results['model']}\n\n{results['parameters']:,} parameters, {results['dtype']} on "
        f"{results['device']}; {versions}."
        + (f" Only the first {limit} documents and questions of each." if limit else "")
        + "\n\n"
    )


def _texts_table(texts: Sequence[Mapping[str, Any]]) -> str:
    """Return the scores of texts as Markdown, and the omitted documents."""
    counts, means = ("documents", "tokens", "bytes"), ("nats_per_token", "perplexity")
    lines = ["| text | documents | tokens | bytes | nats/token | perplexity | bits/byte |"]
    lines.append("|" + " --- |" * 7)
    for text in texts:
        cells = [f"{text[name]:,}" for name in counts]
        cells += [f"{text[name]:.4f}" for name in (*means, "bits_per_byte")]
        lines.append(f"| {' | '.join([text['source'], *cells])} |")
    left_out = [f"{line}." for text in texts for line in text["left_out"]]
    return "\n\n".join(["\n".join(lines), *left_out])
