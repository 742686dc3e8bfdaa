"""Solves, layers and models over several ranks, held against one process.

Each rank makes the same inputs, takes its span of them, and the parts are put together: sums over
ranks of what is zero outside of a span.
"""

import copy
import json
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from call_results import as_tuple
from lm_kinds import hugging, plain, tokens
from relative import relative_error
from table import FUSED, LATCHES, NEWTON_FUSED, OPS, PLAIN, case_of, peak_case, with_latches
from table import Row as Conditions
from torch.distributed.device_mesh import init_device_mesh

import pararnn
from pararnn.base.device import collectives, process_device
from pararnn.check.oracle import Oracle, Run
from pararnn.engines import shooting
from pararnn.engines.arguments import Arguments
from pararnn.messages import group
from pararnn.messages.group import Ranks, register
from pararnn.program.program import program_of
from pararnn.solve import run

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NEWTON = ("newton", "torch")
SLOW = {"shift": 4.0}


def solve_case(
    cell, pair, dtype, variant, length=60, burn_in=5, latches=0.0, segments=3, **more
):  # the options of one solve
    return {**locals(), "more": more}


SOLVES = {
    "gru": solve_case("gru", FUSED, F32, "plain"),
    "lstm": solve_case("lstm", FUSED, F32, "initial"),
    "latches": solve_case("gru", NEWTON_FUSED, F32, "initial", latches=0.5),
    "latches of an lstm": solve_case("lstm", FUSED, F64, "initial", latches=0.5),
    "slow": solve_case("gru", FUSED, F64, "initial", shift=4.0),
    "slow in bfloat16": solve_case("gru", FUSED, BF16, "initial", shift=4.0),
    "slow by Newton": solve_case("gru", NEWTON, F32, "initial", shift=4.0),
    "expanding": solve_case("gru", FUSED, F32, "initial", weights=4.0),
    "tiny gradients": solve_case("lstm", NEWTON_FUSED, F32, "initial", loss=1e-9, shift=2.0),
    "units": solve_case("lstm", FUSED, F32, "resets", unit=1e-12, others=1e9, latches=0.3),
    "resets": solve_case("gru", FUSED, F32, "resets", latches=0.5),
    "packed": solve_case("lstm", FUSED, F64, "packed", shift=-3.0),
    "packed by Newton": solve_case("gru", NEWTON_FUSED, F32, "packed", shift=4.0),
    "reverse": solve_case("gru", FUSED, F64, "reverse", shift=4.0),
    "heads": solve_case("gru", FUSED, F32, "initial", channels=12, heads=3, bias=True),
    "three states": solve_case("slstm", NEWTON, F64, "packed"),
    "a loop in PyTorch": solve_case("lstm", PLAIN, F64, "initial", shift=3.0),
    "a mixing cell": solve_case("head-lstm", FUSED, F32, "initial", 24, channels=12, heads=3),
    "mixing, resets": solve_case("head-lstm", FUSED, F32, "resets", 24, channels=12, heads=3),
    "mixing, packed": solve_case("head-lstm", NEWTON, F64, "packed", 24, channels=12, heads=3),
    "mixing, a loop in PyTorch": solve_case("dense-gru", PLAIN, F64, "reverse", 24),
    "short spans": solve_case("gru", FUSED, F64, "reverse", length=5, shift=3.0),
    "late peak": solve_case("Latch", FUSED, F32, "initial", peak="last"),
    "peak of guesses": solve_case("Spike", FUSED, F32, "initial", peak="last"),
    "whole spans": solve_case("lstm", FUSED, F32, "packed", burn_in=None, shift=-3.0),
}
SOLVES = {name: c for name, c in SOLVES.items() if c["pair"] in (*OPS, PLAIN)}


def total(value, mesh):
    """The sum of all ranks' values, in place."""
    dist.all_reduce(value, group=mesh.get_group())
    return value


def whole(part, span, length, mesh):
    """The values (B, T, ...) of all ranks."""
    full = part.new_zeros((part.shape[0], length, *part.shape[2:]))
    full[:, span] = part
    return total(full, mesh)


