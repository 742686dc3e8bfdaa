"""The command line: `pararnn` and its commands, from `demo` to `tasks`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGPIPE
from typing import Any, NoReturn

import pararnn.base.intact  # noqa: F401  where another distribution's __init__.py does not check
from pararnn.base.device import default_device, parse_device
from pararnn.base.errors import CellError, PararnnError
from pararnn.base.extras import require
from pararnn.base.version import __version__
from pararnn.cells.find import find_cell
from pararnn.lab.evaluation.paper import PRESETS
from pararnn.lab.sweeps import split_sweep
from pararnn.lab.tasks.commands import add_actions, add_sweep, keys_first, tasks
from pararnn.lab.train import DemoConfig, run_demo
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.overrides import config_text, resolved
from pararnn.lab.train.recipes import RECIPES, recipe, summary
from pararnn.lab.train.stopping import Stopped, discard
from pararnn.lab.train.sweep import run_sweep, sweep_of
from pararnn.zoo import CELLS

DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("int8", "fp8")


class Parser(argparse.ArgumentParser):
    """Parser that answers a bad command line with one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, or 1 if the demo's verification fails; exit with 2 for bad values.

    If a signal or a closed pipe ends it, the code is 128 plus the signal's number.
    Without a command it prints the help.
    """
    parser = make_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser.print_help()
        return 0
    if arguments[:1] == ["train"]:  # argparse takes no flag between the recipe and its keys
        others, sweep = split_sweep(arguments[1:])
        others.sort(key=lambda text: not text.startswith("-"))
        arguments[1:] = [*others, *sweep]
    elif arguments[:2] == ["tasks", "run"]:
        arguments[2:] = keys_first(arguments[2:])
    options = vars(parser.parse_args(arguments))
    run: Callable[..., int] = options.pop("run")
    try:
        code = run(**options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        code = interrupt.code if isinstance(interrupt, Stopped) else 128 + SIGINT
        first = os.environ.get("RANK", "0") == "0"
        parser.exit(code, f"{parser.prog}: {str(interrupt) or 'interrupted'}\n" if first else None)
    except BrokenPipeError:  # the reader has enough
        for stream in (sys.stdout, sys.stderr):
            discard(stream)
        return 128 + SIGPIPE
    except (PararnnError, OSError) as error:
        parser.error(str(error))


def demo(**options: Any) -> int:
    """`pararnn demo`: options are fields of `DemoConfig`."""
    return 0 if run_demo(DemoConfig(**options))["verified"] else 1


def train(
    recipe_name: str | None = None,
    overrides: Sequence[str] = (),
    show: str | None = None,
    sweep: Sequence[str] = (),
) -> int:
    """`pararnn train`: run a recipe's config with `overrides`, or show it or all recipes.

    sweep: values to run in all combinations.
    """
    if show == "recipes":
        width = max(map(len, RECIPES))
        print("\n".join(f"{name:{width}}  {summary(make())}" for name, make in RECIPES.items()))
        return 0
    if recipe_name is None:
        raise PararnnError("name a recipe; `pararnn train --list` shows them")
    try:
        config = recipe(recipe_name)
        configs = sweep_of(config, overrides, sweep) if sweep else [resolved(config, overrides)]
    except ValueError as error:
        raise PararnnError(str(error)) from error
    if show == "config":
        print("\n\n".join(map(config_text, configs)))
        return 0
    from pararnn.lab.train.run import run_training  # seconds, which other commands do not wait for

    first = os.environ.get("RANK", "0") == "0"

    def run(config: RunConfig) -> Path:
        folder = run_training(config)
        if first:
            print(folder, flush=True)
        return folder

    if sweep:
        run_sweep(configs, run)
    else:
        run(configs[0])
    return 0


def compare(folders: Sequence[str], out: str) -> int:
    """`pararnn compare`: arguments as in `pararnn.lab.compare.compare_runs`."""
    from pararnn.lab.compare import compare_runs

    print(compare_runs([Path(folder) for folder in folders], Path(out)), end="")
    print(f"\n{out}: report.md, curves.png, comparison.json", file=sys.stderr)
    return 0


def export(run_folder: str, step: int | None = None, to: str | None = None) -> int:
    """`pararnn export`: arguments as in `pararnn.lab.train.run.export_checkpoint`."""
    require("transformers")
    from pararnn.lab.train.run import export_checkpoint

    print(export_checkpoint(Path(run_folder), step, None if to is None else Path(to)))
    return 0


def generate(model: str, **options: Any) -> int:
    """`pararnn generate`: options as in `pararnn.lm.hf.generate.stream_text`."""
    require("transformers")
    from pararnn.lm.hf.generate import stream_text  # seconds, which other commands do not wait for

    stream_text(model, **options)
    return 0


def evaluate(model: str, **options: Any) -> int:
    """`pararnn eval`: options as in `pararnn.lab.evaluation.run.run_evaluation`."""
    require("transformers")
    from pararnn.lab.evaluation.run import run_evaluation  # seconds, as above

    print(run_evaluation(model, **options).read_text(encoding="utf-8"), end="")
    return 0


def run_other(name: str, arguments: Sequence[str]) -> int:
    """`pararnn run`: arguments as in `pararnn.lm.hf.commands.run_command`."""
    require("transformers")
    from pararnn.lm.hf.commands import run_command  # seconds, as above

    result = run_command(name, arguments)
    return result if isinstance(result, int) else 0


def serve(model: str, **options: Any) -> int:
    """`pararnn serve`: options as in `pararnn.lab.serving.app.serve` and its `new_service`."""
    for module in ("transformers", "pydantic", "starlette", "uvicorn"):
        require(module)
    if "weights" in options:
        require("torchao")
    from pararnn.lab.serving.app import serve  # seconds, as above

    serve(model, **options)
    return 0


def make_parser() -> Parser:
    """Return the parser; a command's options have the names of its function's arguments."""
    parser = Parser(prog="pararnn", description="Nonlinear RNNs trained in parallel, exactly.")
    parser.add_argument("--version", action="version", version=f"pararnn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, text, add_options in (
        ("demo", demo, "train a small language model, then measure and check its solver", add_demo),
        ("train", train, "train a language model by a recipe", add_train),
        ("compare", compare, "compare training runs in tables and curves", add_compare),
        ("eval", evaluate, "measure a language model on texts and tasks", add_evaluate),
        ("export", export, "write the model of a run's checkpoint", add_export),
        ("generate", generate, "let a language model go on with a text", add_generate),
        (
            "run",
            run_other,
            "run a command of another package, which then knows our models",
            add_run,
        ),
        ("serve", serve, "serve a language model by OpenAI's completions protocol", add_serve),
        (
            "tasks",
            tasks,
            "train small models on synthetic tasks",
            partial(add_actions, device=_device),
        ),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            argument_default=argparse.SUPPRESS,  # where a function has its own, help names none
        )
        add_options(command)
        command.set_defaults(run=run)
    return parser


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the option of commands that run on one device."""
    command.add_argument(
        "--device", type=_device, default=default_device(), help="cpu, cuda or cuda:N"
    )


