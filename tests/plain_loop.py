"""The plain loop of matrix cells: one head of one row, one step after the other, in float64."""

import itertools
import math

import torch


def run_plainly(
    step, cell, gates, initial, params, memory=None, *, reverse=False, reset=None, starts=None,
    cu_seqlens=None,
):  # fmt: skip
    """(B, T, H, V) outputs and the final states.

    step: (states, gates, parameters) and memories of one head by name -> new states and output.
    params, memory: by name, of all heads; a memory may be one for them. reset: bool (B, T), steps
    that start from zero, or from `starts`, which are used up in order.
    """
    cls, sizes, gates = type(cell), cell.head_sizes, gates.double()
    rows, steps, heads, _ = gates.shape
    pieces = [(row, range(steps)) for row in range(rows)]
    if cu_seqlens is not None:
        pieces = [(0, range(*ends)) for ends in itertools.pairwise(cu_seqlens)]
    counts, outputs, finals = [math.prod(size) for size in sizes.gates], {}, []

    def states_at(tensors, *index):
        return {key: x[index].double() for key, x in zip(cls.states, tensors, strict=True)}

    for (number, (row, times)), head in itertools.product(enumerate(pieces), range(heads)):
        own = [{key: x[head].double() for key, x in params.items()}]
        if memory is not None:
            place, pairs = (number, head), zip(memory.items(), sizes.memory, strict=True)
            own.append({k: m[place[: m.ndim - len(size)]].double() for (k, m), size in pairs})
        state = states_at(initial, number, head)
        for t in reversed(times) if reverse else times:
            if reset is not None and reset[row, t]:
                begun = int(reset.flatten()[: row * steps + t].sum())
                zeros = {key: torch.zeros_like(x) for key, x in state.items()}
                state = zeros if starts is None else states_at(starts, begun, head)
            flat = gates[row, t, head].split(counts)
            pairs = zip(cls.gates, flat, sizes.gates, strict=True)
            gate = {key: x.reshape(size) for key, x, size in pairs}
            state, outputs[row, t, head] = step(state, gate, *own)
        finals.append(state)
    none = gates.new_zeros(sizes.output[1])
    places = itertools.product(range(rows), range(steps), range(heads))
    every = [outputs.get(place, none) for place in places]
    output = torch.stack(every) if every else gates[..., : sizes.output[1]]
    ends = [torch.stack([f[key] for f in finals]).unflatten(0, (-1, heads)) for key in cls.states]
    return output.reshape(rows, steps, *sizes.output), tuple(ends)
