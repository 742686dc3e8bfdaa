"""Ways to keep a number that a step reads: each is followed, or refused by name."""

import sys
import types

import pytest
import torch

import pararnn
from pararnn.program.loads import Load, is_library, kind_of, loads
from pararnn.program.program import make_program
from pararnn.program.reads import reads_mode, reads_of
from pararnn.program.structure import STRUCTURES

SOURCE = """
import collections, contextvars, ctypes, dataclasses, decimal, enum, functools, math, numbers, os
import multiprocessing, operator, random, time, types, typing, weakref
import numpy, numpy as np, torch, torch.nn.functional as F
import pararnn
{before}
class Own(pararnn.Cell):
    states, gates = ("h",), ("x",)
    {body}
    def step(self, state, gate, param):
        return {value} * state.h + gate.x
"""


def make_class(preamble, value, body="unread = ()"):
    """The class `Own`, and the module that it is in."""
    module = types.ModuleType("own_reads")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(SOURCE.format(before=preamble, value=value, body=body), vars(module))
    return module.Own, module


def reads(cls):
    return reads_of(cls, STRUCTURES, "")


FOLLOWED = {
    "a global": ("LEAK = 0.9", "LEAK", "LEAK = 0.1"),
    "a name that was built in": ("", "abs(-1)", "abs = float"),
    "an entry of a list": ("LEAKS = [0.9]", "LEAKS[0]", "LEAKS[0] = 0.1"),
    "an entry of a dictionary": ("LEAKS = {'a': [0.9]}", "LEAKS['a'][0]", "LEAKS['a'][0] = 0.1"),
    "a set": ("LEAKS = {0.9}", "max(LEAKS)", "LEAKS.add(2.0)"),
    "a tuple": ("LEAKS = (0.9, (1, 'a'))", "LEAKS[0]", "LEAKS = (0.1,)"),
    "a named tuple": (
        "Leaks = collections.namedtuple('Leaks', 'a')\nLEAKS = Leaks(0.9)",
        "LEAKS.a",
        "LEAKS = Leaks(0.1)",
    ),
    "an enumeration": (
        "class Mode(enum.Enum):\n    HARD = 1\n    SOFT = 2\nMODE = Mode.HARD",
        "(MODE is Mode.HARD)",
        "MODE = Mode.SOFT",
    ),
    "the value of a member": (
        "class Mode(enum.Enum):\n    HARD = 1",
        "Mode.HARD.value",
        "Mode.HARD._value_ = 2",
    ),
    "a number of NumPy's": ("LEAK = np.float64(0.9)", "LEAK", "LEAK = np.float64(0.1)"),
    "an attribute of a class": ("class A:\n    leak = 0.9", "A.leak", "A.leak = 0.1"),
    "an attribute of a class that is passed on": (
        "class A:\n    leak = 0.9\ndef read(a):\n    return a.leak",
        "read(A)",
        "A.leak = 0.1",
    ),
    "an attribute of a function": (
        "def helper():\n    return helper.leak\nhelper.leak = 0.9",
        "helper()",
        "helper.leak = 0.1",
    ),
    "an attribute of a module": (
        "other = types.ModuleType('other')\nother.leak = 0.9",
        "other.leak",
        "other.leak = 0.1",
    ),
    "an attribute of a module in a module": (
        "other = types.ModuleType('other')\nother.inner = types.ModuleType('inner')\n"
        "other.inner.leak = 0.9\nother.leak = object()",
        "other.inner.leak",
        "other.inner.leak = 0.1",
    ),
    "an attribute by a name that is computed": (
        "other = types.ModuleType('other')\nother.leak = 0.9",
        "getattr(other, 'le' + 'ak')",
        "other.leak = 0.1",
    ),
    "a default in a dictionary": (
        "def helper(*, leak=0.9):\n    return leak",
        "helper()",
        "helper.__kwdefaults__['leak'] = 0.1",
    ),
    "a keyword of a partial": (
        "helper = functools.partial(lambda leak: leak, leak=0.9)",
        "helper()",
        "helper.keywords['leak'] = 0.1",
    ),
    "what an instance made in the step reads": (
        "LEAK = 0.9\nclass A:\n    def __init__(self):\n        self.leak = LEAK",
        "A().leak",
        "LEAK = 0.1",
    ),
    "an instance of a dataclass": (
        "@dataclasses.dataclass\nclass A:\n    h: float = 0.9\n    def leak(self):\n"
        "        return RATE * self.h\nRATE = 1.0",
        "A().leak()",
        "RATE = 0.1",
    ),
    "an operator of a class": (
        "LEAK = 0.9\nclass A:\n    def __call__(self, h):\n        return LEAK * h",
        "A()(state.h)",
        "LEAK = 0.1",
    ),
    "a flag of PyTorch's": (
        "",
        "(0.9 + torch.backends.cudnn.benchmark)",
        "torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark",
    ),
    "a number that is cast": (
        "LEAK = 0.9",
        "typing.cast(typing.Optional[float], typing.cast('float', LEAK))",
        "LEAK = 0.1",
    ),
    "a function with a backward": (
        "LEAK = 0.9\nclass A(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, h):\n        return h\n    @staticmethod\n"
        "    def backward(ctx, g):\n        return LEAK * g",
        "A.apply(state.h)",
        "LEAK = 0.1",
    ),
}


