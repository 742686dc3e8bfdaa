import math
import subprocess
import sys

import pytest
import torch

import pararnn
from pararnn.lm import ByteLM, bits_per_byte, load_checkpoint, save_checkpoint, set_solver
from pararnn.lm.checkpoint import CheckpointError


def make_lm(cell: str, **options) -> ByteLM:
    torch.manual_seed(0)
    model = ByteLM(pararnn.CELLS[cell], 8, **options)
    torch.nn.init.normal_(model.head.weight)  # zero at initialisation: every logit would be 0
    return model.eval()


def random_tokens(batch: int, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (batch, steps), generator=generator, dtype=torch.uint8)


def flat(states) -> list[torch.Tensor]:
    return [s for state in states for s in ((state,) if torch.is_tensor(state) else state)]


@pytest.mark.parametrize("cell", pararnn.CELLS)
def test_decoding_step_by_step_equals_forward(cell):
    model, tokens = make_lm(cell, num_heads=2), random_tokens(3, 12)
    logits, final = model(tokens)
    assert logits.shape == (3, 12, 256)
    assert logits.std() > 0.1
    state, stepped = None, []
    for token in tokens.unbind(1):
        out, state = model.step(token, state)
        stepped.append(out)
    torch.testing.assert_close(torch.stack(stepped, 1), logits, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(flat(state), flat(final), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["gru", "lstm", "lrc"])
def test_states_carry_a_sequence_on(cell):
    model, tokens = make_lm(cell), random_tokens(2, 20)
    whole, _ = model(tokens)
    first, state = model(tokens[:, :7])
    second, _ = model(tokens[:, 7:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-5)


def test_logits_do_not_see_later_bytes():
    model, tokens = make_lm("gru"), random_tokens(1, 20)
    changed = tokens.clone()
    changed[:, 10:] = 255 - changed[:, 10:]
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert (before[:, 10:] - after[:, 10:]).abs().max() > 0.1


def test_a_new_model_predicts_uniformly_and_gets_gradients():
    torch.manual_seed(0)
    model, tokens = ByteLM(pararnn.GRUCell, 8), random_tokens(2, 9)
    loss = bits_per_byte(model(tokens[:, :-1])[0], tokens[:, 1:])
    assert loss.item() == pytest.approx(8.0)
    torch.nn.init.normal_(model.head.weight)
    bits_per_byte(model(tokens[:, :-1])[0], tokens[:, 1:]).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_bits_per_byte_is_the_mean_surprise():
    chances = torch.full((1, 2, 256), 0.5 / 255)
    chances[0, 0, 7] = chances[0, 1, 9] = 0.5
    targets = torch.tensor([[7, 8]], dtype=torch.uint8)
    expected = (1 - math.log2(0.5 / 255)) / 2
    assert bits_per_byte(chances.log(), targets).item() == pytest.approx(expected, rel=1e-6)


def test_options_reach_the_layers():
    model = ByteLM(pararnn.GRUCell, 8, 3, 2, solver="newton", state_nonlinearity="softsign")
    assert [layer.num_heads for layer in model.layers()] == [2, 2, 2]
    assert all(layer.cell.state_nonlinearity == "softsign" for layer in model.layers())
    assert {layer.solver for layer in model.layers()} == {"newton"}
    set_solver(model, "sequential", "torch")
    assert {(layer.solver, layer.backend) for layer in model.layers()} == {("sequential", "torch")}


def test_greedy_generation_takes_the_likeliest_byte():
    model, prompt = make_lm("lstm"), random_tokens(2, 5)
    generated = model.generate(prompt, 6, temperature=0)
    assert generated.dtype == torch.uint8
    text = prompt
    for index in range(6):
        likeliest = model(text)[0][:, -1].argmax(-1)
        assert torch.equal(generated[:, index].long(), likeliest)
        text = torch.cat([text, likeliest.to(torch.uint8).unsqueeze(1)], 1)


def test_sampling_follows_the_generator_and_the_temperature():
    model, prompt = make_lm("gru"), random_tokens(1, 5)

    def sample(seed, temperature):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt, 40, temperature, generator)

    assert torch.equal(sample(0, 1.0), sample(0, 1.0))
    assert not torch.equal(sample(0, 1.0), sample(1, 1.0))
    assert torch.equal(sample(0, 1e-4), model.generate(prompt, 40, 0))
    assert model.generate(prompt, 0).shape == (1, 0)


@pytest.mark.parametrize(
    ("prompt", "length", "temperature", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.uint8), 3, 1.0, "T >= 1"),
        (torch.zeros(4, dtype=torch.uint8), 3, 1.0, "T >= 1"),
        (torch.zeros(1, 2, dtype=torch.uint8), -1, 1.0, "may not be negative"),
        (torch.zeros(1, 2, dtype=torch.uint8), 3, -0.5, "may not be negative"),
    ],
)
def test_generation_rejects_bad_arguments(prompt, length, temperature, message):
    with pytest.raises(ValueError, match=message):
        make_lm("gru").generate(prompt, length, temperature)


