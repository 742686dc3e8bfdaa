"""DDP and FSDP2 on two processes, against one process with the whole batch."""

import copy
from functools import partial

import pytest
import torch
from invariance import model_of
from lm_kinds import tokens
from mixing_cells import HeadLSTM
from processes import WORLD, on_processes, with_group
from table import FUSED, OPS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import pararnn

MIXING = partial(pararnn.ParaRNN, HeadLSTM)
CASES = [(pararnn.ParaGRU, pair) for pair in OPS]
CASES += [(cls, pair) for cls in (pararnn.ParaLSTM, MIXING) for pair in OPS if pair == FUSED]
SHARDINGS = [(case, True, "elementwise") for case in CASES]
SHARDINGS += [(case, False, by) for case in CASES[-2:] for by in ("elementwise", "norm")]
"""A case, whether each layer is sharded for itself, and how weights are clipped."""


def _mesh():
    return init_device_mesh("cpu", (WORLD,))


def _layer(cls, pair):
    torch.manual_seed(0)
    options = {"solver": pair[0], "backend": pair[1], "dtype": torch.float64}
    return cls(4, 6, num_layers=2, num_heads=2, bidirectional=True, **options)


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _train_alike(rank, single, shared, inner, by="elementwise"):
    """Two clipped steps of `shared`, a part of the batch a process, and of `alone`."""
    x = torch.randn(2 * WORLD, 9, 4, dtype=torch.float64)
    runs = ((single, single, x), (shared, inner, x.chunk(WORLD)[rank]))
    optimizers = [torch.optim.SGD(module.parameters(), lr=30.0) for module, *_ in runs]
    for optimizer, (_, layer, _) in zip(optimizers, runs, strict=True):
        pararnn.clip_after_step(optimizer, layer, by=by)
    for _ in range(2):
        for optimizer, (module, _, rows) in zip(optimizers, runs, strict=True):
            optimizer.zero_grad()
            (module(rows)[0] - 0.3).square().mean().backward()
        for name, parameter in single.named_parameters():
            grad = _whole(inner.get_parameter(name).grad)
            assert torch.allclose(grad, parameter.grad, rtol=1e-8, atol=1e-12), name
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in single.named_parameters():
            assert torch.allclose(_whole(inner.get_parameter(name)), parameter, atol=1e-9), name
    largest = max(map(_size[by], single.recurrent_parameters()))
    assert abs(largest - 0.5) < 1e-12  # clipping has had something to do


def _norm(parameter):
    dims = (-2, -1) if parameter.ndim > 1 else None
    return float(torch.linalg.vector_norm(parameter.detach(), dim=dims).max())


_size = {"elementwise": lambda parameter: float(parameter.detach().abs().max()), "norm": _norm}


def _ddp(rank):
    for case in CASES:
        inner = _layer(*case)
        _train_alike(rank, _layer(*case), DistributedDataParallel(inner), inner)


def _fsdp(rank):
    for case, each, by in SHARDINGS:
        shared = _layer(*case)
        for part in (*shared.layers, *shared.reverse_layers) if each else ():
            fully_shard(part, mesh=_mesh())
        fully_shard(shared, mesh=_mesh())
        assert all(hasattr(p, "full_tensor") for p in shared.parameters())
        _train_alike(rank, _layer(*case), shared, shared, by)
    for cls in (pararnn.ParaGRU, partial(pararnn.ParaRNN, pararnn.zoo.DenseGRUCell)):
        single = cls(4, 1, dtype=torch.float64)  # of one row, which rank 0 has
        shared = fully_shard(copy.deepcopy(single), mesh=_mesh())
        for layer in (single.layers[0], shared.layers[0]):
            layer.clip_recurrent("norm", 1e-3)
        for name, parameter in single.named_parameters():
            assert torch.equal(_whole(shared.get_parameter(name)), parameter), name
        assert _norm(single.recurrent_parameters()[0]) == pytest.approx(1e-3)


