"""What launches pack is what kernels read, field by field: both come from one list."""

import itertools
import subprocess

import pytest
import torch
from table import needs_compiler
from test_cuda import _program, needs_nvrtc

from pararnn.codegen import cuda, headers, nvrtc
from pararnn.codegen.compiler import compiler_command
from pararnn.codegen.interface import WORD, Counts, Interface, interface_of, structs_of

COUNTS = Counts(states=2, gates=3, fields=0, params=1)
SOLVERS = ("sequential", "newton")
HEAD = """
#define PARARNN_IO bfloat16
#define PARARNN_WIDE 0
#define PARARNN_APPROXIMATE 0
#define PARARNN_REFINED 0
#define PARARNN_CLUSTER 0
#include "functions.h"
namespace pararnn {
"""


def _against(target, declarations, tmp_path):
    """What a target's compiler has to say against declarations."""
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


TARGETS = [
    pytest.param("cpp", marks=needs_compiler),
    pytest.param("cuda", marks=needs_nvrtc),
]


def _values(interface, struct):
    """A number of its own for every word of a struct."""
    number = itertools.count(1)
    return {
        field.name: (
            [next(number) for _ in range(interface._words(field))]
            if field.each or field.type in interface.structs
            else next(number)
        )
        for field in interface.structs[struct]
    }


def _packed_places(interface):
    """C++ that holds where fields are where `packed` has put them, and the structs' sizes."""
    lines = []
    for struct in interface.structs:
        values = _values(interface, struct)
        words = interface.packed(struct, values)
        lines.append(f"static_assert(sizeof({struct}) == {WORD * len(words)});")
        for name, value in values.items():
            first = value if isinstance(value, int) else next(iter(value), None)
            if first is not None:
                place = WORD * words.index(first)
                lines.append(f"static_assert(__builtin_offsetof({struct}, {name}) == {place});")
    return "\n".join(lines)


def _reversed(structs):
    return {name: fields[::-1] for name, fields in structs.items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("change", [dict, _reversed], ids=["as it is", "reversed"])
def test_kernels_read_what_is_packed(change, solver, target, tmp_path):
    interface = Interface(change(structs_of(target, solver)), COUNTS)
    assert not _against(target, interface.declared() + _packed_places(interface), tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_a_side_alone_does_not_move(target, tmp_path):
    structs = structs_of(target, "newton")
    own, other = Interface(structs, COUNTS), Interface(_reversed(structs), COUNTS)
    assert "static" in _against(target, own.declared() + _packed_places(other), tmp_path)


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_a_field_is_dropped_on_both_sides(target):
    structs = structs_of(target, "newton")
    full = Interface(structs, COUNTS)
    for struct, fields in structs.items():
        for field in fields:
            rest = tuple(f for f in fields if f is not field)
            less = Interface({**structs, struct: rest}, COUNTS)
            values = _values(full, struct)
            with pytest.raises(ValueError, match=f"{struct} takes"):
                less.packed(struct, values)
            del values[field.name]
            less.packed(struct, values)
            with pytest.raises(ValueError, match=f"{struct} takes"):
                full.packed(struct, values)
            size = f"sizeof({struct}) == {WORD * len(full.packed(struct, _values(full, struct)))})"
            assert size in full.declared()
            assert size not in less.declared()


def test_rows_have_a_word_for_each():
    interface = Interface(structs_of("cpp", "sequential"), COUNTS)
    values = _values(interface, "ForwardProblem")
    for wrong in ([1, 2, 3], [1], 4):
        with pytest.raises(ValueError, match=r"ForwardProblem takes numbers for .*'final': 2"):
            interface.packed("ForwardProblem", values | {"final": wrong})


def test_counts_are_the_programs():
    program = _program("lrc")
    parts = (program.states, program.gates, program.fields, program.params)
    counts = interface_of(program, "cpp", "newton").counts
    assert counts == tuple(map(len, parts))
    assert counts.weights == counts.gates + counts.params


@needs_nvrtc
@pytest.mark.parametrize("what", ["board_group", "board_words", "ends_words", "found_a_channel"])
def test_kernels_refuse_a_board_of_another_size(what, tmp_path):
    program = _program("gru")
    variant = cuda.usual_variants(program, torch.float32, 64, 64, solver="newton")[0]
    source = cuda.source_of(program, variant)
    assert f"constexpr int {what} = " in source
    file = tmp_path / "board.cu"
    file.write_text(source.replace(f"constexpr int {what} = ", f"constexpr int {what} = 32 + "))
    with pytest.raises(nvrtc.ToolchainError, match="static assertion failed"):
        nvrtc.compile_cubin(file, headers.folder("cuda"), tmp_path / "cubin", "sm_80")