def solve_over_ranks(oracle, mesh, span, pair):
    """`Oracle.run` with a span on each rank; the second has the loss of the final states."""
    trial = oracle.trial
    args, leaves, program = trial.call(), trial.leaves(), program_of(trial.cell)
    length, rank = args.gates.shape[1], mesh.get_local_rank()
    (gates, bias, *others), values = args.flatten()
    series = len(args.fields)
    own = [t[:, span] for t in others[:series]]
    marks = [None if t is None else t[:, span] for t in others[-2:]]
    local = Arguments.unflatten([gates[:, span], bias, *own, *others[series:-2], *marks], values)
    states, final, info, choice = run(program, local.with_options(context=register(mesh)), *pair)
    count = len(states)
    cotangents = [c[:, span] for c in trial.cotangents[:count]]
    cotangents += [c if rank == 1 else torch.zeros_like(c) for c in trial.cotangents[count:]]
    outputs = (*states, *final)
    pairs = [
        (o, c.to(o.dtype)) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad
    ]
    outputs, cotangents = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, [*leaves.values()], cotangents, allow_unused=True)
    totals = {}
    for (leaf_name, leaf), grad in zip(leaves.items(), grads, strict=True):
        own = torch.zeros_like(leaf) if grad is None else grad.detach().contiguous()
        totals[leaf_name] = total(own, mesh)
    results = {
        n: whole(s.detach(), span, length, mesh)
        for n, s in zip(trial.cell.states, states, strict=True)
    }
    for n, state in zip(trial.cell.states, final, strict=True):
        results[f"final {n}"] = state.detach()
        same = [torch.empty_like(state) for _ in range(mesh.size())]
        dist.all_gather(same, state.detach().contiguous(), group=mesh.get_group())
        assert all(each.equal(same[0]) or each.isnan().any() for each in same)
    return Run(results, totals, info, choice)


def check_solve(name, mesh):
    """The claims of the contract that a case breaks."""
    case = SOLVES[name]
    cell, dtype, device = case["cell"], case["dtype"], mesh.device_type
    if cell in LATCHES:
        example = peak_case(cell, case["more"]["peak"], dtype, case["length"], device)
    else:
        row = Conditions(case["length"], variant=case["variant"], **case["more"])
        example = case_of(row, cell, dtype, device)
    if case["latches"]:
        example = with_latches(example, case["latches"])
    torch.manual_seed(0)
    options = {k: v for k, v in example.options.items() if k != "loss_scale"}
    scale = example.options.get("loss_scale", 1.0)
    oracle = Oracle.of(example.cell, example.gates, example.initial, loss_scale=scale, **options)
    span = pararnn.context_span(case["length"], mesh)
    with pararnn.using(segments=case["segments"], burn_in=case["burn_in"]):
        result = solve_over_ranks(oracle, mesh, span, case["pair"])
    if mesh.get_local_rank():
        return []
    return [str(check) for check in oracle.judge(result).checks if not check.passed]


def gradients_of_all(module, mesh):
    """The sums of all ranks' gradients, in one message."""
    parameters = dict(module.named_parameters())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
    flat = total(torch.cat([grad.flatten() for grad in grads]), mesh)
    parts = flat.split([grad.numel() for grad in grads])
    return {n: g.view_as(p) for (n, p), g in zip(parameters.items(), parts, strict=True)}


def differences(values, reference, tolerance=1e-11):
    """Names and errors of what differs from one process's."""
    errors = {name: relative_error(values[name], reference[name]) for name in reference}
    most = {name: tolerance if r.dtype == F64 else 1e-6 for name, r in reference.items()}
    return [f"{name}: {error}" for name, error in errors.items() if not error <= most[name]]


class WithField(pararnn.Cell):
    """A leaky integrator whose leak a field scales, and that reads out."""

    states, gates, fields = ("h",), ("x", "f"), ("gap",)
    params = {"a": pararnn.Param(std=0.5)}

    def step(self, state, gate, param):
        keep = torch.sigmoid(gate.f + 3) ** gate.gap
        return keep * state.h + (1 - keep) * torch.tanh(gate.x + param.a * state.h)

    def readout(self, state, gate, param):
        return state.h * gate.x


LENGTH = 41


