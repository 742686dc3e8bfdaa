"""The commands of `pararnn`, each a function whose signature is its command line."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from pararnn.base.device import default_device
from pararnn.base.errors import PararnnError
from pararnn.base.extras import require
from pararnn.lab import options, records
from pararnn.lab.options import (
    Chance,
    Count,
    Device,
    Port,
    Seed,
    Temperature,
    Whole,
    arguments_of,
    configured,
    name_of,
    points_of,
    refusing,
    run,
    split_sweep,
)
from pararnn.lab.records import to_json
from pararnn.lab.tasks.results import flat
from pararnn.lab.tasks.run import TaskRun, paper_run, run_all

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DEVICE = default_device()


def demo(arguments: Sequence[str]) -> int:
    """Train a small language model on real text, then check and time its engines."""
    from pararnn.lab.train.demo import demo_config, run_demo

    config = configured(demo_config(), arguments, "pararnn demo")
    return 0 if run_demo(config)["verified"] else 1


TRAIN = """usage: pararnn train RECIPE [--print] [--sweep key=value,value ...] [--key value ...]

{doc}
RECIPE is a name below, or package.module:function, which returns a RunConfig. `pararnn train
RECIPE --help` shows its keys, --print the config that a run would have. --sweep runs all
combinations of values, such as seed=0,1,2; those that have ended stay.

