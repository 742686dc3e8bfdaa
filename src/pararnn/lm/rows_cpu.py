"""C++ kernels of `pararnn.lm.rows_op`, compiled at the first use. 16-bit numbers but the weights of
products and attention's keys and values are widened first, and results are rounded once."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from pararnn.base.cache import CPP, cached_or_error, load, on_clear
from pararnn.base.errors import EngineError
from pararnn.codegen import headers
from pararnn.codegen.compiler import (
    compile_library,
    compiler_command,
    compiler_identity,
    flags,
    target_identity,
)
from pararnn.codegen.source import IO_TYPES
from pararnn.engines.fused.host import openmp

_LIBRARIES: dict[torch.dtype, Any] = {}
on_clear(_LIBRARIES.clear)


def product(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute `rows_product`; 8 bits are numbers of x's dtype too."""
    rows, heads, inputs = x.shape
    weight = weight if scale is None else weight.to(x.dtype)
    outputs, dtype = weight.shape[1], torch.promote_types(x.dtype, weight.dtype)
    x = x.to(torch.promote_types(dtype, torch.float32))
    weight = (weight.double() if x.dtype == torch.float64 else weight).contiguous()
    if x.stride(2) != 1:
        x = x.contiguous()
    y = x.new_empty((heads, rows, outputs))
    sizes = heads, rows, inputs, outputs, x.stride(0), x.stride(1), _kind(weight)
    _run("product", [x, weight, y], sizes)
    return (y if scale is None else y * scale.unsqueeze(1)).to(dtype)


def norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """Compute `rows_norm`."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    gate = None if gate is None else _wide(gate).contiguous()
    wide, size = _wide(x).contiguous(), x.shape[-1]
    y = torch.empty_like(wide)
    sizes = wide.numel() // max(1, size), size, int(centred), _bits(eps)
    _run("norm", [wide, gate, _wide(weight).contiguous(), y], sizes)
    return y.to(dtype)


def gated(a: Tensor, b: Tensor | None) -> Tensor:
    """Compute `rows_gated`."""
    wide, other = _wide(a).contiguous(), None if b is None else _wide(b).contiguous()
    y = torch.empty_like(wide)
    _run("gated", [wide, other, y], (y.numel(),))
    return y.to(a.dtype)


def conv(
    u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> Tensor:
    """Compute `rows_conv`."""
    wide = _wide(u).contiguous()
    y = torch.empty_like(wide)
    halo = None if halo is None else _wide(halo).contiguous()
    inputs = [wide, _wide(weight).contiguous(), _wide(bias), halo]
    steps_since = None if since is None else since.expand(u.shape[:2]).long().contiguous()
    _run("conv", [*inputs, steps_since, y], (*u.shape, len(weight)))
    return y.to(torch.promote_types(u.dtype, weight.dtype))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None,
    last: Tensor,
    table: Tensor | None = None,
    by_rows: bool = True,
) -> Tensor:
    """Compute `rows_attention`, or with a table of pages `paged_attention`, always by rows."""
    batch, heads, steps, size = q.shape
    wide, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (_wide(q), k, v))
    y = wide.new_empty((batch, steps, heads, size))
    strides = [stride for x in (wide, k, v) for stride in x.stride()[:3]]
    first = torch.zeros_like(last) if first is None else first
    seen = [x.long().contiguous() for x in (first, last)]
    pages = (0, 1) if table is None else (table.stride(0), k.shape[2])
    sizes = batch, heads, steps, size, *strides, *pages, _kind(k), _bits(1 / math.sqrt(size))
    _run("attention", [wide, k, v, *seen, table, y], sizes)
    return y.to(q.dtype)


def put(
    k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, last: Tensor
) -> None:
    """Do what `put_in_pages` does."""
    size = key_pages.shape[2]
    units, at = table.gather(1, last // size).long(), last % size
    for memory, new in ((key_pages, k), (value_pages, v)):
        memory[units, :, at] = new.transpose(1, 2).to(memory.dtype)


def log_prob(logits: Tensor, target: Tensor) -> Tensor:
    """Compute `rows_log_prob`."""
    wide = _wide(logits).contiguous()
    y = wide.new_empty(len(wide))
    _run("log_prob", [wide, target.long().contiguous(), y], wide.shape)
    return y


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _kind(x: Tensor) -> int:
    """Return the bytes of a number, negative for float16."""
    return x.dtype.itemsize * (-1 if x.dtype == torch.float16 else 1)


def _bits(number: float) -> int:
    """Return a float64's bits as an integer."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


def _run(name: str, tensors: list[Tensor | None], sizes: tuple[int, ...]) -> None:
    first = tensors[0]
    assert first is not None
    if not first.numel():
        return
    library = cached_or_error(_LIBRARIES, first.dtype, lambda: _build(first.dtype))
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    words = *addresses, *sizes, torch.get_num_threads(), openmp()
    getattr(library, name)(struct.pack(f"{len(words)}q", *words))


def _build(dtype: torch.dtype) -> Any:
    macros = (
        f"#define PARARNN_IO {IO_TYPES[dtype]}\n#define PARARNN_WIDE {int(dtype.itemsize == 8)}"
    )
    source = f'{macros}\n#include "../rows/rows.h"\n'
    key = "\n".join(
        (source, headers.text("cpp"), headers.text("rows"), *flags(), target_identity())
    )

    def build(file: Any, out: Any) -> None:
        compile_library(file, headers.folder("cpp"), out)

    try:
        return load(CPP, f"rows-{IO_TYPES[dtype]}", key, source, build, _compiler)
    except EngineError as error:
        raise EngineError(f"batch_invariant=True needs its kernels on a CPU: {error}") from error


def _compiler() -> str:
    return compiler_identity(*compiler_command())
