"""Synthetic tasks against checkers in plain Python, their metrics, and the accuracy of guessing."""

import itertools
from dataclasses import replace

import pytest
import torch

from pararnn.lab.tasks import TASKS, generator_of, recall, state, task_of


def check_keep(task, row):
    start = task.n if task.judge == "all" else task.length
    return dict.fromkeys(range(start - 1, task.length), row[task.n - 1])


def check_parity(task, row):
    whole = {t: sum(row[: t + 1]) % 2 for t in range(len(row))}
    return whole if task.judge == "all" else {len(row) - 1: whole[len(row) - 1]}


def check_mqar(task, row):
    pairs = {}
    for index in range(task.kappa):
        key, value = row[2 * index], row[2 * index + 1]
        assert key not in pairs
        assert key < task.keys
        assert 64 <= value < 128
        pairs[key] = value
    assert task.shuffled or list(pairs) == sorted(pairs)
    tail = row[2 * task.kappa :]
    assert all(token in pairs or task.keys <= token < 64 for token in tail)
    return {2 * task.kappa + t: pairs[token] for t, token in enumerate(tail) if token in pairs}


def check_hops(task, row):
    answers = {}
    for t in range(len(row)):
        place = t
        for _ in range(task.hops):
            earlier = [s for s in range(t if task.latest else place) if row[s] == row[place]]
            if not earlier:
                break
            place = earlier[-1] + 1
        else:
            answers[t] = row[place]
    return answers


def check_sum(task, row):
    return {t: sum(row[: t + 1]) % task.modulus for t in range(len(row))}


def check_word(task, row):
    """By what the permutations do to a row of marks, one after the other."""
    size = int(task.group[1])
    members = list(itertools.permutations(range(size)))
    if task.group[0] == "a":
        signs = [sum(a > b for a, b in itertools.combinations(p, 2)) % 2 for p in members]
        members = [p for p, odd in zip(members, signs, strict=True) if not odd]
    assert len(members) == task.symbols
    answers, images = {}, list(range(size))
    for t, token in enumerate(row):
        images = [members[token][image] for image in images]
        answers[t] = members.index(tuple(images))
    return answers


def check_dyck(task, row):
    stack, answers = [], {}
    for t, token in enumerate(row):
        if token < task.kinds:
            stack.append(token)
        else:
            assert stack.pop() == token - task.kinds
        assert len(stack) <= task.depth
        answers[t] = stack[-1] if stack else task.kinds
    return answers


def check_copying(task, row):
    blank, mark = task.vocab, task.vocab + 1
    items = [token for token in row if token < blank]
    assert row.count(mark) == len(items) == task.items
    if not task.scattered:
        assert row[: task.items] == items
    return dict(enumerate(items, start=task.length - task.items))


def check_adding(task, row):
    marks = [t for t, (_, mark) in enumerate(row) if mark]
    assert len(marks) == 2
    assert marks[0] < task.length // 2 <= marks[1]
    assert all(0 <= number <= 1 and mark in (0, 1) for number, mark in row)
    return {task.length - 1: pytest.approx(sum(row[t][0] for t in marks), abs=1e-6)}


CHECKS = {
    recall.KeepNth: check_keep,
    recall.MQAR: check_mqar,
    recall.KHop: check_hops,
    recall.Copying: check_copying,
    recall.SelectiveCopying: check_copying,
    recall.Adding: check_adding,
    state.Parity: check_parity,
    state.ModularAddition: check_sum,
    state.WordProblem: check_word,
    state.Dyck: check_dyck,
}
MANY_KEYS = replace(TASKS["mqar"], keys=32, shuffled=True)
VARIANTS = [
    *TASKS.values(),
    *(task.at(31) for task in TASKS.values()),
    *(replace(TASKS[name], judge="last") for name in ("keep-nth", "parity")),
    *(replace(TASKS["2-hop"], hops=4, vocab=3, latest=latest) for latest in (True, False)),
    replace(TASKS["2-hop"], latest=False),
    replace(TASKS["dyck"], kinds=3, depth=2),
    replace(TASKS["dyck"], kinds=1, depth=1),
    replace(TASKS["mqar"], kappa=8, keys=32, noise=0.9),
    MANY_KEYS,
]


