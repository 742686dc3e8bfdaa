"""Command lines of functions and frozen dataclasses, by tyro; values to sweep over."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from pararnn.base.device import parse_device
from pararnn.base.errors import PararnnError
from pararnn.lm.config import LMConfig

Spec = tyro.constructors.PrimitiveConstructorSpec
REGISTRY = tyro.constructors.ConstructorRegistry()
Config = TypeVar("Config")


def ranged(value_type: type, wanted: str, holds: Callable[[Any], bool]) -> Any:
    """Return the type of an option whose value must hold a condition, which `wanted` says."""

    def read(texts: list[str]) -> Any:
        value = value_type(texts[0])
        if not holds(value):
            raise ValueError(f"must be {wanted}, got {texts[0]!r}")
        return value

    metavar = f"{value_type.__name__.upper()}, {wanted}"
    return Annotated[value_type, Spec(1, metavar, read, lambda x: isinstance(x, value_type), _text)]


def _text(value: Any) -> list[str]:
    return [str(value)]


def _device(texts: list[str]) -> str:
    parse_device(texts[0])
    return texts[0]


Count = ranged(int, "at least 1", lambda x: x >= 1)
Whole = ranged(int, "at least 0", lambda x: x >= 0)
Seed = ranged(int, "from 0 to 2^63 - 1", lambda x: 0 <= x < 2**63)
Temperature = ranged(float, "0 or positive", lambda x: 0 <= x < math.inf)
Chance = ranged(float, "above 0 and at most 1", lambda x: 0 < x <= 1)
Port = ranged(int, "from 0 to 65535", lambda x: 0 <= x < 2**16)
Device = Annotated[str, Spec(1, "cpu|cuda|cuda:N", _device, lambda x: isinstance(x, str), _text)]


@REGISTRY.primitive_rule
def _mapping(info: Any) -> Any:
    """Read a mapping as a JSON object."""
    if info.type != Mapping[str, Any]:
        return None

    def read(texts: list[str]) -> Any:
        if not isinstance(value := json.loads(texts[0]), dict):
            raise ValueError(f"must be a JSON object, got {texts[0]!r}")
        return value

    return Spec(1, "JSON", read, lambda x: isinstance(x, Mapping), lambda x: [json.dumps(x)])


@REGISTRY.struct_rule
def _language_model(info: Any) -> Any:
    """Compute again the values that follow from a model's sizes, unless they are given.

    intermediate_size, where the default has the width's, and mixers, where they are all alike; a
    single mixer is for all blocks.
    """
    model = info.default
    if not isinstance(model, LMConfig):
        return None
    defaults = {field.name: getattr(model, field.name) for field in fields(model)}
    if model.intermediate_size == replace(model, intermediate_size=None).intermediate_size:
        defaults["intermediate_size"] = None
    if len(set(model.mixers or ())) == 1:
        defaults["mixers"] = (model.mixers or ())[:1]

    def build(**values: Any) -> LMConfig:
        if len(mixers := values.get("mixers") or ()) == 1:
            values["mixers"] = tuple(mixers) * values["num_hidden_layers"]
        return LMConfig(**values)

    hints = get_type_hints(LMConfig)
    specs = [
        tyro.constructors.StructFieldSpec(name, hints[name], default)
        for name, default in defaults.items()
    ]
    return tyro.constructors.StructConstructorSpec(build, tuple(specs))


def run(function: Callable[..., Any], arguments: Sequence[str], prog: str) -> Any:
    """Call a function with the options in `arguments`, by its signature and docstring.

    Bad ones, and --help, end the program as argparse does, with codes 2 and 0.
    """
    return tyro.cli(function, args=arguments, prog=prog, registry=REGISTRY, config=STYLE)


def run_known(
    function: Callable[..., Any], arguments: Sequence[str], prog: str
) -> tuple[Any, list[str]]:
    """Call a function with those of `arguments` that are its options; return the others too."""
    return tyro.cli(
        function,
        args=arguments,
        prog=prog,
        registry=REGISTRY,
        config=STYLE,
        return_unknown_args=True,
        add_help=False,
    )


STYLE = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)
"""Options of tyro: --compile False in place of --no-compile; records as they are by default."""


def configured(default: Config, arguments: Sequence[str], prog: str, flat: bool = False) -> Config:
    """Return a frozen dataclass with the values of options such as --steps 10 --model.cell lstm.

    flat: leave out names of records (--cell). Values that the dataclass refuses end as in `run`.
    """
    style = (*STYLE, tyro.conf.OmitArgPrefixes) if flat else STYLE
    return tyro.cli(
        type(default), default=default, args=arguments, prog=prog, registry=REGISTRY, config=style
    )


@contextmanager
def refusing() -> Iterator[None]:
    """Raise PararnnError in place of a block's ValueError: a value that a user gave is wrong."""
    try:
        yield
    except ValueError as error:
        raise PararnnError(str(error)) from error


def points_of(sweep: Iterable[str]) -> list[dict[str, str]]:
    """Return the combinations of a sweep's values, by key; the last key changes first.

    sweep: texts "key=a,b,c", or "key=a,b|c" of values with commas in them. Raises ValueError for a
    text that is none, and for a key that stands twice.
    """
    choices: dict[str, list[str]] = {}
    for text in sweep:
        key, _, values = text.partition("=")
        texts = values.split("|" if "|" in values else ",")
        if not key or not all(texts) or key in choices:
            raise ValueError(f"{text!r} must be a new key=value,value, such as seed=0,1,2")
        choices[key] = texts
    return [
        dict(zip(choices, point, strict=True)) for point in itertools.product(*choices.values())
    ]


def arguments_of(point: Mapping[str, str], values: Mapping[str, Any]) -> list[str]:
    """Return a sweep's point as options.

    values: the present ones by key. Where one is a tuple, commas separate the entries of a new one.
    """
    several = {key for key, value in values.items() if isinstance(value, tuple)}
    options = {
        key: value.split(",") if key.replace("-", "_") in several else [value]
        for key, value in point.items()
    }
    return [text for key, texts in options.items() for text in (f"--{key}", *texts)]


def name_of(values: Mapping[str, Any]) -> str:
    """Return a name for files, of keys and values: learning_rate-0.001-seed-0.

    Keys lose the records that they are in, unless two would be the same.
    """
    last = [key.rpartition(".")[2] for key in values]
    words = [
        f"{key if last.count(short) > 1 else short}-{values[key]}"
        for key, short in sorted(zip(values, last, strict=True))
    ]
    return re.sub(r"[^\w.+-]+", "-", "-".join(words)).strip("-")


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into others, and the texts key=value,value after --sweep.

    Raises PararnnError for none after it.
    """
    remaining: list[str] = []
    sweep: list[str] = []
    in_sweep = False
    for text in arguments:
        in_sweep = text == "--sweep" or (in_sweep and "=" in text and not text.startswith("-"))
        if not in_sweep:
            remaining.append(text)
        elif text != "--sweep":
            sweep.append(text)
    if "--sweep" in arguments and not sweep:
        raise PararnnError("--sweep needs one or more of key=value,value, such as seed=0,1,2")
    return remaining, sweep
