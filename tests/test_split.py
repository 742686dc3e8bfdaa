"""How time is cut: by the rule, as asked, and through the operator."""

import pytest
import torch

import pararnn
from pararnn.cells.affine import AFFINE
from pararnn.engines.rule import Rank, rank_of_matrix_segments, rank_of_segments
from pararnn.engines.split import BURN_IN, NO_REQUEST, Split, SplitRequest, plan_split
from pararnn.program.program import program_of

HOW = {"solver": "newton", "backend": "fused"}


def _cut(length, request=NO_REQUEST, columns=4, capacity=1000, steps=4):
    return plan_split(length, columns, torch.float32, steps, 128, capacity, request)


def test_the_rule():
    assert _cut(2048) == Split(64, 32, 48)
    assert _cut(2048, columns=128) == Split(4, 512, 48)
    assert _cut(2048, columns=600) == Split(1, 2048, 48)
    assert plan_split(2048, 4, torch.float64, 4, 128, 1000).burn_in == BURN_IN[torch.float64]


def test_auto_follows_from_trained_layers_where_there_is_anything_to_mend():
    cell, affine = pararnn.GRUCell(8), AFFINE[1](8)
    for device, least in (("cpu", 4), ("cuda", 6)):
        for each, pays_from in ((cell, least), (affine, 4)):
            program, on = program_of(each), torch.device(device)
            ranks = [rank_of_segments(program, n, on)[0] for n in range(9)]
            assert [rank > Rank.LOOP for rank in ranks] == [n >= pays_from for n in range(9)]


def test_auto_cuts_long_rows_of_matrix_cells_on_a_gpu():
    cases = {("cuda", 16_384, 6): True, ("cuda", 16_384, 5): False, ("cuda", 16_383, 44): False}
    for (device, length, count), pays in (cases | {("cpu", 65_536, 44): False}).items():
        rank, _ = rank_of_matrix_segments(count, length, torch.device(device))
        assert (rank > Rank.LOOP) == pays


@pytest.mark.parametrize("length", [1, 31, 256, 2047, 65536])
@pytest.mark.parametrize("segments", [1, 2, 7, 64, 512])
def test_what_is_asked(length, segments):
    cut = _cut(length, SplitRequest(segments, 10), columns=1)
    assert cut.size % 4 == 0
    assert (cut.segments - 1) * cut.size < length <= cut.segments * cut.size
    assert cut.segments <= segments
    if length >= 16 * segments:  # where rounding the size up leaves room
        assert cut.segments > 0.8 * segments
    assert cut.burn_in == (4 if length == 1 else 12)


def test_what_does_not_fit_is_reduced():
    assert _cut(4096, SplitRequest(512), columns=4, capacity=100).segments == 25
    assert _cut(4096, SplitRequest(512), columns=200, capacity=100).segments == 1
    assert _cut(64, SplitRequest(2**30, 2**30)) == Split(16, 4, 64)
    assert _cut(0, SplitRequest(8, 0)) == Split(1, 4, 0)


def test_a_part_that_is_not_asked_for_is_the_rules():
    assert _cut(2048, SplitRequest(segments=8)) == Split(8, 256, 48)
    assert _cut(2048, SplitRequest(burn_in=0)) == Split(64, 32, 0)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"segments": 0}, "segments must be an integer from 1 to .*got 0"),
        ({"segments": 2.0}, "segments must be an integer"),
        ({"segments": 2**31}, "segments must be an integer"),
        ({"burn_in": -1}, "burn_in must be an integer from 0 to .*got -1"),
    ],
)
def test_wrong_numbers(wrong, match):
    with pytest.raises(ValueError, match=match), pararnn.using(**wrong):
        pass


def test_contexts_nest_part_by_part(newton_fused):
    cell, gates = pararnn.GRUCell(4), torch.randn(1, 100, 3, 4)
    with torch.no_grad(), pararnn.using("newton", "fused", segments=4):
        pararnn.solve(cell, gates)
        with pararnn.using(burn_in=7):
            pararnn.solve(cell, gates)
            with pararnn.using(segments=9):
                pararnn.solve(cell, gates)
    pararnn.solve(cell, gates, **HOW)
    splits = [(4, None), (4, 7), (9, 7), (None, None)]
    assert newton_fused.requests == [("forward", *split) for split in splits]


def test_a_backward_pass_outside_of_the_context_keeps_the_split(newton_fused):
    layer, x = pararnn.ParaGRU(4, 6, **HOW), torch.randn(2, 50, 4)
    with pararnn.using(segments=5, burn_in=3):
        output, _ = layer(x)
    with pararnn.using(segments=2):
        output.sum().backward()
    assert newton_fused.requests == [("forward", 5, 3), ("backward", 5, 3)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.thorough
def test_compiled_code_follows_the_context(newton_fused, dynamic):
    layer, x = pararnn.ParaGRU(4, 6, **HOW), torch.randn(2, 50, 4, requires_grad=True)
    program = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    splits = [(8, None), (16, 0), (None, None), (32, 5), (8, None)]
    for segments, burn_in in splits:
        with pararnn.using(segments=segments, burn_in=burn_in):
            output, _ = program(x)
        output.sum().backward()
    both = [(which, *split) for split in splits for which in ("forward", "backward")]
    assert newton_fused.requests == both


def test_exported_programs_keep_the_split(newton_fused):
    layer, x = pararnn.ParaGRU(4, 6, **HOW), torch.randn(2, 50, 4)
    with pararnn.using(segments=5):
        program = torch.export.export(layer, (x,))
    newton_fused.requests.clear()
    program.module()(x)
    assert newton_fused.requests == [("forward", 5, None)]


def test_recomputed_gates_keep_the_split(newton_fused):
    layer = pararnn.ParaGRU(4, 6, recompute_gates=True, **HOW)
    with pararnn.using(segments=5):
        output, _ = layer(torch.randn(2, 50, 4))
    output.sum().backward()
    assert newton_fused.requests == [("forward", 5, None), ("backward", 5, None)]


def test_scan_follows_the_context(newton_fused):
    with torch.no_grad(), pararnn.using(segments=3):
        pararnn.scan(torch.rand(1, 90, 4), torch.randn(1, 90, 4), **HOW)
    assert newton_fused.requests == [("forward", 3, None)]


def test_explain_shows_the_split_that_runs(newton_fused):
    layer = pararnn.ParaGRU(4, 6)
    assert pararnn.explain(layer, (2, 1024, 4), solver="sequential").split is None
    by_rule = pararnn.explain(layer, (2, 1024, 4), **HOW)
    assert by_rule.split == Split(32, 32, 48)
    assert "segments 32, steps of each 32, burn-in 48" in str(by_rule)
    with pararnn.using(segments=2000, burn_in=1):
        assert pararnn.explain(layer, (2, 1024, 4), **HOW).split == Split(256, 4, 4)
