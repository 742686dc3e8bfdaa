"""Every command line in the README and the docs is one that the command line parses."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import shlex
from pathlib import Path

import pytest
from test_docs import FENCE as ANY_FENCE
from test_docs import PAGES

from pararnn.lab import cli, commands
from pararnn.lab.tasks import report
from pararnn.lab.train import demo

FENCE = re.compile(r"^```(?!python)\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
COMMAND = re.compile(
    r"^(?:\$ )?(?:\w+=\S* )*(?:torchrun .*--no-python )?(?:[\w./]*/)?pararnn (?!--)(.*)$"
)
MODULE = re.compile(r"^(?:\$ )?(?:\w+=\S* )*python\S* -m pararnn (.*)$")
DEMO = re.compile(r'^(?:\$ )?make demo(?: ARGS="(.*)")?(?: *#.*)?$')
EXAMPLES = {  # of the pages: what stands for a name of the reader's own
    "RECIPE": "tiny",
    "mystudy:wide_lstm": "tiny",
    "mypackage:MyCell": "elman",
}
MENTION = re.compile(
    r"(\w+)(?: list| run| table)?(?: tiny| [A-Z]+)*(?: \[--key value \.\.\.\])?( --[\w-]+)?"
)
"""A command, or an option of it without a value, as sentences name it."""


def arguments(line: str) -> list[str] | None:
    """Return the arguments of `pararnn` in a line; None if it is no call of it."""
    line = line.strip()
    if match := DEMO.match(line):
        return ["demo", *shlex.split(match[1] or "")]
    if match := COMMAND.match(line) or MODULE.match(line):
        words = shlex.split(match[1].removesuffix("&"), comments=True)
        return [EXAMPLES.get(word, word) for word in words]
    return None


def command_lines(page: Path) -> list[tuple[str, bool]]:
    """Return a page's command lines, and whether a sentence only mentions them."""
    text = page.read_text(encoding="utf-8")
    fenced = "\n".join(FENCE.findall(text)).replace("\\\n", " ").splitlines()
    inline = [" ".join(code.split()) for code in INLINE.findall(ANY_FENCE.sub("", text))]
    return [(line, False) for line in fenced if arguments(line) is not None] + [
        (line, True) for line in inline if arguments(line) is not None
    ]


CASES = [
    pytest.param(line, mentioned, id=f"{page.name}: {line}")
    for page in PAGES
    for line, mentioned in dict.fromkeys(command_lines(page))
]


@pytest.fixture
def parse(monkeypatch):
    """Function that parses arguments as `pararnn` does, and runs nothing."""

    def idle(function):
        return functools.wraps(function)(lambda *args, **options: 0)

    for name, function in commands.COMMANDS.items():
        if list(inspect.signature(function).parameters) != ["arguments"]:
            monkeypatch.setitem(commands.COMMANDS, name, idle(function))
    monkeypatch.setitem(commands.COMMANDS, "run", lambda arguments: 0)  # of other packages
    monkeypatch.setattr(demo, "run_demo", lambda config: {"verified": True})
    monkeypatch.setattr(commands, "run_all", lambda *args: None)
    monkeypatch.setattr(report, "write_report", lambda folder: "")
    configured, parsed = commands.configured, {}

    def configured_once(default, words, prog, flat=False):
        """Parse options of a kind of task once, not for each mixer too: that takes 0.1 s."""
        key = type(default), type(getattr(default, "task", None)), tuple(words)
        if key not in parsed:
            parsed[key] = configured(default, words, prog, flat)
        return parsed[key]

    monkeypatch.setattr(commands, "configured", configured_once)

    def parse_only(words):
        return cli.main([*words, "--print"] if words[0] == "train" else words)

    return parse_only


@pytest.mark.parametrize(("line", "mentioned"), CASES)
def test_command_lines_parse(line, mentioned, parse, capsys):
    words = arguments(line)
    mention = MENTION.fullmatch(" ".join(words)) if mentioned else None
    if mention is None:
        assert parse(words) == 0
        return
    command, option = mention.groups()
    assert command in commands.COMMANDS
    if option:
        with contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        assert option in capsys.readouterr().out


def test_there_are_command_lines():
    commands_shown = {arguments(case.values[0])[0] for case in CASES}
    assert commands_shown == set(commands.COMMANDS)
