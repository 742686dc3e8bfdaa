"""What a call returns: as a tuple, and with its gradients."""

import torch
from torch.utils._pytree import tree_leaves


def as_tuple(states):
    """The states of a call, which gives one as it is."""
    return states if isinstance(states, tuple) else (states,)


def with_gradients(results, leaves, **options):
    """Nested results in one list, and their gradients by leaves, for arriving ones that are the
    same at every call. options: of autograd.grad."""
    results = tree_leaves(results)
    generator, dtype = torch.Generator().manual_seed(1), torch.float64
    arriving = [torch.randn(x.shape, generator=generator, dtype=dtype).to(x) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, arriving, **options)]
