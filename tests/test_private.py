"""Private names of PyTorch stand in one file, and mean what they meant when it was written."""

import re
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import pararnn
from pararnn.base import private

OUTSIDE = re.compile(r"\btorch(\.\w+)*\._[a-zA-Z]\w*|(from|import) torch\S*\._\w+")


def test_no_other_file_uses_private_names_of_pytorch():
    for path in Path(pararnn.__file__).parent.rglob("*.py"):
        if path.name != "private.py":
            code = re.sub(r'""".*?"""|#.*', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            assert not OUTSIDE.search(code), (path, OUTSIDE.search(code).group())


def _in_vmap(function):
    results = []
    torch.func.vmap(lambda x: results.append(function()) or x)(torch.zeros(2))
    return results[0]


def test_functorch_transforms():
    assert not private.are_functorch_transforms_active()
    assert _in_vmap(private.are_functorch_transforms_active)


def test_innermost_transform():
    inner = torch.ones(3)

    def in_gradient(x):
        transform = private.innermost_transform()
        assert transform.name == private.transforms()[-1]
        plain = transform.unwrap(x)
        with transform.without():
            outer = private.transforms()
            result = plain * 2
        results.append((transform.name, outer))
        assert private.unwrap_if_dead(transform.lift(inner)) is not inner
        return transform.wrap(result).sum() + x.sum()

    def in_copies(x):
        transform = private.innermost_transform()
        copies, dim = transform.unbatch(x)
        assert (copies.shape, dim, transform.batch_size) == ((2, 3), 0, 2)
        assert transform.unbatch(inner) == (inner, None)
        return transform.batch(copies + 1, dim) + torch.func.grad(in_gradient)(x)

    results = []
    assert torch.equal(torch.func.vmap(in_copies)(torch.ones(2, 3)), torch.full((2, 3), 3.0))
    assert torch.func.jvp(in_gradient, (inner,), (inner,))[1] == 3
    assert results == [("grad", ["vmap"]), ("jvp", [])]


def test_functions_of_a_level():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x):
            results.append(torch.is_grad_enabled())
            with private.set_forward_mode(True):
                return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    def call(x):
        with private.single_level_functions():
            return super(torch.autograd.Function, Double).apply(x).sum()

    results = []
    assert torch.equal(torch.func.grad(call)(torch.ones(2)), torch.full((2,), 3.0))
    assert results == [False]


def test_autocast():
    assert not private.autocast_enabled()
    with torch.autocast("cpu"):
        assert private.autocast_enabled()