def layer_cases():
    generator = torch.Generator().manual_seed(3)
    reset = torch.rand(3, LENGTH, generator=generator) < 0.1
    reset[:, LENGTH // 2 + 1] = True  # the first step of the second of two ranks
    gap = torch.rand(3, LENGTH, generator=generator, dtype=F64)
    starts = [0, 7, 7, LENGTH // 2 + 1, 30, 38]
    return {
        "plain": (pararnn.ParaGRU, {}, {}),
        "both directions": (pararnn.ParaLSTM, {"bidirectional": True, "num_heads": 2}, {}),
        "resets": (pararnn.ParaGRU, {"bidirectional": True}, {"reset": reset}),
        "time first": (pararnn.ParaGRU, {"batch_first": False}, {}),
        "lengths": (pararnn.ParaGRU, {"bidirectional": True}, {"lengths": [LENGTH, 3, 25]}),
        "no step": (pararnn.ParaLSTM, {}, {"lengths": [0, 21, 22]}),
        "padding on the left": (
            partial(pararnn.ParaLSTM, bidirectional=True),
            {},
            {"lengths": [20, 41, 5], "padding": "left"},
        ),
        "packed": (pararnn.ParaGRU, {"bidirectional": True}, {"cu_seqlens": starts}),
        "packed to the end": (pararnn.ParaLSTM, {}, {"cu_seqlens": [0, 0, 20, LENGTH]}),
        "mixing": (pararnn.LSTM, {"bidirectional": True, "num_heads": 2}, {}),
        "mixing, packed": (pararnn.LSTM, {"num_heads": 2}, {"cu_seqlens": starts}),
        "matrix states": (
            partial(pararnn.ParaRNN, pararnn.zoo.M2RNNCell),
            {"num_heads": 2},
            {"lengths": [LENGTH, 3, 25]},
        ),
        "fields and a readout": (
            partial(pararnn.ParaRNN, WithField),
            {"recompute_gates": True},
            {"fields": {"gap": gap}},
        ),
    }


def run_layer(layer, x, h_0, options, loss, span=None, has_end=True):
    """Output, final states, and the gradient of x; with a span that of a rank. has_end: whether
    final states have a loss."""
    time = 0 if not layer.batch_first else 1
    cut = slice(None) if span is None else span
    at = (slice(None),) * time + (cut,)
    x = x.clone().requires_grad_()
    h_0 = tuple(h.clone().requires_grad_() for h in h_0)
    own = dict(options)
    for name in ("reset",):
        if name in own:
            own[name] = own[name][:, cut]
    if "fields" in own:
        own["fields"] = {n: f[:, cut] for n, f in own["fields"].items()}
    output, final = layer(x[at], h_0 if len(h_0) > 1 else h_0[0], **own)
    final = as_tuple(final)
    of_all = (output * loss[0][at]).sum()
    if has_end:
        of_all = of_all + sum((f * g).sum() for f, g in zip(final, loss[1:], strict=True))
    of_all.backward()
    grads = {
        f"grad h {i}": h.new_zeros(h.shape) if h.grad is None else h.grad.contiguous()
        for i, h in enumerate(h_0)
    }
    return {"output": output.detach(), "grad x": x.grad, **grads}, final


def check_layer(name, mesh):
    make, config, options = layer_cases()[name]
    torch.manual_seed(1)
    layer = make(input_size=4, hidden_size=6, num_layers=2, dtype=F64, **config)
    with torch.no_grad():  # trained layers forget slowly
        for part in layer.modules():
            if isinstance(part, pararnn.RecurrentLayer) and part.bias is not None:
                part.bias[0] += 2.0 if type(part.cell) is pararnn.LSTMCell else -2.0
    sequences = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else 3
    batch = 1 if "cu_seqlens" in options else 3
    size = (LENGTH, batch, 4) if not layer.batch_first else (batch, LENGTH, 4)
    x = torch.randn(*size, dtype=F64)
    parts = 2 * (1 + layer.bidirectional)
    h_0 = tuple(torch.randn(parts, sequences, *size, dtype=F64) for size in layer.cell.state_sizes)
    loss = [torch.randn(*size[:2], 6 * (1 + layer.bidirectional), dtype=F64)]
    loss += [torch.randn_like(h) for h in h_0]
    single, rank = copy.deepcopy(layer), mesh.get_local_rank()
    if rank:  # strides are each rank's own
        h_0 = tuple(h.mT.contiguous().mT for h in h_0)
    pararnn.context_parallel(layer, mesh)
    span = pararnn.context_span(LENGTH, mesh)
    with pararnn.using(burn_in=4):
        values, final = run_layer(layer, x, h_0, options, loss, span, rank == mesh.size() - 1)
    time = 1 if layer.batch_first else 0
    output = values.pop("output").movedim(time, 1)
    for key, value in values.items():
        if key.startswith("grad"):
            total(value, mesh)
    values["output"] = whole(output, span, LENGTH, mesh).movedim(1, time)
    values |= {f"final {i}": f.detach() for i, f in enumerate(final)}
    values |= gradients_of_all(layer, mesh)
    if rank:
        return []
    reference, final = run_layer(single, x, h_0, options, loss)
    reference |= {f"final {i}": f.detach() for i, f in enumerate(final)}
    reference |= {n: p.grad for n, p in single.named_parameters()}
    return differences(values, reference)


DOCUMENTS = [5, 9, 1, 6, 8, 3]  # of 32 tokens: a border at 15 and 32 - 8 next to those of ranks
POSITIONS = torch.cat([torch.arange(n) for n in DOCUMENTS])[None].expand(2, -1)
AT_BORDERS = torch.arange(32).remainder(8)[None].expand(2, -1)  # documents begin with each rank
LEFT = (torch.arange(32)[None] >= torch.tensor([[16], [5]])).long()
RIGHT = (torch.arange(32)[None] < torch.tensor([[16], [21]])).long()
NUMBERS = torch.repeat_interleave(torch.arange(6), torch.tensor(DOCUMENTS))[None].expand(2, -1)
BORDERS = torch.tensor([0, *DOCUMENTS]).cumsum(0)
MODELS = {
    "gru": ("gru", {}, 2),
    "lstm, documents": ("lstm", {"position_ids": POSITIONS}, 2),
    "documents at borders": ("gru", {"position_ids": AT_BORDERS}, 2),
    "padding on the left": ("gru", {"padding_mask": LEFT}, 2),
    "padding on the right": ("gru", {"padding_mask": RIGHT}, 2),
    "packed": ("gru", {"cu_seq_lens": BORDERS}, 1),
    "hybrid": ("hybrid", {}, 2),
    "hybrid, documents": ("hybrid", {"position_ids": POSITIONS}, 2),
    "hybrid, documents at borders": ("hybrid", {"position_ids": AT_BORDERS}, 2),
    "hybrid, padding on the left": ("hybrid", {"padding_mask": LEFT}, 2),
    "hybrid, padding on the right": ("hybrid", {"padding_mask": RIGHT}, 2),
    "hybrid, packed": ("hybrid", {"cu_seq_lens": BORDERS}, 1),
    "attention": ("attention", {}, 2),
    "no convolution": ("no convolution", {"position_ids": POSITIONS}, 2),
    "tied": ("tied", {}, 2),
    "a token a rank": ("gru", {}, 2, 4),
    "a token or two a rank": ("lstm", {}, 2, 5),
    "two tokens a rank, documents": (
        "hybrid",
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])},
        2,
        9,
    ),
    "two tokens a rank, padding": (
        "gru",
        {"padding_mask": (torch.arange(9)[None] >= torch.tensor([[4], [1]])).long()},
        2,
        9,
    ),
    "spans of 2 and 5 tokens": ("gru", {}, 2, [5, 2, 1, 5]),
}
"""A kind of model, its arguments, and rows; their tokens or those of each span, where not 32."""


