"""The command line: `pararnn demo`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

from pararnn.cells import CELLS
from pararnn.tasks import TextError
from pararnn.train import DemoConfig, MissingExtra, run_demo


class Parser(argparse.ArgumentParser):
    """Answers a bad command line with one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, 1 when the demo's verification fails, or exit code 2 for bad values."""
    parser = make_parser()
    config = DemoConfig(
        **{k: v for k, v in vars(parser.parse_args(argv)).items() if k != "command"}
    )
    try:
        metrics = run_demo(config)
    except (TextError, MissingExtra, OSError) as error:
        parser.error(str(error))
    return 0 if metrics["verified"] else 1


def make_parser() -> Parser:
    """The parser; a command's options have the names of its config's fields."""
    parser = Parser(prog="pararnn", description="Nonlinear RNNs trained in parallel, exactly.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small language model, then measure and check its solver",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = DemoConfig()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    demo.add_argument("--device", type=_device, default=device, help="cpu, cuda or cuda:N")
    absent = argparse.SUPPRESS  # then the config's own default holds, and help names none
    demo.add_argument(
        "--text", metavar="FILE", default=absent, help="learn this file, not Python's library"
    )
    demo.add_argument("--cell", choices=list(CELLS), default=default.cell, help="the recurrence")
    demo.add_argument(
        "--seconds", type=_positive, default=default.seconds, help="time to train for"
    )
    demo.add_argument(
        "--steps", type=_count, default=absent, help="train for at most so many steps"
    )
    demo.add_argument("--out", metavar="DIR", default=default.out, help="folder for the results")
    demo.add_argument("--seed", type=_seed, default=default.seed, help="of all random numbers")
    return parser


def _device(text: str) -> str:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not supported; use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise argparse.ArgumentTypeError(f"{text!r} is not here: PyTorch sees {count} CUDA devices")
    return text


def _positive(text: str) -> float:
    value = _number(text, float)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _count(text: str) -> int:
    value = _number(text, int)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return int(value)


def _seed(text: str) -> int:
    value = _number(text, int)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2^63 - 1, got {text!r}")
    return int(value)


def _number(text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a{'n integer' if kind is int else ' number'}, got {text!r}"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