def test_modes():
    class Dispatch(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    calls = []
    assert (private.dispatch_modes(), private.function_modes()) == (0, 0)
    with Dispatch():
        assert private.dispatch_modes() == 1
        torch.zeros(1).item()
    assert private.local_scalar in calls
    with torch.device("cpu"):
        assert private.function_modes() == 1


def test_inputs_whose_gradients_a_call_needs():
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(number, *tensors):
            return sum(tensors)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            flags.append(private.needed_inputs(ctx))
            return (None, *[grad] * 4)

    flags, constant = [], torch.ones(1)
    leaf, other, last = (torch.ones(1, requires_grad=True) for _ in range(3))

    def result():
        return Sum.apply(2.0, leaf, constant, other * 2, last)

    result().backward()
    torch.autograd.grad(result(), leaf)
    torch.autograd.grad(result(), [other, last], create_graph=True)
    result().backward(inputs=[last])
    torch.func.grad(lambda x: Sum.apply(2.0, x, constant, x * 2, constant).sum())(torch.ones(1))
    assert flags == [
        (False, True, False, True, True),
        (False, True, False, False, False),
        (False, False, False, True, True),
        (False, False, False, False, True),
        (False, True, False, True, False),
    ]


def test_tracing_and_profiling():
    results = []

    def function(x):
        results.append(bool(private.get_tracing_state()))
        return x + 1

    torch.jit.trace(function, torch.zeros(1), check_trace=False)
    assert results == [True]
    assert not private.get_tracing_state()
    assert not private.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.profiler_enabled()


def test_forward_level():
    assert private.forward_level() == -1
    with forward_ad.dual_level():
        assert private.forward_level() == 0


def test_modules_whose_call_is_their_forward():
    def make():
        return torch.nn.Linear(1, 1)

    assert private.calls_forward_alone(make())
    for hang in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        module = make()
        handle = getattr(module, f"register_{hang}")(lambda *args: None)
        assert not private.calls_forward_alone(module)
        handle.remove()
        assert private.calls_forward_alone(module)
    with torch.nn.modules.module.register_module_forward_hook(lambda *args: None):
        assert not private.calls_forward_alone(make())
    other = make()
    other.forward = other.forward
    assert not private.calls_forward_alone(other)
    other = make()
    other.compile()
    assert not private.calls_forward_alone(other)


def test_batched_gradients_are_recognised():
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            results.append(private.is_legacy_batchedtensor(grad))
            return grad

    results, x = [], torch.zeros(2, requires_grad=True)
    for batch in (False, True):
        grad = torch.ones(3, 2) if batch else torch.ones(2)
        torch.autograd.grad(Identity.apply(x), x, grad, is_grads_batched=batch)
    assert results == [False, True]


def test_exporting():
    class Module(torch.nn.Module):
        def forward(self, x):
            return x + 1 if private.exporting() else x

    x = torch.zeros(1)
    assert not private.exporting()
    assert torch.export.export(Module(), (x,)).module()(x) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_exporting_to_onnx(strict, monkeypatch):
    class Module(torch.nn.Module):
        def forward(self, x):
            return x + 1 if private.exporting_to_onnx() else x

    x = torch.zeros(1)
    assert torch.export.export(Module(), (x,), strict=strict).module()(x) == 0
    monkeypatch.setattr("torch.onnx._internal.exporter._flags._is_onnx_exporting", True)
    assert not private.exporting_to_onnx()
    assert torch.export.export(Module(), (x,), strict=strict).module()(x) == 1


def test_lazy_zeros_and_views_that_are_none():
    assert private.is_zerotensor(torch._efficientzerotensor(2))
    assert not private.is_zerotensor(torch.zeros(2))
    x = torch.zeros(6)
    other = private.unsafe_view(x, (2, 3))
    assert other.data_ptr() == x.data_ptr()
    assert not other._is_view()


def test_constants_in_graphs():
    calls = []

    @private.constant_in_graphs
    def constant():
        calls.append(torch.get_num_threads())  # which Dynamo would break the graph for
        return 2

    program = torch.compile(lambda x: x * constant(), backend="eager", fullgraph=True)
    assert program(torch.ones(1)) == 2
    assert len(calls) == 1


def test_scan_operator():
    last, series = private.higher_order_scan(
        lambda carry, x, step: [carry + x * step, carry.clone()],
        [torch.zeros(2)],
        [torch.ones(3, 2)],
        [torch.full((2,), 2.0)],
    )
    assert last.tolist() == [6, 6]
    assert series[:, 0].tolist() == [0, 2, 4]


def test_ops_and_decompositions():
    op = torch.ops.aten.matmul.default
    assert isinstance(op, private.OpOverload)
    assert isinstance(torch.ops.aten.matmul, private.OpOverloadPacket)
    assert private.is_composite(op)
    assert not private.is_composite(torch.ops.aten.mul.Tensor)
    assert torch.ops.aten.addcmul.default in private.core_aten_decompositions()

    @torch.library.custom_op("pararnn_test::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    assert isinstance(same, private.CustomOpDef)


def test_fake_tensors_and_inductor():
    with private.fake_tensor_mode():
        assert type(torch.zeros(2)) is not torch.Tensor
    assert hasattr(private.inductor_config(), "max_autotune")


def test_many_tensors_at_once():
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert [norm.item() for norm in private.foreach_norm(tensors)] == [5, 1]
    private.foreach_multiply(tensors, 2.0)
    assert [t.tolist() for t in tensors] == [[6, 8], [2]]
    private.foreach_copy(tensors, [torch.tensor([5.0, 6.0]), torch.tensor([7.0])])
    assert [t.tolist() for t in tensors] == [[5, 6], [7]]


def test_attention_of_the_last_tokens():
    """Its kernel is a GPU's, whose numbers tests/gpu has; here sizes and that it has a gradient."""
    q = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    keys = torch.empty(2, 3, 9, 8, device="meta", dtype=torch.bfloat16)
    out = private.flash_attention(q, keys, keys, 0.0, True)[0]
    assert out.shape == q.shape
    assert out.requires_grad


def test_attention_with_the_logarithm_of_its_sum():
    """cuDNN's kernels are a GPU's, whose numbers tests/gpu has; here sizes."""
    q, k = (torch.randn(2, 3, n, 8) for n in (5, 9))
    out, logs = private.cpu_attention(q, k, k, 0.0, False)
    torch.testing.assert_close(logs, (q @ k.mT / 8**0.5).logsumexp(-1))
    grads = private.cpu_attention_backward(out, q, k, k, out, logs, 0.0, False)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
    q, k = (x.to("meta", torch.bfloat16) for x in (q, k))
    out, logs, *_ = private.cudnn_attention(q, k, k, None, True, 0.0, False)
    assert logs.shape == (2, 3, 5, 1)
    seed = torch.empty((), dtype=torch.long, device="meta")
    options = (seed, seed, None, None, None, 5, 9, 0.0, False)
    grads = private.cudnn_attention_backward(out, q, k, k, out, logs, *options)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_asserts_on_devices():
    private.assert_async(torch.tensor(True), "message")
    with pytest.raises(RuntimeError, match="message"):
        private.assert_async(torch.tensor(False), "message")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_raw_streams():
    assert private.raw_stream(0) == torch.cuda.current_stream(0).cuda_stream


def test_transforms_by_name():
    assert private.transforms() == []
    assert _in_vmap(private.transforms) == ["vmap"]
    results = []

    def function(x):
        results.append(private.transforms())
        return x

    torch.func.grad(lambda x: torch.func.jvp(function, (x,), (x,))[1])(torch.ones(()))
    assert results == [["grad", "jvp"]]


def test_duals():
    x, tangent = torch.zeros(2), torch.ones(2)
    with forward_ad.dual_level():
        primal, none = private.unpack_dual(x)
        assert none is None
        pair = private.unpack_dual(private.make_dual(primal, tangent))
        assert torch.equal(pair[0], x)
        assert torch.equal(pair[1], tangent)
        x.requires_grad_()
        assert private.unpack_dual(x)[0].grad_fn is not None
        with torch.no_grad():
            assert not private.unpack_dual(x)[0].requires_grad


def test_batches_of_gradients():
    """Of `is_grads_batched`, taken apart and put together again."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            level = private.batch_level(grad)
            whole = private.from_batch(grad, level)
            assert private.is_legacy_batchedtensor(grad)
            assert whole.shape == (3, 2)
            return private.to_batch(2 * whole, level)

    x, grads = torch.ones(2, requires_grad=True), torch.randn(3, 2)
    (result,) = torch.autograd.grad(Twice.apply(x), x, grads, is_grads_batched=True)
    assert torch.equal(result, 2 * grads)