def test_bad_sizes_and_states_are_named():
    with pytest.raises(ValueError, match="num_layers must be positive"):
        ByteLM(pararnn.GRUCell, 8, 0)
    with pytest.raises(ValueError, match="mlp_ratio must be positive"):
        ByteLM(pararnn.GRUCell, 8, mlp_ratio=0)
    with pytest.raises(ValueError, match="multiples of num_heads"):
        ByteLM(pararnn.GRUCell, 8, num_heads=3)
    with pytest.raises(pararnn.CellError, match="no config"):
        ByteLM(pararnn.GRUCell, 8, typo=1)
    model, tokens = make_lm("gru"), random_tokens(1, 4)
    with pytest.raises(ValueError, match="each of the 2 blocks, got 1"):
        model(tokens, model(tokens)[1][:1])


@pytest.mark.parametrize("cell", pararnn.CELLS)
def test_checkpoints_rebuild_the_model(cell, tmp_path):
    model, tokens = make_lm(cell, num_layers=1, mlp_ratio=1.5, num_heads=2), random_tokens(1, 6)
    save_checkpoint(model, tmp_path / "model.pt")
    loaded = load_checkpoint(tmp_path / "model.pt")
    assert not loaded.training
    assert loaded.options == model.options
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])


def test_checkpoints_keep_the_cells_config(tmp_path):
    save_checkpoint(make_lm("lem", dt=0.25), tmp_path / "model.pt")
    assert load_checkpoint(tmp_path / "model.pt").layers()[0].cell.dt == 0.25


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    for name in ("text.pt", "empty.pt", "other.pt"):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            load_checkpoint(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "missing.pt")


def test_a_checkpoint_needs_a_named_cell(tmp_path, monkeypatch):
    class OwnCell(pararnn.GRUCell):
        pass

    model = ByteLM(OwnCell, 8)
    with pytest.raises(CheckpointError, match=r"OwnCell has no name in pararnn\.CELLS"):
        save_checkpoint(model, tmp_path / "own.pt")
    monkeypatch.setitem(pararnn.CELLS, "own", OwnCell)
    save_checkpoint(model, tmp_path / "own.pt")
    assert load_checkpoint(tmp_path / "own.pt").cell_class is OwnCell
    monkeypatch.delitem(pararnn.CELLS, "own")
    with pytest.raises(CheckpointError, match="needs the cell 'own'"):
        load_checkpoint(tmp_path / "own.pt")


def test_importing_the_library_leaves_the_demo_alone():
    code = (
        "import sys, pararnn\n"
        "parts = {'pararnn.lm', 'pararnn.tasks', 'pararnn.train', 'pararnn.cli'}\n"
        "assert not parts & set(sys.modules)\n"
        "import pararnn.cli\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