def add_demo(command: argparse.ArgumentParser) -> None:
    """Add the options of `pararnn demo`."""
    default, option = DemoConfig(), command.add_argument
    seconds = "time to train for; measuring after it takes about a quarter more"
    add_device(command)
    option("--text", metavar="FILE", help="learn this file, not Python's library")
    cell = f"the recurrence: {', '.join(CELLS)}, or a cell of your own by its import path"
    option("--cell", metavar="NAME|MODULE:CLASS", type=_cell, default=default.cell, help=cell)
    option("--seconds", type=_positive, default=default.seconds, help=seconds)
    option("--steps", type=_count, help="largest number of steps")
    option("--out", metavar="DIR", default=default.out, help="folder for the results")
    option("--seed", type=_seed, default=default.seed, help="of all random numbers")


def add_train(command: argparse.ArgumentParser) -> None:
    """Add the options of `pararnn train`."""
    keys = "other values than the recipe's, such as data.train=FILE steps=500; see --print"
    config = "print the config, with the keys and values that a run would have"
    recipes = "see --list; or package.module:function, your own that returns a RunConfig"
    command.add_argument("recipe_name", metavar="RECIPE", nargs="?", help=recipes)
    command.add_argument("overrides", metavar="key=value", nargs="*", help=keys)
    show = partial(
        command.add_mutually_exclusive_group().add_argument, dest="show", action="store_const"
    )
    add_sweep(command, "seed=0,1,2 optimiser.learning_rate=1e-3,2e-3")
    show("--list", const="recipes", help="print the recipes")
    show("--print", const="config", help=config)


def add_compare(command: argparse.ArgumentParser) -> None:
    """Add the options of `pararnn compare`."""
    runs = "folder of a run of pararnn train, or of a sweep; others are left out"
    command.add_argument("folders", metavar="RUN", nargs="+", help=runs)
    out = "folder for report.md, curves.png and comparison.json"
    command.add_argument("--out", metavar="DIR", default="runs/compare", help=out)


def add_evaluate(command: argparse.ArgumentParser) -> None:
    """Add the options of `pararnn eval`."""
    option, several = command.add_argument, partial(command.add_argument, nargs="+")
    tasks = "tasks of lm-eval by name, or files of questions (.jsonl, .yaml) and their folders"
    texts = "texts for perplexity and bits per byte"
    add_device(command)
    option("model", metavar="MODEL", help="folder of the model or of its run, or a name on the Hub")
    several("--tasks", metavar="NAME|FILE", help=tasks)
    option("--preset", choices=list(PRESETS), help="the paper's tasks and shots")
    several("--text", dest="texts", metavar="FILE|FOLDER|DATASET", help=texts)
    option("--column", metavar="NAME", help="the text's field in JSON lines and so on")
    option("--suffixes", metavar=".A,.B", help="ends of names: of a folder, read these files alone")
    option("--limit", type=_count, help="ask and read only this many, the first")
    option("--shots", type=_whole, help="examples, if not as the task has it")
    option("--batch", type=_count, help="rows that are read at once")
    option("--length", type=_count, help="tokens at once, if not as the model has it")
    option("--dtype", choices=DTYPES, help="of the weights, if not as they are stored")
    option("--seed", type=_seed, help="of the examples that are drawn")
    option("--out", metavar="DIR", help="the report's folder, if not eval in MODEL")


