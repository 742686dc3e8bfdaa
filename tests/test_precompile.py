"""Kernels compiled ahead are those that run, also for absent GPUs."""

import itertools
from dataclasses import replace

import pytest
import torch
from emulated import gpu, install
from test_cuda import needs_nvrtc

import pararnn
from pararnn.codegen import cuda, nvrtc
from pararnn.codegen import elementwise_cuda as elementwise
from pararnn.lm import LanguageModel, LMConfig

CAPABILITY = (9, 0)
BF16 = torch.bfloat16


class Idle:
    """Kernel that does nothing."""

    def __call__(self, *args, **options):
        pass

    def most_in_cluster(self, device):
        return 16

    def blocks_a_core(self):
        return 16


@pytest.fixture
def ahead(monkeypatch):
    """Collect the variants that are compiled ahead, without compiling them."""
    variants = set()

    def code(program, variant, capability):
        variants.add((program.key, variant, capability))

    monkeypatch.setattr(cuda, "_code_of", code)
    return variants


def _language_model(**factory):
    config = LMConfig(
        vocab_size=16, hidden_size=64, num_hidden_layers=1, num_heads=2, intermediate_size=64
    )
    return LanguageModel(config, **factory)


MODELS = {
    "layer": (lambda **to: pararnn.ParaGRU(8, 64, **to), None),
    "several states": (lambda **to: pararnn.ParaLSTM(8, 64, **to), None),
    "heads": (lambda **to: pararnn.ParaGRU(8, 64, num_heads=4, **to), None),
    "double": (lambda **to: pararnn.ParaGRU(8, 64, dtype=torch.float64, **to), None),
    "autocast": (lambda **to: pararnn.ParaGRU(8, 64, **to), [BF16]),
    "16 bits": (lambda **to: pararnn.ParaGRU(8, 64, dtype=BF16, **to), None),
    "language model": (lambda **to: _language_model(dtype=BF16, **to), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_kernels_that_run_were_compiled_ahead(name, ahead, monkeypatch):
    make, dtypes = MODELS[name]
    pararnn.precompile(make(device="meta"), dtypes, capability=CAPABILITY)
    model, run = make(), set()

    def kernels(program, variant, capability):
        run.add((program.key, variant, capability))
        return {"run": Idle(), "sum_weights": Idle()}

    install(replace(gpu(CAPABILITY), kernels=kernels), monkeypatch)
    for solver, batch in itertools.product(elementwise.SOLVERS, (1, 32)):
        with pararnn.using(solver, "fused"), torch.autocast("cpu", BF16, enabled=bool(dtypes)):
            if isinstance(model, LanguageModel):
                model.loss(torch.zeros(batch, 300, dtype=torch.long)).backward()
            else:
                x = torch.zeros(batch, 300, 8, dtype=next(model.parameters()).dtype)
                model(x)[0].sum().backward()
                model.step(x[:, 0])
    assert {variant.solver for _, variant, _ in run} == set(elementwise.SOLVERS)
    assert {variant.direction for _, variant, _ in run} == set(elementwise.KERNELS)
    assert run <= ahead


@needs_nvrtc
@pytest.mark.thorough
def test_code_for_an_absent_gpu_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(tmp_path))
    variants = elementwise.usual_variants
    monkeypatch.setattr(elementwise, "usual_variants", lambda *args, **options: variants(*args)[:1])
    cell = pararnn.ElmanCell(32, device="meta")
    pararnn.precompile(cell, capability=(8, 0))
    monkeypatch.setattr(cuda, "compile_cubin", None)  # a compilation would fail
    program = pararnn.program_of(cell)
    (variant,) = elementwise.usual_variants(program, torch.float32, 32, 32)
    assert cuda.cubin_of(program, variant, nvrtc.architecture((8, 0)))
    with pytest.raises(TypeError):
        cuda.cubin_of(program, variant, nvrtc.architecture((9, 0)))


@pytest.mark.parametrize(
    ("module", "capability", "error", "message"),
    [
        (pararnn.GRUCell(4), (7, 5), pararnn.EngineError, r"has compute capability 7\.5; .*8\.0"),
        (pararnn.GRUCell(4), "9.0", ValueError, r"capability must be two integers, .* got '9\.0'"),
        (pararnn.GRUCell(4), (9,), ValueError, r"capability must be two integers, .* got \(9,\)"),
        (pararnn.GRUCell(4, device="meta"), None, ValueError, r"meta device has none to compile"),
    ],
)
def test_wrong_arguments_are_refused(module, capability, error, message):
    with pytest.raises(error, match=message):
        pararnn.precompile(module, capability=capability)
