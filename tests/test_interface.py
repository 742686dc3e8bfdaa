"""Launches pack the structs that kernels read, field by field."""

import itertools
import subprocess

import pytest
import torch
from table import needs_compiler
from test_cuda import _program, needs_nvrtc

from pararnn.codegen import cuda, headers, nvrtc
from pararnn.codegen.compiler import compiler_command
from pararnn.codegen.elementwise_cuda import usual_variants
from pararnn.codegen.families import FAMILIES, family_of, interface_of
from pararnn.codegen.interface import WORD, Counts, Interface

FAMILY = FAMILIES["elementwise"]
COUNTS = Counts(states=2, gates=3, fields=0, params=1)
HEAD = """
#define PARARNN_IO bfloat16
#define PARARNN_WIDE 0
#define PARARNN_APPROXIMATE 0
#define PARARNN_REFINED 0
#define PARARNN_CLUSTER 0
#include "functions.h"
namespace pararnn {
"""


def _errors(target, declarations, tmp_path):
    """Return the errors of a target's compiler on declarations."""
    own = "using weight_io = float;\n" if target == "cuda" else ""
    file = tmp_path / "structs.cpp"
    file.write_text(f"{HEAD}{own}{declarations}\n}}\n", encoding="utf-8")
    folder = headers.folder(target)
    if target == "cuda":
        try:
            nvrtc.compile_cubin(file, folder, tmp_path / "cubin", "sm_80")
        except nvrtc.ToolchainError as error:
            if '"__builtin_offsetof" is undefined' in str(error):
                pytest.skip("this NVRTC has no __builtin_offsetof: 12 and 13.0 have not")
            return str(error)
        return ""
    command = [*compiler_command(), "-std=c++17", "-fsyntax-only", f"-I{folder}", str(file)]
    return subprocess.run(command, capture_output=True, text=True).stderr


TARGETS = [pytest.param("cpp", marks=needs_compiler), pytest.param("cuda", marks=needs_nvrtc)]


def _values(interface, struct):
    """Return values for a struct in which every word differs."""
    number = itertools.count(1)
    return {
        field.name: (
            [next(number) for _ in range(interface._words(field))]
            if field.length or field.type in interface.structs
            else next(number)
        )
        for field in interface.structs[struct]
    }


def _offsets(interface):
    """Return C++ assertions that offsets and sizes of structs are those of `pack`."""
    lines = []
    for struct in interface.structs:
        values = _values(interface, struct)
        words = interface.pack(struct, values)
        lines.append(f"static_assert(sizeof({struct}) == {WORD * len(words)});")
        for name, value in values.items():
            first = value if isinstance(value, int) else next(iter(value), None)
            if first is not None:
                assert interface.place(struct, name) == words.index(first)
                offset = WORD * words.index(first)
                lines.append(f"static_assert(__builtin_offsetof({struct}, {name}) == {offset});")
    return "\n".join(lines)


def _backwards(structs):
    return {name: fields[::-1] for name, fields in structs.items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("solver", FAMILY.solvers)
@pytest.mark.parametrize("change", [dict, _backwards], ids=["in order", "reversed"])
def test_kernels_read_fields_where_launches_pack_them(change, solver, target, tmp_path):
    interface = Interface(change(FAMILY.structs(target, solver)), COUNTS)
    assert not _errors(target, interface.declaration() + _offsets(interface), tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_compilers_notice_different_orders(target, tmp_path):
    structs = FAMILY.structs(target, "newton")
    own, other = Interface(structs, COUNTS), Interface(_backwards(structs), COUNTS)
    assert "static" in _errors(target, own.declaration() + _offsets(other), tmp_path)


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_a_field_is_removed_from_both_sides(target):
    structs = FAMILY.structs(target, "newton")
    full = Interface(structs, COUNTS)
    for struct, fields in structs.items():
        for field in fields:
            others = tuple(f for f in fields if f is not field)
            less = Interface({**structs, struct: others}, COUNTS)
            values = _values(full, struct)
            with pytest.raises(ValueError, match=f"{struct} takes"):
                less.pack(struct, values)
            del values[field.name]
            less.pack(struct, values)
            with pytest.raises(ValueError, match=f"{struct} takes"):
                full.pack(struct, values)
            size = f"sizeof({struct}) == {WORD * len(full.pack(struct, _values(full, struct)))})"
            assert size in full.declaration()
            assert size not in less.declaration()


def test_arrays_of_the_wrong_length_are_refused():
    interface = Interface(FAMILY.structs("cpp", "sequential"), COUNTS)
    values = _values(interface, "ForwardProblem")
    for wrong in ([1, 2, 3], [1], 4):
        with pytest.raises(ValueError, match=r"ForwardProblem takes numbers for .*'final': 2"):
            interface.pack("ForwardProblem", values | {"final": wrong})


def test_counts_are_the_programs():
    program = _program("lrc")
    kinds = (program.states, program.gates, program.fields, program.params, program.memory, ())
    counts = interface_of(program, "cpp", "newton").counts
    assert counts == tuple(map(len, kinds))
    assert counts.weights == counts.gates + counts.params


def test_steps_that_mix_in_heads_have_the_family_of_their_kernels():
    assert family_of(_program("layer-norm-gru")) is FAMILIES["matrix"]


@needs_nvrtc
@pytest.mark.parametrize("name", ["board_group", "board_words", "ends_words", "found_a_channel"])
def test_kernels_refuse_a_board_of_another_size(name, tmp_path):
    program = _program("gru")
    variant = usual_variants(program, torch.float32, 64, 64, solver="newton")[0]
    source = cuda.source_of(program, variant)
    assert f"constexpr int {name} = " in source
    file = tmp_path / "board.cu"
    file.write_text(source.replace(f"constexpr int {name} = ", f"constexpr int {name} = 32 + "))
    with pytest.raises(nvrtc.ToolchainError, match="static assertion failed"):
        nvrtc.compile_cubin(file, headers.folder("cuda"), tmp_path / "cubin", "sm_80")