"""


def train(arguments: Sequence[str]) -> int:
    """Train a language model by a recipe."""
    from pararnn.lab.train.recipes import RECIPES, recipe, summary

    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "--list"):
        if name != "--list":
            print(TRAIN.format(doc=train.__doc__), end="")
        width = max(map(len, RECIPES))
        print("\n".join(f"{name:{width}}  {summary(make())}" for name, make in RECIPES.items()))
        return 0
    remaining, sweep = split_sweep(arguments[1:])
    overrides = [text for text in remaining if text != "--print"]
    with refusing():
        default, prog = recipe(name), f"pararnn train {name}"
    values = records.flat(asdict(default))

    def config_at(point: Any) -> Any:
        return configured(default, [*overrides, *arguments_of(point, values)], prog)

    from pararnn.lab.train.sweep import run_sweep, sweep_of

    with refusing():
        configs = sweep_of(points_of(sweep), config_at, name_of) if sweep else [config_at({})]
    if len(overrides) < len(remaining):
        print("\n".join(to_json(asdict(config)) for config in configs), end="")
        return 0
    from pararnn.lab.train.run import run_training  # seconds, which other commands do not wait for

    def train_one(config: Any) -> Path:
        folder = run_training(config)
        if os.environ.get("RANK", "0") == "0":
            print(folder, flush=True)
        return folder

    if sweep:
        run_sweep(configs, train_one)
    else:
        train_one(configs[0])
    return 0


def compare(folders: Positional[list[str]], out: str = "runs/compare") -> int:
    """Compare training runs in a table and curves.

    Args:
        folders: of runs of `pararnn train`, or of sweeps.
        out: folder for comparison.md and comparison.png.
    """
    from pararnn.lab.compare import compare_runs

    print(compare_runs([Path(folder) for folder in folders], Path(out)), end="")
    return 0


def export(run_folder: Positional[str], step: Count | None = None, to: str | None = None) -> int:
    """Write the model of a run's checkpoint.

    Args:
        run_folder: of a run of `pararnn train`.
        step: of the checkpoint, if not the last.
        to: folder of the model, if not RUN/model-STEP.
    """
    require("transformers")
    from pararnn.lab.train.run import export_checkpoint

    print(export_checkpoint(Path(run_folder), step, None if to is None else Path(to)))
    return 0


def draft(
    model: Positional[str],
    texts: str,
    drafts: Count = 4,
    steps: Count = 1000,
    batch: Count = 16,
    length: Count = 512,
    learning_rate: float = 3e-3,
    column: str = "text",
    suffixes: str = "",
    seed: Seed = 0,
    device: Device = DEVICE,
) -> int:
    """Train a head that drafts tokens for a model.

    Args:
        model: folder of a model of recurrent layers, or of its run; the head is written there.
        texts: to learn from, as data.train of `pararnn train`.
        drafts: tokens of a draft.
        steps: of the optimizer.
        batch: rows a step.
        length: tokens of a row.
        learning_rate: the peak.
        column: the text's field in JSON lines and so on.
        suffixes: ends of names: of a folder, read these files only.
        seed: of the weights and of the order of rows.
    """
    options = dict(locals())
    require("transformers")
    from pararnn.lab.train.draft import train_draft_head  # seconds

    with refusing():
        print(f"{train_draft_head(options.pop('model'), options.pop('texts'), **options):.2f}")
    return 0


def generate(
    model: str,
    prompt: str | None = None,
    prompts: str | None = None,
    max_new_tokens: Count = 200,
    temperature: Temperature = 0.8,
    top_k: Count | None = None,
    top_p: Chance = 1.0,
    seed: Seed = 0,
    samples: Count = 1,
    stop: tuple[str, ...] = (),
    prefill_chunk: Count | None = None,
    dtype: Dtype = "auto",
    device: Device = DEVICE,
) -> int:
    """Let a language model continue a text.

    Args:
        model: folder of the model, or of its run.
        prompt: text to continue; - reads it from the standard input.
        prompts: file of texts to continue, one a line.
        max_new_tokens: how many to write.
        temperature: 0 takes the likeliest token.
        top_k: draw among this many likeliest tokens; all if it is not given.
        top_p: draw among the likeliest tokens that together have this chance.
        seed: of the draws.
        samples: texts of each prompt, by seeds one apart.
        stop: texts to end before.
        prefill_chunk: number of the prompt's tokens that are read at once; all if it is not given.
        dtype: of the weights; auto is as they are stored.
    """
    options = dict(locals())
    options["prompt"] = _texts(options["prompt"], options.pop("prompts"))
    if "" in stop:
        raise PararnnError("--stop must be texts to end before, and one is empty: leave it out")
    require("transformers")
    from pararnn.lm.hf.generate import stream_text  # seconds, which other commands do not wait for

    stream_text(options.pop("model"), options.pop("prompt"), **options)
    return 0


def _texts(prompt: str | None, prompts: str | None) -> str | list[str]:
    """Return the text or texts to continue; PararnnError unless one of the two has some."""
    if (prompt is None) == (prompts is None):
        raise PararnnError("give one of --prompt and --prompts")
    try:
        if prompts is not None:
            text = _file_text(prompts)
            lines = [line for line in text.split("\n") if line.strip()]
            if not lines:
                raise PararnnError(f"--prompts must have lines of text: {prompts} has none")
            return lines
        data = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt or "")
        if not data:
            raise PararnnError("--prompt must have some text to continue")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PararnnError(f"prompts must be UTF-8: {error}") from None


def _file_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")  # lines of any platform
    except OSError as error:
        raise PararnnError(
            f"--prompts must be a file of texts, one a line: {name} cannot be read: "
            f"{error.strerror or error}"
        ) from error


def evaluate(
    model: Positional[str],
    tasks: tuple[str, ...] = (),
    preset: Literal["paper"] | None = None,
    texts: tuple[str, ...] = (),
    column: str = "text",
    suffixes: str = "",
    limit: Count | None = None,
    shots: Whole | None = None,
    batch: Count = 8,
    length: Count | None = None,
    dtype: Dtype = "auto",
    seed: Seed = 1234,
    out: str | None = None,
    device: Device = DEVICE,
) -> int:
    """Measure a language model on texts and tasks.

    Args:
        model: folder of the model or of its run, or a name on the Hub.
        tasks: tasks of lm-eval by name, or task files (.yaml) and their folders.
        preset: the paper's tasks and shots.
        texts: for perplexity and bits per byte: files, folders, data sets.
        column: the text's field in JSON lines and so on.
        suffixes: ends of names: of a folder, read these files only.
        limit: ask and read only this many, the first.
        shots: examples, if not as the task has it.
        batch: rows that are read at once.
        length: tokens at once, if not as the model has it.
        dtype: of the weights; auto is as they are stored.
        seed: of the examples that are drawn.
        out: the report's folder, if not eval in MODEL.
    """
    options = dict(locals())
    require("transformers")
    from pararnn.lab.evaluation.run import run_evaluation  # seconds

    report = run_evaluation(options.pop("model"), **options)
    print(report.read_text(encoding="utf-8"), end="")
    return 0


def run_other(arguments: Sequence[str]) -> int:
    """Run a command of another package, such as lm_eval, which then knows our models."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: pararnn run COMMAND ...\n\n{run_other.__doc__}")
        return 0
    require("transformers")
    from pararnn.lm.hf.commands import run_command  # seconds

    result = run_command(arguments[0], arguments[1:])
    return result if isinstance(result, int) else 0


def serve(
    model: Positional[str],
    host: str = "127.0.0.1",
    port: Port = 8000,
    name: str | None = None,
    weights: Literal["int8", "fp8"] | None = None,
    rows: Count = 16,
    queue: Whole = 256,
    prefill_chunk: Count = 512,
    max_length: Count = 32_768,
    prefix_mib: Whole = 1024,
    prefix_grain: Count = 16,
    prefix_answers: bool = True,
    prefix_prompts: bool = True,
    drafts: Whole = 0,
    device: Device = DEVICE,
) -> int:
    """Serve a language model by OpenAI's completions protocol.

    Args:
        model: folder of a model, or of its run.
        host: address to listen on; 0.0.0.0 is all of them.
        port: 0 takes a free one.
        name: of the model in requests, if not the folder's.
        weights: of linear layers in 8 bits, if not as stored.
        rows: texts that are written at once.
        queue: texts that may wait for a row.
        prefill_chunk: largest number of prompt tokens that are read between two tokens of the rows.
        max_length: tokens of a prompt and its text.
        prefix_mib: memory for keys, and for states from which prompts that begin alike continue.
        prefix_grain: tokens from one kept state to the next, and of a page of keys.
        prefix_answers: keep states of written texts too.
        prefix_prompts: keep states at all.
        drafts: most tokens that are looked up in a text and verified at once, such as 7.
    """
    options = {name: value for name, value in locals().items() if value is not None}
    for module in (
        "transformers",
        "pydantic",
        "starlette",
        "uvicorn",
        *(["torchao"] if weights else []),
    ):
        require(module)
    from pararnn.lab.serving.app import serve as serve_model  # seconds

    serve_model(options.pop("model"), **options)
    return 0


