"""The command line of the language models' benchmarks: which cases, and the file of their rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from common import RESULTS, Record, new_parser, provenance

Case = TypeVar("Case")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Build a parser with the options that every such benchmark has."""
    parser = new_parser(doc, out=None, help="default: the results, and none for --smoke")
    parser.add_argument("--only", nargs="+", default=[""], help="models whose names begin so")
    parser.add_argument("--smoke", action="store_true", help="tiny models on a CPU, not compiled")
    return parser


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device that models run on."""
    return torch.device("cpu" if args.smoke else "cuda")


def chosen(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    every: Sequence[Case],
    name_of: Callable[[Case], str],
    condition: Callable[[Case], bool] = lambda case: True,
) -> list[Case]:
    """Return the requested cases, by beginnings of names and `condition`; exit if there is none."""
    matches = [
        case for case in every if name_of(case).startswith(tuple(args.only)) and condition(case)
    ]
    if not matches:
        options = {key: value for key, value in vars(args).items() if key != "out" and value}
        parser.error(
            f"no case of {options}; there are {', '.join(dict.fromkeys(map(name_of, every)))}"
        )
    return matches


def record_of(args: argparse.Namespace, file: str, keys: Sequence[str]) -> Record:
    """Return the record of a file, in the results unless --out or --smoke says otherwise."""
    out = args.out or (None if args.smoke else RESULTS)
    shared = provenance(device_of(args))
    print(shared, flush=True)
    return Record(out and out / file, shared, keys)