def span_of_model(tokens, mesh):
    """A rank's span and the tokens of all."""
    if isinstance(tokens, int):
        return pararnn.context_span(tokens, mesh), tokens
    rank = mesh.get_local_rank()
    return slice(sum(tokens[:rank]), sum(tokens[: rank + 1])), sum(tokens)


@cache
def model_of(make, kind):
    """A model in float64, made once; copies of it run."""
    return make(kind, F64).train()


def spans_of(rows, span):
    """A rank's part of a model's arguments."""
    return {k: v if k.startswith("cu_") else v[:, span] for k, v in rows.items()}


def check_model(name, mesh):
    kind, rows, batch, *lengths = MODELS[name]
    torch.manual_seed(0)
    model = copy.deepcopy(model_of(plain, kind))
    pararnn.context_parallel(model, mesh)
    span, length = span_of_model(*(lengths or [32]), mesh)
    ids = tokens(batch, length)
    own = spans_of(rows, span)
    with pararnn.using(burn_in=3):
        part = model.loss(ids[:, span], z_loss=1e-3, **own)
        part.backward()
        logits = whole(model(ids[:, span], **own).detach(), span, length, mesh)
    values = {"loss": part.detach(), "logits": logits} | gradients_of_all(model, mesh)
    if mesh.get_local_rank():
        return []
    single = copy.deepcopy(model_of(plain, kind))
    loss = single.loss(ids, z_loss=1e-3, **rows)
    loss.backward()
    reference = {"loss": loss.detach(), "logits": single(ids, **rows).detach()}
    reference |= {n: p.grad for n, p in single.named_parameters()}
    if "padding_mask" in rows:  # logits at padding are anything
        for each in (values, reference):
            each["logits"] = each["logits"] * rows["padding_mask"].unsqueeze(-1)
    return differences(values, reference, 1e-10)


