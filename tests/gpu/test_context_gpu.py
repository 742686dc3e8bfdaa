"""One sequence over two GPUs, by NCCL, is one process's, within the contract."""

import copy
import tempfile
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from processes import on_processes

pytest.importorskip("transformers")

import context_runs
from context_runs import differences, gradients_of_all, solve_case
from lm_kinds import hugging, tokens
from relative import relative_error
from table import FUSED, NEWTON_FUSED
from torch.nn.functional import scaled_dot_product_attention as attend

import pararnn
from pararnn.base.numerics import FORWARD_TOLERANCE, SEQUENTIAL_ERRORS
from pararnn.messages.group import register
from pararnn.messages.shift import shift
from pararnn.ranks.attention import suffix_attention

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
F32, BF16 = torch.float32, torch.bfloat16
SOLVES = {
    "gru": solve_case("gru", FUSED, F32, "initial", length=200, burn_in=None),
    "latches": solve_case("gru", NEWTON_FUSED, F32, "initial", length=300, latches=0.5),
    "slow": solve_case("gru", FUSED, BF16, "initial", shift=4.0),
    "lstm": solve_case("lstm", NEWTON_FUSED, BF16, "resets", length=300, shift=-3.0),
    "packed": solve_case("lstm", FUSED, F32, "packed", shift=-3.0),
    "mixing": solve_case("head-gru", FUSED, F32, "resets", channels=32, heads=2),
    "reverse": solve_case("gru", FUSED, F32, "reverse", shift=4.0),
}
LENGTH = 1024
DOCUMENTS = [5, 500, 20, 499]


def loss_and_grads(model, ids, labels, positions=None):
    loss = model(ids, labels=labels, position_ids=positions).loss
    loss.backward()
    return loss.detach()


def check_model(name, mesh):
    """A language model in float32, whose error may be a tolerance and four times one GPU's."""
    device = mesh.device_type
    ids = tokens(2, LENGTH).to(device)
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None].expand(2, -1).to(device)
    labels = ids.masked_fill(positions == 0, -100)
    kind = "hybrid" if "hybrid" in name else "gru"
    inputs = (ids, labels, positions)[: 2 if name in ("hybrid", "hybrid, compiled") else 3]
    model = hugging(kind, hidden_size=64, intermediate_size=128).to(device).train()
    single, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    runs = []
    for each in (exact, single):
        loss = loss_and_grads(each, *inputs)
        runs.append({"loss": loss} | {n: p.grad for n, p in each.named_parameters()})
    pararnn.context_parallel(model, mesh)
    if name == "checkpointing":
        model.gradient_checkpointing_enable()
    if "compiled" in name:
        for block in model.model.backbone.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)
    span = pararnn.context_span(LENGTH, mesh)
    own = [part[:, span].contiguous() for part in inputs]
    values = {"loss": loss_and_grads(model, *own)} | gradients_of_all(model, mesh)
    wrong = []
    for key, reference in runs[0].items():
        error, alone = (relative_error(each[key], reference) for each in (values, runs[1]))
        if not error <= FORWARD_TOLERANCE[F32] + SEQUENTIAL_ERRORS * alone:
            wrong.append(f"{key}: {error}, on one GPU {alone}")
    return wrong


def check_shift(name, mesh):
    """Halos, and their gradients, by the operator."""
    x = torch.arange(8.0, device=mesh.device_type).requires_grad_()
    rank = mesh.get_local_rank()
    y = shift(x * (1 + rank), register(mesh), False)
    (y * (rank + 2)).sum().backward()
    reference = torch.arange(8.0, device=x.device) * (rank == 1)
    grad = torch.full_like(x, 3.0 * (rank == 0))
    return differences({"halo": y.detach(), "grad": x.grad}, {"halo": reference, "grad": grad}, 0)


def check_attention(name, mesh):
    """In parts, or by the kernel whose order ends at the last key; its error is like PyTorch's."""
    steps, first = 512, 512 - int(name)
    q, k, v = (torch.randn(2, 2, steps, 64, device=mesh.device_type, dtype=BF16) for _ in range(3))
    arriving = torch.randn_like(q)
    runs = []
    for dtype, start in ((torch.float64, 0), (BF16, 0), (BF16, first)):
        inputs = [x.to(dtype).requires_grad_() for x in (q[:, :, start:], k, v)]
        out = suffix_attention(*inputs) if start else attend(*inputs, is_causal=True)
        loss = arriving[:, :, start:].to(dtype).clone()
        loss[:, :, : first - start] = 0
        grads = torch.autograd.grad(out, inputs, loss)
        grads = (grads[0][:, :, first - start :], *grads[1:])
        runs.append((out[:, :, first - start :].detach(), *grads))
    names = ("out", "q", "k", "v")
    errors = [
        [relative_error(a.double(), b) for a, b in zip(r, runs[0], strict=True)] for r in runs
    ]
    pairs = zip(names, errors[1], errors[2], strict=True)
    return [f"{n}: {e}, PyTorch's {theirs}" for n, theirs, e in pairs if not e <= 2 * theirs]


CHECKS = {
    "attention": (("1", "200", "256"), check_attention),
    "solve": (SOLVES, context_runs.check_solve),
    "model": ((), check_model),
    "shift": (("halo",), check_shift),
}
GROUPS = {
    "layers": [(2, kind, name) for kind in ("solve", "shift") for name in CHECKS[kind][0]],
    "attention": [(2, "attention", name) for name in CHECKS["attention"][0]],
    "models": [(2, "model", name) for name in ("eager", "checkpointing")],
    "hybrids": [(2, "model", name) for name in ("hybrid", "hybrid, documents")],
    "compiled models": [(2, "model", "compiled")],
    "compiled hybrids": [(2, "model", "hybrid, compiled")],
}
"""Cases that a pair of processes runs; pairs may run at once (`-n 6 --dist loadgroup`)."""


@cache  # pytest may set up a fixture's parameter again for each test
def _failures(group):
    with tempfile.TemporaryDirectory() as folder:
        on_processes(partial(_check, Path(folder), GROUPS[group]))
        return context_runs.failures_of(Path(folder), 2)


def _check(folder, cases, rank):
    context_runs.SOLVES = SOLVES  # this process's own
    context_runs.check_all(folder, rank, cases, CHECKS)


PARAMETERS = [
    pytest.param(group, context_runs.case_id(*case), marks=pytest.mark.xdist_group(group))
    for group, cases in GROUPS.items()
    for case in cases
]


@pytest.mark.parametrize(("group", "case"), PARAMETERS)
def test_two_gpus_are_one_process(group, case):
    assert _failures(group)[case] == []
