"""Cells replayed step by step from their affine forms, forward and backward."""

import torch

from pararnn.program.affine import EntryStates, advance, solve_step
from pararnn.program.derive import gradients
from pararnn.program.pullback import evaluate


def _steps(cell, gates):
    """Inputs of each step, but for states, by kind and number; all have dimensions (B, H)."""
    params = {("param", i): x.expand(len(gates), *x.shape) for i, x in enumerate(cell.parameters())}
    rows = [cell.head_sizes.split(gates[:, t]) for t in range(gates.shape[1])]
    return [{("gate", i): x for i, x in enumerate(row)} | params for row in rows]


def replay(cell, form, gates, initial):
    """Outputs (B, T, H, V), and the states before each step and after the last."""
    states, outputs = [[*initial]], []
    for inputs in _steps(cell, gates):
        new, (output,) = advance(form, inputs | _numbered("state", states[-1]))
        states.append(new)
        outputs.append(output.expand(len(gates), *cell.head_sizes.output))
    return torch.stack(outputs, 1), states


def _numbered(kind, tensors):
    return {(kind, i): x for i, x in enumerate(tensors)}


@torch.no_grad()
def pull_back(cell, form, gates, initial, grad_output, grad_final):
    """Gradients of gates, initial states and parameters, by the form's backward statements."""
    states = replay(cell, form, gates, initial)[1]
    grad_states, grad_params, grad_gates = [*grad_final], [0.0] * len([*cell.parameters()]), []
    for t, inputs in reversed([*enumerate(_steps(cell, gates))]):
        names = (
            [key for key in inputs if key[0] == "gate"],
            [key for key in inputs if key[0] == "param"],
        )
        inputs |= _numbered("state", states[t])
        grads = _pull_step(form, inputs, states[t + 1], grad_output[:, t], grad_states)
        grad_states = [grads["state", i] for i in range(len(grad_states))]
        grad_gates.insert(
            0,
            torch.cat(
                [
                    grads[key].flatten(2) if grads[key].ndim > 2 else grads[key][..., None]
                    for key in names[0]
                ],
                -1,
            ),
        )
        grad_params = [a + grads[key].sum(0) for a, key in zip(grad_params, names[1], strict=True)]
    return [torch.stack(grad_gates, 1), *grad_states, *grad_params]


def _pull_step(form, inputs, new_states, grad_output, grad_new):
    """Gradients of a step's inputs by kind and number."""
    grads = {key: torch.zeros_like(x) for key, x in inputs.items()}
    grads |= _numbered("new_state", grad_new)
    pulls = [component for component in form.components if isinstance(component, EntryStates)]
    inputs = inputs | {("new_state", i): new_states[i] for entry in pulls for i in entry.states}

    def pull(statements, kind, incoming):
        cotangents = {(f"grad_{kind}", i): x for i, x in incoming.items()}
        for target, x in evaluate(statements, inputs | cotangents):
            key = target.kind.removeprefix("grad_"), target.number
            grads[key] = grads[key] + x

    slots = [x for _, x in evaluate(form.gates, inputs)]
    solved = {}
    for number, component in enumerate(form.components):
        if component not in pulls:
            with torch.enable_grad():
                old = [inputs["state", i] for i in component.states]
                leaves = [x.clone().requires_grad_() for x in [*slots, *old]]
                results = solve_step(component, leaves[: len(slots)], leaves[len(slots) :])
            solved[number] = leaves, results
    for k, answer in enumerate(form.answers):
        inputs["answer", k] = solved[answer.component][1][1][answer.index].detach()
        grads["answer", k] = torch.zeros_like(inputs["answer", k])
    pull(form.readout_backward, "output", {0: grad_output})
    grad_slots = [torch.zeros_like(x) for x in slots]
    for number, (leaves, (new, answers)) in solved.items():
        states = form.components[number].states
        wanted = [grads["new_state", i] for i in states]
        wanted += [grads["answer", k] for k, a in enumerate(form.answers) if a.component == number]
        with torch.enable_grad():
            found = gradients([*new, *answers], leaves, wanted)
        grad_slots = [a + b for a, b in zip(grad_slots, found, strict=False)]
        for i, x in zip(states, found[len(slots) :], strict=True):
            grads["state", i] = x
    pull(form.gates_backward, "form", dict(enumerate(grad_slots)))
    for entry in pulls:
        written = {t.number: torch.as_tensor(x) for t, x in evaluate(entry.gates, inputs)}
        with torch.enable_grad():
            old = [inputs["state", i].clone().requires_grad_() for i in entry.states]
            leaves = [x.clone().requires_grad_() for x in written.values()]
            given = _numbered("entry", leaves) | {
                ("state", i): x for i, x in zip(entry.states, old, strict=True)
            }
            new = {t.number: torch.as_tensor(x) for t, x in evaluate(entry.advance, given)}
            pairs = zip(entry.states, old, strict=True)
            results = [new[i].expand_as(x) for i, x in pairs]
            wanted = [grads["new_state", i] for i in entry.states]
            found = gradients(results, [*leaves, *old], wanted)
        for i, x in zip(entry.states, found[len(leaves) :], strict=True):
            grads["state", i] = grads["state", i] + x
        pull(entry.gates_backward, "entry", dict(zip(written, found, strict=False)))
    return grads
