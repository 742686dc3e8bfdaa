"""Cells whose step reads something that changes, and layers of them."""

import functools
import sys
import types

import torch

import pararnn

LEAK = 0.9
TABLE = {"leak": 0.9}
STEPS: list[float] = [0.9]
settings = types.ModuleType("settings")
sys.modules["settings"] = settings
settings.leak = 0.9


class Holder:
    leak = 0.9


def helper(h):
    return LEAK * h


def keyword(h, leak=0.9):
    return leak * h


@functools.wraps(keyword)
def wrap(*args):
    return keyword(*args)


class Base(pararnn.Cell):
    states = ("h",)
    gates = ("x",)
    leak = 0.9

    def leak_state(self, state):
        return self.leak * state.h

    def step(self, state, gate, param):
        return self.finish(self.leak_state(state) + gate.x)

    @staticmethod
    def finish(h):
        return torch.tanh(h)


class Attribute(Base):
    pass


class OfSuper(Base):
    def leak_state(self, state):
        return super().leak_state(state)


class ByName(Base):
    def leak_state(self, state):
        return getattr(self, "leak") * state.h  # noqa: B009


class Global(Base):
    def leak_state(self, state):
        return LEAK * state.h


class Helper(Base):
    def leak_state(self, state):
        return helper(state.h)


class Lambda(Base):
    def leak_state(self, state):
        return (lambda h: next(helper(x) for x in (h,)))(state.h)


class Keyword(Base):
    def leak_state(self, state):
        return wrap(state.h)


class Partial(Base):
    leaked_by = staticmethod(functools.partial(helper))

    def leak_state(self, state):
        return self.leaked_by(state.h)


class Property(Base):
    @property
    def rate(self):
        return LEAK

    def leak_state(self, state):
        return self.rate * state.h


class Table(Base):
    def leak_state(self, state):
        return TABLE["leak"] * state.h


class List(Base):
    def leak_state(self, state):
        return STEPS[0] * state.h


class Module(Base):
    def leak_state(self, state):
        return settings.leak * state.h


class Imported(Base):
    def leak_state(self, state):
        from settings import leak

        return leak * state.h


class OfClass(Base):
    def leak_state(self, state):
        return Holder.leak * state.h


HERE = sys.modules[__name__]


def put(owner, name, value):
    return lambda: setattr(owner, name, value)


def put_code(function):
    def change():
        HERE.helper.__code__ = function.__code__

    return change


def restore(cls):
    """Put everything back as it was."""
    HERE.LEAK, HERE.TABLE, HERE.STEPS[:] = 0.9, {"leak": 0.9}, [0.9]
    HERE.settings.leak = Holder.leak = Base.leak = 0.9
    for name in ("leak", "leak_state", "finish"):
        if cls is not Base and name in vars(cls) and name not in ORIGINAL[cls]:
            delattr(cls, name)
    HERE.helper = HELPER
    HELPER.__code__ = HELPER_CODE
    keyword.__defaults__ = (0.9,)


HELPER, HELPER_CODE = helper, helper.__code__
CHANGES = {
    "a class attribute": (Attribute, put(Attribute, "leak", 0.1)),
    "an inherited attribute": (Attribute, put(Base, "leak", 0.1)),
    "an attribute of super": (OfSuper, put(Base, "leak", 0.1)),
    "an attribute by getattr": (ByName, put(ByName, "leak", 0.1)),
    "a method": (Attribute, put(Attribute, "leak_state", lambda self, state: 0.1 * state.h)),
    "a global": (Global, put(HERE, "LEAK", 0.1)),
    "a helper's global": (Helper, put(HERE, "LEAK", 0.1)),
    "a helper": (Helper, put(HERE, "helper", lambda h: 0.1 * h)),
    "a helper's code": (Helper, put_code(lambda h: 0.1 * h)),
    "a helper in a lambda": (Lambda, put(HERE, "LEAK", 0.1)),
    "a default": (Keyword, put(keyword, "__defaults__", (0.1,))),
    "a partial's global": (Partial, put(HERE, "LEAK", 0.1)),
    "a property's global": (Property, put(HERE, "LEAK", 0.1)),
    "a dictionary": (Table, put(HERE, "TABLE", {"leak": 0.1})),
    "an entry of a dictionary": (Table, lambda: TABLE.update(leak=0.1)),
    "an entry of a list": (List, lambda: STEPS.__setitem__(0, 0.1)),
    "a module's attribute": (Module, put(settings, "leak", 0.1)),
    "an import in the step": (Imported, put(settings, "leak", 0.1)),
    "an attribute of another class": (OfClass, put(Holder, "leak", 0.1)),
}
ORIGINAL = {cls: set(vars(cls)) for cls, _ in CHANGES.values()}
X = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(0))


class Expected(pararnn.Cell):
    states = ("h",)
    gates = ("x",)
    config = {"leak": 0.9}

    def step(self, state, gate, param):
        return torch.tanh(self.leak * state.h + gate.x)


def layer_of(cls, pair=("newton", "torch"), **config):
    torch.manual_seed(0)
    return pararnn.ParaRNN(cls, 3, 4, solver=pair[0], backend=pair[1], **config)


def results(layer):
    """Output, gradients and one step of decoding."""
    output, _ = layer(X)
    grads = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    start = torch.full((1, 2, 4), 0.5)
    return [output.detach(), *grads, layer.step(X[:, 0], start)[0].detach()]


def agree(got, reference):
    for one, other in zip(got, reference, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@functools.cache
def states_by_leak(leak):
    """Return the results of a layer whose leak is config."""
    return results(layer_of(Expected, leak=leak))


def with_structure(cls, structure):
    """The class, of another structure."""
    return type(cls.__name__, (cls,), {"structure": structure, "__module__": __name__})