@pytest.mark.parametrize("task", VARIANTS, ids=repr)
def test_targets(task):
    batch = task.draw(20, generator_of(7))
    assert batch.targets.shape == batch.judged.shape == (20, task.length)
    assert batch.inputs.shape[:2] == (20, task.length)
    for row, targets, mask in zip(*(part.tolist() for part in batch), strict=True):
        answers = {t: target for t, target in enumerate(targets) if mask[t]}
        assert answers == CHECKS[type(task)](task, row)
        assert not any(target for t, target in enumerate(targets) if not mask[t])


def test_recall_of_keys_in_any_order():
    first, second = MANY_KEYS.draw(1000, generator_of(0)).inputs[:, [0, 2]].T
    assert 400 < (first > second).sum() < 600
    assert first.unique().numel() == 32


@pytest.mark.parametrize("name", TASKS)
def test_draws_depend_on_the_seed_only(name):
    task = TASKS[name]
    one, same, other = (task.draw(50, generator_of(*s)) for s in ((1, 2), (1, 2), (2, 1)))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.inputs, other.inputs)
    if not task.features:
        assert one.inputs.unique().numel() <= task.symbols
        assert one.inputs.max() < task.symbols
        assert one.targets.max() < task.classes


# Accuracy of the best constant answer, by hand.
CHANCES = {
    "keep-nth": 1 / 128,
    "parity": 1 / 2,
    "mqar": 1 / 64,
    "1-hop": 1 / 10,
    "2-hop": 1 / 5,
    "modular-addition": 1 / 5,
    "s3": 1 / 6,
    "a5": 1 / 60,
    "s5": 1 / 120,
    "dyck": 7 / 16,  # one of two kinds is innermost; the walk is at the bottom 1 time in 8
    "copying": 1 / 8,
    "selective-copying": 1 / 8,
    # The sum of two numbers is within 0.04 of 1 with this chance.
    "adding": 1 - (1 - 0.04) ** 2,
}


@pytest.mark.parametrize("name", TASKS)
def test_chance(name):
    assert TASKS[name].chance() == pytest.approx(CHANCES[name], rel=0.06, abs=0.006)


def test_right_answers_by_task():
    task = TASKS["parity"]
    outputs = torch.tensor([[[0.0, 1.0], [2.0, 1.0]]])
    assert task.right(outputs, torch.tensor([[1, 1]])).tolist() == [[True, False]]
    task = TASKS["adding"]
    outputs = torch.tensor([[[1.03], [1.05]]])
    assert task.right(outputs, torch.tensor([[1.0, 1.0]])).tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("keep-nth", {"n": 101}, "n must be from 1 to 100, got 101"),
        ("keep-nth", {"vocab": 0}, "vocab must be at least 2, got 0"),
        ("parity", {"judge": "first"}, "judge must be all or last, got 'first'"),
        ("mqar", {"kappa": 3}, "kappa must be from 1 to 2, got 3"),
        ("mqar", {"keys": 64}, "keys must be from 1 to 63, got 64"),
        ("1-hop", {"hops": 0}, "hops must be positive"),
        ("s3", {"group": "s4"}, "group must be one of s3, a5, s5, got 's4'"),
        ("copying", {"length": 10}, "items must be from 1 to 5, got 10"),
        ("adding", {"length": 1}, "length must be at least 2"),
        ("1-hop", {"length": 1}, "length must be at least 2, got 1"),
        ("parity", {"length": 0}, "length must be positive, got 0"),
        ("modular-addition", {"length": -1}, "length must be positive, got -1"),
        ("s3", {"length": 0}, "length must be positive"),
        ("dyck", {"length": 0}, "length must be positive"),
    ],
)
def test_impossible_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        replace(TASKS[name], **options)


def test_unknown_task():
    with pytest.raises(ValueError, match="there is no task 'paritty': name one of keep-nth"):
        task_of("paritty")