def add_export(command: argparse.ArgumentParser) -> None:
    """Add the options of `pararnn export`."""
    command.add_argument("run_folder", metavar="RUN", help="folder of a run of pararnn train")
    command.add_argument("--step", type=_count, help="of the checkpoint, if not the last")
    command.add_argument("--to", metavar="DIR", help="if not RUN/model-STEP")


def add_generate(command: argparse.ArgumentParser) -> None:
    """Add the options of `pararnn generate`."""
    option = command.add_argument
    prompt = "text to go on with; - reads it from the standard input"
    chunk = "number of the prompt's tokens that are read at once, if not all"
    together = "draw among the likeliest tokens that together have this chance"
    add_device(command)
    option("--model", metavar="DIR", help="folder of the model, or of its run", required=True)
    one_of = command.add_mutually_exclusive_group(required=True).add_argument
    one_of("--prompt", metavar="TEXT", type=_prompt, help=prompt)
    prompts = "file of texts to go on with, one a line"
    one_of("--prompts", metavar="FILE", dest="prompt", type=_lines, help=prompts)
    option("--max-new-tokens", type=_count, default=200, help="how many to write")
    option("--temperature", type=_temperature, default=0.8, help="0 takes the likeliest token")
    option("--top-k", type=_count, help="draw among this many likeliest tokens")
    option("--top-p", type=_chance, help=together)
    option("--seed", type=_seed, default=0, help="of the draws")
    option("--samples", type=_count, default=1, help="texts of each prompt, by seeds one apart")
    option("--stop", metavar="TEXT", action="append", help="end before this text; may be repeated")
    option("--prefill-chunk", type=_count, help=chunk)
    option("--dtype", choices=DTYPES, help="of the weights, if not as they are stored")


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `pararnn run`."""
    command.add_argument("name", metavar="COMMAND", help="such as lm_eval or transformers")
    others = "its own arguments"
    command.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help=others)


def add_serve(command: argparse.ArgumentParser) -> None:
    """Add the options of `pararnn serve`."""
    option = command.add_argument
    chunk = "largest number of prompt tokens that are read between two tokens of the rows"
    add_device(command)
    option("model", metavar="MODEL", help="folder of a model of recurrent layers, or of its run")
    option("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all of them")
    option("--port", type=_port, default=8000, help="0 takes a free one")
    option("--name", help="of the model in requests, if not the folder's")
    option("--weights", choices=WEIGHTS, help="of linear layers in 8 bits, if not as stored")
    option("--rows", type=_count, default=16, help="texts that are written at once")
    option("--queue", type=_whole, default=256, help="texts that may wait for a row")
    option("--prefill-chunk", type=_count, default=512, help=chunk)
    option("--max-length", type=_count, default=32_768, help="tokens of a prompt and its text")


def _cell(text: str) -> str:
    try:
        find_cell(text, CELLS)
    except CellError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _device(text: str) -> str:
    try:
        parse_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _prompt(text: str) -> str:
    data = sys.stdin.buffer.read() if text == "-" else os.fsencode(text)
    if not data:
        raise argparse.ArgumentTypeError("must have some text to go on with")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be UTF-8: {error}") from None


def _lines(path: str) -> list[str]:
    """Return the lines of a file that are not blank."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {error}") from None
    if not (lines := [line for line in text.splitlines() if line.strip()]):
        raise argparse.ArgumentTypeError(f"must have lines of text: {path} has none")
    return lines


def _number(
    kind: type[int] | type[float], holds: Callable[[float], bool], what: str
) -> Callable[[str], float]:
    """Return a function that reads a number and checks that it `holds`."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            article = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {article}, got {text!r}") from None
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return value

    return read


_positive = _number(float, lambda x: 0 < x < math.inf, "a positive number")
_temperature = _number(float, lambda x: 0 <= x < math.inf, "0 or a positive number")
_chance = _number(float, lambda x: 0 < x <= 1, "above 0 and at most 1")
_count = _number(int, lambda x: x >= 1, "at least 1")
_whole = _number(int, lambda x: x >= 0, "at least 0")
_port = _number(int, lambda x: 0 <= x < 2**16, "from 0 to 65535")
_seed = _number(int, lambda x: 0 <= x < 2**63, "from 0 to 2^63 - 1")


if __name__ == "__main__":
    sys.exit(main())