def tasks(arguments: Sequence[str]) -> int:
    """Train small models on synthetic tasks."""
    if not arguments or arguments[0] not in ACTIONS:
        print(f"usage: pararnn tasks {{{','.join(ACTIONS)}}} ...\n\n{tasks.__doc__}")
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    return call(ACTIONS[arguments[0]], f"pararnn tasks {arguments[0]}", arguments[1:])


def list_tasks() -> int:
    """Print the tasks and the mixers."""
    from pararnn.lab.tasks.models import TASK_MIXERS
    from pararnn.lab.tasks.table import TASKS
    from pararnn.zoo import CELLS, MATRIX_CELLS

    width = max(map(len, TASKS))
    for name, task in TASKS.items():
        print(f"{name:{width}}  {(type(task).__doc__ or '').splitlines()[0]}")
    mixers = ", ".join(dict.fromkeys([*CELLS, *MATRIX_CELLS, "attention", *TASK_MIXERS]))
    print(f"\nmixers: {mixers}, or the import path of a cell or a Mixer, package.module:Class")
    return 0


def run_tasks(arguments: Sequence[str]) -> int:
    """Train models on tasks and test them: NAME [NAME ...] --mixer M [M ...] [--key value ...]

    --sweep key=value,value ... runs all combinations of values; results that are there stay.
    `pararnn tasks run NAME --help` shows all keys: of the task, the model and its training.
    """
    texts, sweep = split_sweep(arguments)
    names = texts[: next((i for i, text in enumerate(texts) if text[:1] == "-"), len(texts))]
    if not names:
        print(f"usage: pararnn tasks run\n\n{inspect.cleandoc(run_tasks.__doc__ or '')}")
        return 0 if texts[:1] in ([], ["-h"], ["--help"]) else 2

    def split(
        mixer: tuple[str, ...], out: str = "runs/tasks", at_once: Count = 1
    ) -> tuple[tuple[str, ...], str, int]:
        return mixer, out, at_once

    prog = f"pararnn tasks run {' '.join(names)}"
    rest = texts[len(names) :]
    if {"-h", "--help"}.intersection(rest):
        configured(paper_run(names[0], "gru"), ["--help"], prog, flat=True)
    (mixers, out, at_once), overrides = options.run_known(split, rest, prog)
    configs = task_runs(names, mixers, overrides, sweep)
    with refusing():
        run_all(configs, Path(out), at_once)
    return 0


def task_runs(
    names: Sequence[str], mixers: Sequence[str], overrides: Sequence[str], sweep: Sequence[str] = ()
) -> list[TaskRun]:
    """Return the paper's config of each task and mixer with options, at each point of a sweep."""

    def config_at(name: str, mixer: str, point: Mapping[str, str]) -> TaskRun:
        with refusing():
            paper = replace(paper_run(name, mixer), device=DEVICE)
        prog = f"pararnn tasks run {name}"
        words = [*overrides, *arguments_of(point, flat(asdict(paper)))]
        config = configured(paper, words, prog, flat=True)
        values = flat(asdict(config))
        swept = {key: str(values[key.replace("-", "_")]).lower() for key in point}
        return replace(config, sweep=name_of(swept))

    with refusing():
        points = points_of(sweep)
    return [config_at(*case) for case in itertools.product(names, mixers, points)]


def table_tasks(folder: Positional[str]) -> int:
    """Print the table of a folder's results and write it with its pictures.

    Args:
        folder: that `pararnn tasks run` wrote to.
    """
    from pararnn.lab.tasks.report import write_report

    with refusing():
        print(write_report(Path(folder)))
    return 0


ACTIONS: dict[str, Callable[..., int]] = {
    "list": list_tasks,
    "run": run_tasks,
    "table": table_tasks,
}
COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "train": train,
    "compare": compare,
    "eval": evaluate,
    "export": export,
    "draft": draft,
    "generate": generate,
    "run": run_other,
    "serve": serve,
    "tasks": tasks,
}


def call(command: Callable[..., int], prog: str, arguments: Sequence[str]) -> int:
    """Run a command: one that takes its arguments as they are, or options of its signature."""
    if list(inspect.signature(command).parameters) == ["arguments"]:
        return command(list(arguments))
    return run(command, arguments, prog)