@pytest.mark.parametrize("what", FOLLOWED)
def test_what_may_change_in_sight_is_followed(what):
    preamble, value, change = FOLLOWED[what]
    cls, module = make_class(preamble, value)
    step_reads = reads(cls)
    assert step_reads.change() is None
    flags = torch.backends.cudnn.benchmark
    try:
        exec(change, vars(module))
        assert step_reads.change() is not None
    finally:
        torch.backends.cudnn.benchmark = flags


HIDDEN = {
    "an object": ("class A:\n    pass\na = A()\na.leak = 0.9", "a.leak", "a, an A,"),
    "an object with slots": (
        "class A:\n    __slots__ = ('leak',)\na = A()\na.leak = 0.9",
        "a.leak",
        "a, an A,",
    ),
    "a data class": (
        "@dataclasses.dataclass\nclass A:\n    leak: float\na = A(0.9)",
        "a.leak",
        "a",
    ),
    "a callable": ("class A:\n    def __call__(self): return 0.9\na = A()", "a()", "a, an A,"),
    "a bound method": (
        "class A:\n    def leak(self): return 0.9\nleak = A().leak",
        "leak()",
        "leak",
    ),
    "a proxy": (
        "class P:\n    __class__ = property(lambda self: float)\n"
        "    def __float__(self): return 0.9\np = P()",
        "float(p)",
        "p, a P,",
    ),
    "a namespace": ("a = types.SimpleNamespace(leak=0.9)", "a.leak", "a SimpleNamespace"),
    "a UserDict": ("a = collections.UserDict(leak=0.9)", "a['leak']", "UserDict"),
    "a UserList": ("a = collections.UserList([0.9])", "a[0]", "UserList"),
    "a ChainMap": ("a = collections.ChainMap({'leak': 0.9})", "a['leak']", "a ChainMap"),
    "a defaultdict": ("a = collections.defaultdict(float)", "a['leak']", "a defaultdict"),
    "a deque": ("a = collections.deque([0.9])", "a[0]", "a deque"),
    "a read-only view": (
        "a = types.MappingProxyType({'leak': 0.9})",
        "a['leak']",
        "a mappingproxy",
    ),
    "a context variable": (
        "a = contextvars.ContextVar('a', default=0.9)",
        "a.get()",
        "a ContextVar",
    ),
    "a shared value": ("a = multiprocessing.Value('d', 0.9)", "a.value", "a"),
    "a C value": ("a = ctypes.c_double(0.9)", "a.value", "a c_double"),
    "bytes that change": ("a = bytearray(b'1')", "a[0]", "a bytearray"),
    "an array": ("a = np.array(0.9)", "float(a)", "ndarray"),
    "a tensor": ("a = torch.tensor(0.9)", "a", "a Tensor"),
    "a tensor that learns": ("a = torch.tensor(0.9, requires_grad=True)", "a", "a Tensor"),
    "a parameter": ("a = torch.nn.Parameter(torch.ones(()))", "a", "a Parameter"),
    "a module of PyTorch's": ("a = torch.nn.Tanh()", "a(state.h)", "a function of torch.nn"),
    "a tensor in a tuple": ("a = (torch.tensor(0.9),)", "a[0]", "an entry of a, a Tensor"),
    "a tensor in a closure": (
        "def maker(leak):\n    return lambda: leak\na = maker(torch.ones(()))",
        "a()",
        "a Tensor",
    ),
    "a tensor as a default": ("def a(leak=torch.ones(())):\n    return leak", "a()", "a Tensor"),
    "a decimal": ("a = decimal.Decimal(1)", "float(a)", "a Decimal"),
    "a kind of float": ("class A(float):\n    pass\na = A(0.9)", "a", "a, an A,"),
    "a kind of tuple": ("class A(tuple):\n    pass\na = A((0.9,))", "a[0]", "a, an A,"),
    "a kind of list": ("class A(list):\n    pass\na = A((0.9,))", "a[0]", "a, an A,"),
    "a weak reference": ("class A:\n    pass\na = weakref.ref(A)", "a()", "a"),
    "an iterator": ("a = iter([0.9])", "next(a)", "a list_iterator"),
    "a cached function": ("@functools.lru_cache\ndef a():\n    return 0.9", "a()", "a"),
    "a metaclass": (
        "class M(type):\n    leak = property(lambda cls: 0.9)\nclass A(metaclass=M):\n    pass",
        "A.leak",
        "A, a M,",
    ),
    "a module's __getattr__": (
        "other = types.ModuleType('other')\nother.__getattr__ = lambda name: 0.9",
        "other.leak",
        "by the module's __getattr__",
    ),
    "the environment": ("", "float(os.environ.get('LEAK', 1))", "os.environ"),
    "the environment by a function": ("", "float(os.getenv('LEAK', 1))", "calls os.getenv"),
    "the clock": ("", "time.time()", "calls time.time"),
    "a file": ("", "float(open('leak').read())", "calls _?io.open"),
    "random numbers": ("", "random.random()", "calls random.random"),
    "random numbers of NumPy's": ("", "numpy.random.rand()", "numpy.random.rand"),
    "globals()": ("LEAK = 0.9", "globals()['LEAK']", "reads globals"),
    "a dictionary of a module": ("import math", "math.__dict__['pi']", "reads __dict__"),
    "globals of a function": ("LEAK = 0.9", "made.__globals__['LEAK']\nmade = len", "__globals__"),
    "what PyTorch is set to": (
        "",
        "(0.9 + torch.is_grad_enabled())",
        "calls torch.is_grad_enabled",
    ),
    "the default dtype": ("", "(torch.get_default_dtype() is None)", "torch.get_default_dtype"),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_what_may_change_unseen_is_refused(what):
    preamble, value, message = HIDDEN[what]
    value, _, rest_of_body = value.partition("\n")
    cls, _ = make_class(f"{preamble}\n{rest_of_body}", value)
    with pytest.raises(pararnn.CellError, match=rf"Own\.step .*{message}"):
        make_program(cls, {})


OF_SELF = ("parameters()", "_parameters", "state_dict()", "config['dt']", "params", "has_readout")


@pytest.mark.parametrize("what", OF_SELF)
def test_a_step_has_nothing_of_a_module_but_its_mode(what):
    cls, _ = make_class("", f"self.{what}")
    with pytest.raises(pararnn.CellError, match=r"Own\.step reads self\.\w+, which it may not"):
        make_program(cls, {})
    body = f"def readout(self, state, gate, param):\n        return [self.{what}]"
    cls, _ = make_class("", "1.0", body)
    with pytest.raises(pararnn.CellError, match=r"Own\.readout reads self\.\w+, which it may not"):
        make_program(cls, {})


@pytest.mark.parametrize(
    ("value", "body"),
    [
        ("1.0", "leak = 0.9"),
        ("(2.0 if self.training else 1.0)", "leak = 0.9"),
        ("self.leak", "leak = property(lambda self: 2.0 if self.training else 1.0)"),
        ("1.0", "def readout(self, state, gate, param):\n        return [self.training]"),
        ("getattr(self, 'train' + 'ing')", "leak = 0.9"),
    ],
)
def test_whether_a_mode_is_read(value, body):
    cls, _ = make_class("", value, body)
    assert reads_mode(cls, reads(cls)) == ((value, body) != ("1.0", "leak = 0.9"))


def test_names_of_other_owners_refuse_nothing():
    """A name read off one module is not looked up in others."""
    cls, module = make_class("import math", "math.pi * helper(state.h)")
    module.helper = lambda h: h.mean()
    module.h = module.mean = object()
    assert reads(cls).change() is None


KINDS = {
    "global": "LOAD_GLOBAL LOAD_NAME LOAD_FROM_DICT_OR_GLOBALS",
    "closure": "LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT_OR_DEREF",
    "local": "LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST STORE_FAST_LOAD_FAST",
    "attribute": "LOAD_ATTR LOAD_METHOD LOAD_SUPER_ATTR IMPORT_FROM",
    "import": "IMPORT_NAME",
    None: "LOAD_CONST STORE_FAST CALL BINARY_OP",
}


@pytest.mark.parametrize("kind", KINDS)
def test_instructions_of_all_versions_of_python_are_known(kind):
    assert {kind_of(name) for name in KINDS[kind].split()} == {kind}


def test_what_is_loaded():
    def outer(a):
        return lambda: sys.modules.values + a.b.c + getattr(a, "d") + getattr(a, a.e)  # noqa: B009

    all_loads = list(loads(outer.__code__.co_consts[1]))
    for load in (
        Load("global", "sys", ("modules", "values")),
        Load("closure", "a", ("b", "c")),
        Load("text", "d"),
        Load("closure", "a", ("e",)),
    ):
        assert load in all_loads
    assert sum(load == Load("attribute", "getattr") for load in all_loads) == 1


def test_packages_of_the_base_environment_and_the_users_are_installed(monkeypatch, tmp_path):
    """A virtual environment may see those of the Python that made it, where PyTorch may be too."""
    folders = {name: tmp_path / name for name in ("base", "user", "own")}
    monkeypatch.setattr("site.getsitepackages", lambda: [str(folders["base"])])
    monkeypatch.setattr("site.getusersitepackages", lambda: str(folders["user"]))
    for name, folder in folders.items():
        module = types.ModuleType(f"module_in_{name}")
        module.__file__ = str(folder / "module.py")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("sysconfig.get_path", lambda kind: str(tmp_path / "elsewhere"))
    is_library.cache_clear()
    assert [is_library(f"module_in_{name}") for name in folders] == [True, True, False]
    assert is_library("torch")
    is_library.cache_clear()
