"""The small models: sizes as in the paper, and folded seeds that equal separate models."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from overrides import task_run
from table import CELLS

from pararnn.base.errors import CellError
from pararnn.lab.tasks import TASKS, Batch, deltanet, generator_of, training
from pararnn.lab.tasks.folded import FoldedModel, accuracies, losses, make_folded
from pararnn.lab.tasks.mamba2 import CHUNK, Mamba2, scan
from pararnn.lab.tasks.models import TASK_MIXERS, ModelConfig, TaskModel, sinusoids
from pararnn.lab.tasks.training import Stepper, TrainConfig, run_steps, train
from pararnn.lm.rows import Rows

PAPER_TASKS = ["keep-nth", "parity", "mqar", "1-hop", "2-hop"]
GRU = [19_840, 3_840, 32_704, 17_600, 16_960]
VOCABULARY = [128, 2, 128, 10, 5]
SIZES = {
    "gru": GRU,
    "lstm": [size + 128 for size in GRU],
    "transformer": [31_552 + 129 * symbols for symbols in VOCABULARY],
    "mamba2": [None, None, *(22_028 + 128 * symbols for symbols in VOCABULARY[2:])],
}


def run_train(*arguments):
    return run_steps(train(*arguments))


def model_config(name, mixer, **changes):
    return replace(task_run(name, mixer).model, **changes)


@pytest.mark.parametrize("mixer", SIZES)
def test_parameter_counts_are_the_papers(mixer):
    for name, size in zip(PAPER_TASKS, SIZES[mixer], strict=True):
        model = TaskModel(TASKS[name], model_config(name, mixer))
        assert size in (None, sum(p.numel() for p in model.parameters())), name


@pytest.mark.parametrize("mixer", [*CELLS, "attention", *TASK_MIXERS, "user_cells:Timeless"])
@pytest.mark.parametrize(("name", "layers"), [("2-hop", 1), ("keep-nth", 2), ("adding", 1)])
def test_models_are_causal(mixer, name, layers):
    """Later inputs change no output, and earlier ones do."""
    task = TASKS[name].at(30)
    model = TaskModel(task, model_config(name, mixer, layers=layers, width=16, heads=2)).double()
    inputs = task.draw(2, generator_of(0)).inputs
    inputs = inputs.double() if task.features else inputs
    other_tokens = inputs.clone()
    other_tokens[:, 20] = 1 - inputs[:, 20] if task.features else (inputs[:, 20] + 1) % task.symbols
    one, other = model(inputs), model(other_tokens)
    assert one.shape == (2, 30, task.classes)
    assert torch.allclose(one[:, :20], other[:, :20], rtol=1e-9)
    assert ((one - other)[:, 20:].abs().amax(-1) > 1e-9).float().mean() > 0.5


def test_bare_cells_have_no_other_parameters():
    names = {
        name
        for name, _ in TaskModel(TASKS["parity"], model_config("parity", "gru")).named_parameters()
    }
    cell = {
        f"mixers.0.rnn.{name}"
        for name in ("bias", "proj.weight", "cell.a_z", "cell.a_r", "cell.a_c")
    }
    assert names == cell | {"embed.weight", "head.weight", "norms.0.weight", "norms.1.weight"}


def test_positions():
    table = sinusoids(torch.arange(50), 8)
    assert table.shape == (50, 8)
    assert torch.allclose(table[:, 0], torch.arange(50.0).sin())
    assert torch.allclose(table[:, 7], (torch.arange(50.0) / 1000).cos())
    config = model_config("keep-nth", "gru")
    inputs = torch.zeros(1, 20, dtype=torch.int64)
    model = TaskModel(TASKS["keep-nth"], config)
    no_positions = TaskModel(TASKS["keep-nth"], replace(config, positions=False))
    no_positions.load_state_dict(model.state_dict())
    assert not torch.allclose(model(inputs), no_positions(inputs))
    transformer = TaskModel(TASKS["parity"], model_config("parity", "transformer"))
    with pytest.raises(ValueError, match="positions are learned up to 100, got 101"):
        transformer(torch.zeros(1, 101, dtype=torch.int64))


def test_impossible_models():
    with pytest.raises(ValueError, match="layers must be positive, got 0"):
        ModelConfig(layers=0)
    with pytest.raises(ValueError, match="multiple of heads, got 64 and 5"):
        ModelConfig(heads=5)
    with pytest.raises(CellError, match="there is no cell 'gruu'"):
        TaskModel(TASKS["parity"], ModelConfig(mixer="gruu"))
    with pytest.raises(CellError, match="cell or mixer 'no_cells:Mine' cannot be imported"):
        TaskModel(TASKS["parity"], ModelConfig(mixer="no_cells:Mine"))
    with pytest.raises(CellError, match=r"user_mixers has no subclass of pararnn\.Cell called"):
        TaskModel(TASKS["parity"], ModelConfig(mixer="user_mixers:NOT_A_MIXER"))


@pytest.mark.parametrize("name", ["Decay", "Attend"])
def test_mixers_of_one_s_own(name):
    config = replace(model_config("2-hop", "gru"), mixer=f"user_mixers:{name}", layers=2)
    model = make_folded(TASKS["2-hop"], config, (0, 1), "cpu")
    assert [type(mixer).__name__ for mixer in model.base.mixers] == [name] * 2
    inputs = TASKS["2-hop"].draw(3, generator_of(0)).inputs
    outputs = model(inputs, shared=True)
    assert outputs.shape == (2, 3, 100, 5)
    alone = make_folded(TASKS["2-hop"], config, (1,), "cpu")(inputs, shared=True)
    assert torch.allclose(outputs[1], alone[0], atol=1e-5)


def stepwise(x, decay, b, c):
    state = torch.zeros(*x.shape[:1], *x.shape[2:], b.shape[-1], dtype=x.dtype)
    outputs = []
    for t in range(x.shape[1]):
        new = x[:, t].unsqueeze(-1) * b[:, t, None, None]
        state = decay[:, t].exp()[..., None, None] * state + new
        outputs.append((state * c[:, t, None, None]).sum(-1))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("steps", [1, 100, CHUNK, 2 * CHUNK + 5])
def test_mamba2s_scan_is_its_recurrence(steps):
    x, b, c = (torch.randn(2, steps, *size).double() for size in ((3, 4), (5,), (5,)))
    decay = -torch.rand(2, steps, 3).double()
    assert torch.allclose(scan(x, decay, b, c), stepwise(x, decay, b, c), rtol=1e-9, atol=1e-11)


def delta_loop(q, k, v, decay, strength):
    state, outputs = torch.zeros(q.shape[0], *q.shape[2:], v.shape[-1], dtype=q.dtype), []
    for t in range(q.shape[1]):
        key, b = k[:, t].unsqueeze(-1), strength[:, t, :, None, None]
        state = decay[:, t].exp()[..., None, None] * (state - b * key * (key * state).sum(-2, True))
        state = state + b * key * v[:, t].unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("steps", [1, 63, deltanet.CHUNK, 2 * deltanet.CHUNK + 5])
def test_deltanets_scan_is_its_recurrence(steps):
    q, k, v = (torch.randn(2, steps, 3, size).double() for size in (4, 4, 5))
    k = F.normalize(k, dim=-1)
    decay, strength = -0.1 * torch.rand(2, steps, 3).double(), 2 * torch.rand(2, steps, 3).double()
    inputs = [each.requires_grad_() for each in (q, k, v, decay, strength)]
    one, other = deltanet.delta_scan(*inputs), delta_loop(*inputs)
    assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)
    weights = torch.randn_like(one)
    for mine, theirs in zip(
        *(torch.autograd.grad((y * weights).sum(), inputs) for y in (one, other)), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10)


def test_mamba2_is_that_of_transformers():
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = mamba2.Mamba2Config(
        hidden_size=32,
        expand=1,
        num_heads=4,
        head_dim=8,
        state_size=16,
        n_groups=1,
        num_hidden_layers=1,
    )
    theirs = mamba2.Mamba2Mixer(config, 0)
    ours = Mamba2(32, 4, 16, 4, bare=False)
    with torch.no_grad():
        gate, inner = theirs.in_proj.weight.split([32, 68])
        ours.gate_proj.weight.copy_(gate)
        ours.in_proj.weight.copy_(inner)
        ours.conv.weight.copy_(theirs.conv1d.weight[:, 0].flip(1).T)
        ours.conv.bias.copy_(theirs.conv1d.bias)
        theirs.dt_bias.copy_(ours.dt_bias)
        theirs.D.uniform_()
        ours.skip.copy_(theirs.D)
        ours.a_log.copy_(theirs.A_log)
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
    x = torch.randn(2, 150, 32)
    rows = Rows(torch.arange(150).unsqueeze(0))
    assert torch.allclose(ours(x, rows), theirs(ours.own_norm(x)), atol=1e-5)


@pytest.mark.parametrize("mixer", ["gru", "lem", "mamba2", "deltanet", "transformer", "attention"])
def test_folded_seeds_equal_separate_models(mixer):
    task = TASKS["2-hop"].at(20)
    config = model_config("2-hop", mixer, width=16, heads=2)
    folded_seeds = make_folded(task, config, (3, 4), "cpu")
    batch = [task.draw(5, generator_of(seed)) for seed in (0, 1)]
    both = Batch(*(torch.stack(parts) for parts in zip(*batch, strict=True)))
    outputs = folded_seeds(both.inputs)
    each_loss = losses(task, outputs, both)
    each_loss.sum().backward()
    for index, seed in enumerate((3, 4)):
        single = make_folded(task, config, (seed,), "cpu").base
        one = single(batch[index].inputs)
        assert torch.allclose(outputs[index], one, atol=1e-5)
        mask = batch[index].judged
        loss = F.cross_entropy(one[mask], batch[index].targets[mask])
        assert torch.allclose(each_loss[index], loss, rtol=1e-5)
        loss.backward()
        for name, weight in single.named_parameters():
            grad = folded_seeds.weights[name].grad[index]
            assert torch.allclose(grad, weight.grad, rtol=1e-3, atol=1e-6), name
    assert torch.allclose(folded_seeds(batch[0].inputs, shared=True)[0], outputs[0], atol=1e-6)


def test_one_seed_of_a_matrix_cell_trains_in_kernels():
    """And as it does under vmap by plain PyTorch."""
    task = replace(TASKS["s3"], length=6)
    inputs = task.draw(3, generator_of(0)).inputs
    results = []
    for seeds, pair in (((0,), {}), ((0, 1), {"solver": "sequential", "backend": "torch"})):
        config = ModelConfig("m2rnn", width=8, heads=2, bare=True, clip=None, **pair)
        model = make_folded(task, config, seeds, "cpu")
        output = model(inputs, shared=True)
        output[0].square().sum().backward()
        results.append([output[0], *(weight.grad[0] for weight in model.weights.values())])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    several = make_folded(task, ModelConfig("m2rnn", width=8, heads=2, bare=True), (0, 1), "cpu")
    torch.testing.assert_close(several(inputs, shared=True)[0], results[0][0])


def test_a_step_is_the_papers():
    """Against AdamW on a model of its own, on the same sequences."""
    task = TASKS["parity"].at(12)
    config = model_config("parity", "gru", width=16, heads=2, clip=0.1)
    options = TrainConfig(seeds=1, seed=2, rows=24, batch=8, steps=7, lr=0.01, weight_decay=0.1)
    folded_seeds, single = (make_folded(task, config, (2,), "cpu") for _ in range(2))
    stepper = Stepper(folded_seeds, task, options)
    model = single.base
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    data, order = stepper.data, []
    for step in range(7):
        stepper()
        rows = stepper.order[0, step % 3 * 8 :][:8]
        order += rows.tolist()
        loss = F.cross_entropy(model(data.inputs[rows]).flatten(0, 1), data.targets[rows].flatten())
        assert torch.allclose(stepper.losses[0], loss, rtol=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for weight in model.mixers[0].rnn.recurrent_parameters():
                weight.clamp_(-0.1, 0.1)
    for name, weight in model.named_parameters():
        assert torch.allclose(folded_seeds.weights[name][0], weight, rtol=1e-3, atol=1e-5), name
    assert folded_seeds.weights["mixers.0.rnn.cell.a_z"].abs().max() <= 0.1
    assert sorted(order[:24]) == sorted(order[24:48]) == list(range(24))


def test_fresh_data_are_new_every_epoch():
    task, options = TASKS["parity"].at(12), TrainConfig(seeds=1, rows=16, batch=8, steps=9)
    config = model_config("parity", "gru", width=16, heads=2)
    for fresh in (False, True):
        model = make_folded(task, config, (0,), "cpu")
        stepper = Stepper(model, task, replace(options, fresh=fresh))
        first = stepper.data.inputs.clone()
        for _ in range(3):
            stepper()
        assert torch.equal(first, stepper.data.inputs) is not fresh


def test_accuracies_count_judged_positions():
    task = replace(TASKS["keep-nth"], vocab=4, n=2, judge="last").at(6)
    model = make_folded(task, model_config("keep-nth", "gru", width=8, heads=2), (0, 1), "cpu")
    scores = accuracies(model, task, 400, 1)
    batches = task.draw(400, generator_of(1, 0))
    for index, accuracy in enumerate(scores):
        answers = model(batches.inputs, shared=True)[index, :, -1].argmax(-1)
        right = (answers == batches.inputs[:, 1]).sum().item()
        assert accuracy == right / 400


@pytest.mark.thorough
def test_the_best_validation_is_kept_and_training_stops():
    task = TASKS["parity"].at(4)
    config = model_config("parity", "gru", width=16, heads=2)
    options = TrainConfig(seeds=2, rows=256, steps=400, every=20, validation=100, lr=0.03)
    model = make_folded(task, config, (0, 1), "cpu")
    result = run_train(model, task, options)
    assert not result["capped"]
    assert result["steps"] < 400
    assert max(result["history"][-1][2]) == 1
    assert result["history"][-1][0] == result["steps"]
    top = [max(each[2][seed] for each in result["history"]) for seed in range(2)]
    assert accuracies(model, task, 100, 0, 1) == top
    short = run_train(
        make_folded(task, config, (0,), "cpu"), task, replace(options, seeds=1, steps=25)
    )
    assert short["capped"]
    assert [each[0] for each in short["history"]] == [20, 25]
    patient = replace(options, steps=300, stop="never")
    whole = run_train(make_folded(task, config, (0, 1), "cpu"), task, patient)
    assert whole["steps"] == 300
    assert not whole["capped"]
    hasty = replace(options, seeds=1, seconds=1e-9, stop="never")
    assert run_train(make_folded(task, config, (0,), "cpu"), task, hasty)["steps"] == 20


def stepper_of(name, mixer, *options, seeds=2):
    config = task_run(name, mixer, ["rows=64", "width=16", "heads=2", "lr=0.01", *options])
    model = make_folded(config.task, config.model, range(seeds), "cpu")
    return Stepper(model, config.task, config.train)


@pytest.mark.parametrize("options", [[], ["start=2", "grow_at=0.2", "max_norm=0.1"]])
@pytest.mark.one_in(2)
def test_compiled_steps_are_steps(options, monkeypatch):
    """What is compiled: the traced losses and gradients, with long sums in pieces."""
    graphs = []
    monkeypatch.setattr(training, "compile_graph", lambda graph: graphs.append(graph) or graph)
    monkeypatch.setattr(training, "SPLIT_FROM", 64)
    options = ["length=20", "batch=8", "steps=60", *options]
    steppers = [stepper_of("s3", "gru", *options, f"compile={on}") for on in ("false", "true")]
    products = [node for node in graphs[0].graph.nodes if node.target is torch.matmul]
    assert {node.args[0].args[0].args[2][0] for node in products} == {32}  # pieces of 160 tokens
    assert len(products) == 5  # weights of three projections, the gates and the head
    for _ in range(12):
        for stepper in steppers:
            stepper()
    one, other = steppers
    assert torch.allclose(one.losses, other.losses, rtol=1e-4)
    assert torch.equal(one.horizons, other.horizons)
    for name, weight in one.model.weights.items():
        assert torch.allclose(weight, other.model.weights[name], atol=1e-4), name


@pytest.mark.thorough
def test_positions_that_are_trained_on_grow():
    """By one, where a seed answers enough of the last of them right; others are not read."""
    stepper = stepper_of("parity", "gru", "length=6", "batch=16", "start=2", "grow_at=1")
    assert stepper.horizons.tolist() == [2, 2]
    last = stepper.horizons
    for _ in range(300):
        weights = {name: w.detach().clone() for name, w in stepper.model.weights.items()}
        step = stepper.count % 4
        stepper()
        rows = stepper.order[:, 16 * step :][:, :16]
        batch = Batch(*(part[rows] for part in stepper.data))
        outputs = stepper.model(batch.inputs, weights)
        for seed, horizon in enumerate(last.tolist()):
            read = Batch(*(part[seed : seed + 1, :, :horizon] for part in batch))
            loss = losses(stepper.task, outputs[seed : seed + 1, :, :horizon], read)
            assert torch.allclose(stepper.losses[seed], loss, rtol=1e-5)
            right = outputs[seed, :, horizon - 1].argmax(-1) == batch.targets[seed, :, horizon - 1]
            assert stepper.horizons[seed] == min(horizon + bool(right.all()), 6)
        last = stepper.horizons.clone()
        if last.tolist() == [6, 6]:
            break
    assert last.tolist() == [6, 6]


def test_the_norm_of_a_seeds_gradient_is_bounded():
    steppers = [
        stepper_of("s3", "gru", "length=6", "batch=8", more) for more in ("seed=0", "max_norm=0.5")
    ]
    for stepper in steppers:
        stepper()
    free, bound = ([w.grad.flatten(1) for w in s.model.weights.values()] for s in steppers)
    norms, new = (torch.cat(each, 1).norm(dim=1) for each in (free, bound))
    assert (norms > 0.5).all()
    assert torch.allclose(new, torch.full_like(new, 0.5), rtol=1e-4)
    assert torch.allclose(free[0] * (0.5 / norms).unsqueeze(1), bound[0], rtol=1e-4)


def test_the_later_of_equal_validations_is_kept(monkeypatch):
    """The earlier was: a model that is right throughout went on learning for nothing."""
    monkeypatch.setattr(training, "accuracies", lambda *arguments: [0.5, 0.5])
    task, config = TASKS["parity"].at(4), model_config("parity", "gru", width=16, heads=2)
    model = make_folded(task, config, (0, 1), "cpu")
    run_train(model, task, TrainConfig(seeds=2, rows=64, steps=40, every=20))
    longer = make_folded(task, config, (0, 1), "cpu")
    stepper = Stepper(longer, task, TrainConfig(seeds=2, rows=64, steps=40, every=20))
    for _ in range(40):
        stepper()
    for name, weight in longer.weights.items():
        assert torch.equal(weight, model.weights[name]), name


def test_folding_does_not_change_the_global_generator():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    make_folded(TASKS["parity"], model_config("parity", "gru"), (0,), "cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_cells_that_mix_channels_are_folded_too():
    task = TASKS["parity"].at(6)
    config = model_config("parity", "dense-gru", width=8, heads=2)
    outputs = FoldedModel([TaskModel(task, config) for _ in range(2)], "cpu")(
        torch.zeros(2, 3, 6, dtype=torch.int64)
    )
    assert outputs.shape == (2, 3, 6, 2)