HUGGING = {
    "plain": {},
    "documents": {"position_ids": POSITIONS},
    "documents at borders": {"position_ids": AT_BORDERS},
    "numbered": {"seq_idx": NUMBERS},
    "left": {"attention_mask": LEFT},
    "right": {"attention_mask": RIGHT},
    "checkpointing": {"position_ids": POSITIONS},
    "hybrid, documents": {"position_ids": POSITIONS},
    "hybrid, numbered": {"seq_idx": NUMBERS},
    "hybrid, left": {"attention_mask": LEFT},
    "hybrid, checkpointing": {},
    "a token a rank, checkpointing": {"position_ids": torch.tensor([[0, 1, 0, 1]])},
}


def check_hugging(name, mesh):
    rows, kind = HUGGING[name], "hybrid" if "hybrid" in name else "gru"
    model = copy.deepcopy(model_of(hugging, kind))
    length = 4 if "token" in name else 32
    ids = tokens(2, length)
    labels = ids.clone()
    if "attention_mask" in rows:
        mask = rows["attention_mask"].bool()
        labels = labels.where(mask, -100)
    rank = mesh.get_local_rank()
    pararnn.context_parallel(model, mesh)
    if "checkpointing" in name:
        model.gradient_checkpointing_enable()
    span = pararnn.context_span(length, mesh)
    with pararnn.using(burn_in=3):
        part = model(ids[:, span], labels=labels[:, span], **spans_of(rows, span)).loss
        part.backward()
    values = {"loss": part.detach()} | gradients_of_all(model, mesh)
    if rank:
        return []
    single = copy.deepcopy(model_of(hugging, kind))
    loss = single(ids, labels=labels, **rows).loss
    loss.backward()
    reference = {"loss": loss.detach()} | {n: p.grad for n, p in single.named_parameters()}
    return differences(values, reference, 1e-10)


SWEEPS = {"forgets": (0.0, 1), "resets": (0.0, 1), "latches": (0.5, 2)}
"""Fraction of channels that never forget, and the sweeps that a solve takes at most."""


def check_sweeps(name, mesh):
    """How often spans ran, forward and backward: guesses and maps only save time."""
    latches, most = SWEEPS[name]
    length, burn_in = 64 * mesh.size(), 48
    torch.manual_seed(0)
    layer = pararnn.ParaLSTM(4, 32, num_heads=2, batch_first=True)
    with torch.no_grad():
        layer.layers[0].bias[0, : int(32 * latches)] += 30.0  # gates of forgetting
    x = torch.randn(2, length, 4)
    reset = torch.rand(2, length) < 0.05 if name == "resets" else None
    pararnn.context_parallel(layer, mesh)
    span, counts = pararnn.context_span(length, mesh), []

    update = shooting.update

    def count(*args):
        counts.append(1)
        return update(*args)

    with pytest.MonkeyPatch.context() as patch, pararnn.using(burn_in=burn_in):
        patch.setattr(shooting, "update", count)
        output, _ = layer(x[:, span], reset=None if reset is None else reset[:, span])
        forward = len(counts)
        output.mean().backward()
    sweeps = (1 + forward, 1 + len(counts) - forward)
    return [] if max(sweeps) <= most else [f"{sweeps} sweeps, at most {most} are needed"]


