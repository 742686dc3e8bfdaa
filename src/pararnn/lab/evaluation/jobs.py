"""Jobs of an evaluation: names of tasks, files, and the paper's shots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pararnn.base.errors import EvaluationError
from pararnn.lab.evaluation.paper import PRESETS
from pararnn.lab.evaluation.questions import task_name
from pararnn.lab.train.corpus.sources import DataError

LINES, YAML = (".jsonl",), (".yaml", ".yml")


class Job(NamedTuple):
    """A task to ask. name: lm-eval's, or that of a file's task; shots: None is the task's own
    number; file: questions as JSON lines, or a task file of lm-eval."""

    name: str
    shots: int | None = None
    file: Path | None = None


def plan(tasks: Sequence[str], shots: int | None = None, preset: str | None = None) -> list[Job]:
    """Return the tasks of a preset, then `tasks`: names, task files, and folders of JSON lines.

    A file with the name of a preset's task stands in for it, without the Hub. `shots` are those of
    tasks outside the preset. Raises DataError for files that are missing or of another
    kind, EvaluationError for two files of one name.
    """
    files: dict[str, Path] = {}
    for path in (path for spec in tasks if _is_path(spec) for path in _files(Path(spec))):
        name = task_name(path)
        if files.setdefault(name, path) != path:
            raise EvaluationError(f"{path} and {files[name]} are both called {name}: rename one")
    jobs = [Job(name, number, files.get(name)) for name, number in PRESETS.get(preset or "", ())]
    names = {job.name for job in jobs}
    jobs += [Job(name, shots, path) for name, path in files.items() if name not in names]
    return jobs + [Job(name, shots) for name in dict.fromkeys(tasks) if not _is_path(name)]


def _is_path(spec: str) -> bool:
    return Path(spec).exists() or "/" in spec or Path(spec).suffix in LINES + YAML


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in LINES)
        if not files:
            raise DataError(f"the folder {path} has no task files; they end in {LINES[0]}")
        return files
    if path.suffix not in LINES + YAML:
        raise DataError(f"{path} is no task file; they end in {', '.join(LINES + YAML)}")
    if not path.is_file():
        raise DataError(f"there is no task file {path}")
    return [path]
