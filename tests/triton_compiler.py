"""Triton's compiler, which needs no GPU."""

import importlib.util

import pytest
import torch
from table import there

MISSING = None if importlib.util.find_spec("triton") else ModuleNotFoundError("no module triton")
NEEDS_TRITON = pytest.mark.skipif(not there(MISSING), reason="needs Triton")


def compiled(kernel, args, options):
    """A launch's kernel as Triton compiles it for Hopper."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import JITFunction

    assert isinstance(kernel, JITFunction)
    types = {
        torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
        torch.float8_e4m3fn: "fp8e4nv", torch.int64: "i64", torch.int32: "i32",
    }  # fmt: skip
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    signature, attributes = dict.fromkeys(kernel.arg_names, "constexpr"), {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{types[value.dtype]}"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            constants[name] = 1
        else:
            signature[name] = "i32"
        if signature[name].startswith("*") or (signature[name] == "i32" and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    rest = {
        name: value
        for name, value in options.items()
        if name not in constants and value is not None
    }
    source = ASTSource(kernel, signature, places, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=rest)