def check_unsettled(name, mesh):
    """A solve whose spans never agree: ranks solve one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shooting, "MAX_SWEEPS", 1)
        return check_solve(name, mesh)


def check_messages(name, mesh):
    """What a rank exchanges in a step: per layer a state and a halo with each neighbour, each way.
    Nothing goes to all ranks, for which they would wait, and what is computed again sends none."""
    model = copy.deepcopy(model_of(hugging, "gru"))
    pararnn.context_parallel(model, mesh)
    if name == "checkpointing":
        model.gradient_checkpointing_enable()
    ids, span = tokens(2, 32), pararnn.context_span(32, mesh)
    labels = ids.roll(-1, 1)[:, span]
    counts = dict.fromkeys(("gather", "total", "send", "receive"), 0)
    with pytest.MonkeyPatch.context() as patch:
        for word, whole in {word: getattr(Ranks, word) for word in counts}.items():

            def call(ranks, value, *args, word=word, whole=whole):
                back = args[0] if args else False
                end = word in ("send", "receive") and (
                    ranks.neighbour(back if word == "send" else not back) is None
                )
                repeats = (tape := group._TAPE.get()) is not None and tape.repeats
                counts[word] += not (end or repeats)
                return whole(ranks, value, *args)

            patch.setattr(Ranks, word, call)
        out = model(ids[:, span], labels=labels, shift_labels=labels, num_items_in_batch=64)
        out.loss.backward()
    ends = [mesh.get_local_rank() > 0, mesh.get_local_rank() < mesh.size() - 1]
    most = 2 * 2 * sum(ends)  # layers, a state and a halo, neighbours
    wanted = {"gather": 0, "total": 0, "send": most, "receive": most}
    return [] if counts == wanted else [f"{counts}, not {wanted}"]


CHECKS = {
    "solve": (SOLVES, check_solve),
    "layer": (layer_cases(), check_layer),
    "model": (MODELS, check_model),
    "hugging": (HUGGING, check_hugging),
    "sweeps": (SWEEPS, check_sweeps),
    "unsettled": (("latches", "packed", "slow in bfloat16"), check_unsettled),
    "messages": (("plain", "checkpointing"), check_messages),
}
BY_TWO = {
    "solve": (
        "latches",
        "slow in bfloat16",
        "tiny gradients",
        "resets",
        "packed",
        "reverse",
        "a mixing cell",
    ),
    "layer": (
        "plain",
        "time first",
        "no step",
        "packed to the end",
        "fields and a readout",
        "mixing",
    ),
    "model": (
        "gru",
        "padding on the right",
        "no convolution",
        "tied",
        "hybrid, packed",
        "attention",
    ),
    "hugging": ("documents at borders", "left", "hybrid, left", "hybrid, checkpointing"),
    "sweeps": ("latches",),
    "unsettled": (),
    "messages": (),
}
"""Cases on two ranks, which need no map and have no rank in the middle."""
BY_FOUR = {
    kind: [name for name in cases if kind == "solve" or name not in BY_TWO[kind]]
    for kind, (cases, _) in CHECKS.items()
}
"""Cases on four ranks: all solves, and the other ones that two ranks do not have."""
CASES = [
    (ranks, kind, name)
    for ranks, chosen in ((2, BY_TWO), (4, BY_FOUR))
    for kind, names in chosen.items()
    for name in names
]


def check_all(folder, rank, cases=CASES, checks=CHECKS):
    """Run the cases of all processes, then those of two of four ones, of which each pair has every
    other one; write what each case breaks."""
    device = process_device(rank)
    dist.init_process_group(collectives())
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    plans = [(mesh, [case for case in cases if case[0] == world])]
    if world == 4:
        pairs = init_device_mesh(device.type, (2, 2), mesh_dim_names=("pair", "context"))
        by_two = [case for case in cases if case[0] == 2]
        plans.append((pairs["context"], by_two[rank // 2 :: 2]))
    failures = {
        case_id(*case): checks[case[1]][1](case[2], mesh) for mesh, own in plans for case in own
    }
    (Path(folder) / f"failures-{rank}.json").write_text(json.dumps(failures))


def case_id(ranks, kind, name):
    return f"{kind} {name} on {ranks}"


def failures_of(folder, ranks):
    """What cases break, from the files of all ranks."""
    failures = {}
    for rank in range(ranks):
        for case, breaks in json.loads((folder / f"failures-{rank}.json").read_text()).items():
            failures.setdefault(case, []).extend(breaks)
    return failures
