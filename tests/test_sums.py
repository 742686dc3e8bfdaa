"""Sums over an axis that wait for less and are fewer: `program/sums.py`."""

import random

import torch
from torch import fx

import pararnn
from pararnn import Param
from pararnn.codegen.cluster_layout import ClusterVariant
from pararnn.codegen.clusters import source_of_clusters
from pararnn.program.links import passes_of
from pararnn.program.program import program_of
from pararnn.program.statements import Value
from pararnn.program.sums import _Term
from pararnn.zoo import CELLS


def _passes(cell, dtype=torch.float32):
    program = program_of(cell)
    return passes_of(program.of_kernels or program, dtype)


def _reductions(steps):
    return [(link.stage, len(link.sources)) for link in steps.links if link.kind == "reduce"]


def test_a_norm_of_several_vectors_has_one_sum_for_each_moment():
    """Of four gates, and of the memory; backward the sums of a norm do not wait for each other."""
    passes = _passes(CELLS["layer-norm-lstm"](64))
    assert _reductions(passes.saving) == [(2, 4), (3, 4), (4, 1), (5, 1)]
    stages = [stage for stage, _ in _reductions(passes.backward)]
    assert max(stages) == 2


class Scaled(pararnn.Cell):
    """A sum whose terms have a factor that another sum gives."""

    states = {"h": "V"}
    gates = {"x": "V"}
    params = {"R": Param("H,V,V")}

    def step(self, state, gate, param):
        y = (state.h[..., None, :] @ param.R).squeeze(-2)
        scale = y.square().mean(-1, keepdim=True)
        return torch.tanh(gate.x + (scale * y).sum(-1, keepdim=True))


def test_a_factor_without_the_axis_comes_after_the_sum():
    cell = Scaled(8, num_heads=1)
    assert _reductions(_passes(cell).saving) == [(2, 1), (2, 1)]
    assert _reductions(_passes(Late(8, num_heads=1)).saving) == [(2, 1), (3, 1)]


class Late(Scaled):
    """A sum of what is no product of the late factor."""

    def step(self, state, gate, param):
        y = (state.h[..., None, :] @ param.R).squeeze(-2)
        scale = y.square().mean(-1, keepdim=True)
        return torch.tanh(gate.x + (scale + y).square().sum(-1, keepdim=True))


class Centred(Scaled):
    """A norm by hand, about its mean or about another number."""

    config = {"share": 1.0}

    def step(self, state, gate, param):
        y = (state.h[..., None, :] @ param.R).squeeze(-2)
        y = y - self.share * y.mean(-1, keepdim=True)
        return torch.tanh(gate.x + y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5))


def test_factors_have_an_order_that_every_process_has():
    names, graph = [f"f{number:02}" for number in range(20)], fx.Graph()
    values = {name: Value(graph.placeholder(name), ()) for name in random.sample(names, 20)}
    term = _Term(2.0, (), values["f00"]).scaled(1.0, *values.values())
    assert [factor.node.name for factor in term.factors] == names


def _forward(cell):
    variant = ClusterVariant("forward", torch.float32, torch.float32, False, 1, 200_000)
    return source_of_clusters(program_of(cell), variant)


def test_squares_about_the_mean_come_with_the_sum():
    """Not about another number, and not of channels that fill no tiles."""
    call = "sum_moments<"
    assert call in _forward(Centred(64, num_heads=1))
    assert call not in _forward(Centred(64, num_heads=1, share=0.5))
    assert call not in _forward(Centred(40, num_heads=1))