def _fsdp_decoding(rank):
    x = torch.randn(2, 4, dtype=torch.float64)
    for cls, _ in CASES:
        single = cls(4, 6, 2, dtype=torch.float64)
        shared = fully_shard(copy.deepcopy(single), mesh=_mesh())
        register_fsdp_forward_method(shared, "step")
        assert torch.allclose(shared.step(x)[0], single.step(x)[0])


def _fsdp_of_a_layer(rank):
    """Shard a bare layer: its step is its own call, and need not be registered, but may be."""
    x = torch.randn(2, 9, 4, dtype=torch.float64)
    for recompute in (False, True):  # gates that are made again need weights that come back
        torch.manual_seed(0)
        options = {"dtype": torch.float64, "recompute_gates": recompute}
        single = pararnn.RecurrentLayer(pararnn.LSTMCell, 4, 6, **options)
        shared = fully_shard(copy.deepcopy(single), mesh=_mesh())
        if recompute:
            register_fsdp_forward_method(shared, "step")
        assert torch.allclose(shared.step(x[:, 0])[0], single.step(x[:, 0])[0])
        for module in (single, shared):
            module(x)[0].square().sum().backward()
        for name, parameter in single.named_parameters():
            grad = _whole(shared.get_parameter(name).grad)
            assert torch.allclose(grad, parameter.grad, rtol=1e-8, atol=1e-12), name


def _fsdp_of_parts(rank):
    x = torch.randn(2, 9, 4, dtype=torch.float64)
    for case in CASES:
        layer = _layer(*case)
        reference = layer(x)[0]
        fully_shard(layer.layers[0].proj, mesh=_mesh())
        assert torch.allclose(layer(x)[0], reference)
        fully_shard(layer.cell, mesh=_mesh())
        with pytest.raises(TypeError, match=r" are DTensors.*fully_shard\(rnn.layers\[i\]\)"):
            layer(x)


def test_ddp():
    on_processes(partial(with_group, _ddp))


def test_fsdp():
    on_processes(partial(with_group, _fsdp))


def test_fsdp_decoding():
    on_processes(partial(with_group, _fsdp_decoding))


def test_fsdp_of_a_layer():
    on_processes(partial(with_group, _fsdp_of_a_layer))


def test_fsdp_of_a_cell_alone_says_what_to_shard():
    on_processes(partial(with_group, _fsdp_of_parts))


def _fsdp_of_torch_nn(rank):
    """Weights are the stack's: its layers hold none, and may be sharded or not."""
    for each in (True, False):
        torch.manual_seed(0)
        options = {"recurrent_clip": 0.5, "batch_first": True, "dtype": torch.float64}
        single = pararnn.LSTM(4, 6, 2, bidirectional=True, num_heads=2, **options)
        shared = copy.deepcopy(single)
        for part in (*shared.layers, *shared.reverse_layers) if each else ():
            fully_shard(part, mesh=_mesh())
        fully_shard(shared, mesh=_mesh())
        assert all(hasattr(p, "full_tensor") for p in shared.parameters())
        _train_alike(rank, single, shared, shared)


def test_fsdp_of_layers_with_the_weights_of_torch_nn():
    on_processes(partial(with_group, _fsdp_of_torch_nn))


def _fsdp_of_equal_bits(rank):
    """Gathered weights are the same numbers: rows of one process have those of the whole batch."""
    for kind in ("gru", "hybrid"):
        single, batch = model_of(kind, torch.float32), tokens(2 * WORLD, 15)
        shared = copy.deepcopy(single)
        for block in shared.backbone.layers:
            fully_shard(block, mesh=_mesh())
        fully_shard(shared, mesh=_mesh())
        register_fsdp_forward_method(shared, "log_probs")
        own = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(shared.log_probs(batch[own]), single.log_probs(batch)[own])


@pytest.mark.thorough
def test_fsdp_of_equal_bits():
    on_processes(partial(with_group, _fsdp_of_equal_bits))
