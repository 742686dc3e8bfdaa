"""The Cell contract: one time step in PyTorch, its states, gates, fields and parameters named."""

from __future__ import annotations

import inspect
import keyword
import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn

from pararnn.base.errors import CellError
from pararnn.base.parameters import Draw, draw_parameters
from pararnn.cells.constants import immutable
from pararnn.cells.matrix import (
    VALUES,
    ChannelSizes,
    HeadAxes,
    HeadSizes,
    Sizes,
    axes_of_class,
    sizes_of,
)
from pararnn.cells.products import Matrix, Product, product, recorded_product
from pararnn.cells.shapes import SHAPES, ParamShape, shape_of_axes

LAYER_ARGUMENTS = frozenset(
    {"cell_class", "input_size", "hidden_size", "num_layers", "num_heads", "bias", "batch_first"}
    | {"dropout", "bidirectional", "proj_size", "reverse", "device", "dtype", "solver", "backend"}
    | {"mode", "on_failure", "recurrent_clip", "recompute_gates", "projection_gain"}
    | {"recurrent_std", "keep_dtype"}
)
"""Arguments of layers and cells: no config can have such a name."""

OPTIONAL_METHODS = ("jacobian", "readout")
"""Methods that a cell may define in addition to its step."""


@dataclass(frozen=True)
class Param:
    """A parameter of a cell.

    `shape` is "D" (per channel), "H" (per head), "" (a scalar), "H,K,K" (a matrix for each head of
    K = D / H channels, by which a step multiplies: `state.h @ param.R`), "D,D" (one matrix for all
    channels) or a `ParamShape` of `pararnn.cells.shapes`. Cells whose states are matrices of heads
    take "", "H" and axes of each head, such as "H,V,V". It is drawn from a Gaussian of standard
    deviation `std` around `mean`; `std=None` is 1/sqrt(D), the paper's Appendix C, and 1/sqrt(K)
    for matrices of heads. `recurrent` parameters are the ones that `clip_after_step` clamps.
    `trainable=False` makes a buffer.
    """

    shape: str | ParamShape = "D"
    std: float | None = None
    mean: float = 0.0
    recurrent: bool = True
    trainable: bool = True
    kind: ParamShape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind: ParamShape | None = self.shape  # type: ignore[assignment]
        if isinstance(self.shape, str):
            kind = SHAPES.get(self.shape) or shape_of_axes(self.shape)
        if not isinstance(kind, ParamShape):
            raise CellError(
                f"Param shape must be one of {tuple(SHAPES)}, axes of heads such as 'H,K,V' or a "
                f"ParamShape, got {self.shape!r}"
            )
        object.__setattr__(self, "kind", kind)

    def size(self, channels: int, heads: int) -> tuple[int, ...]:
        """Return the tensor's size for D channels in H heads."""
        return self.kind.size(channels, heads)


class Cell(nn.Module):
    """A recurrence: subclass it, name its parts and write `step` for one time step.

    Class attributes:
        states: names of the states; the first is the layer's output, unless there is a readout.
        gates: names of the pre-activations, projected from the input by the layer.
        fields: names of per-step inputs that are not projected (time gaps, masks).
        outputs: axes of the tensors that a matrix cell's readout returns, by name, where they are
            others than one vector; see below.
        params: `Param` by name.
        config: default of each constant by name (JSON values), read as `self.<name>` in the step.
        memory: of a matrix cell, axes of the tensors of a sequence that all its steps read.
        structure: None to infer the Jacobian's structure, or "diagonal", "block_diagonal",
            "dense", "sequential" or a registered name, which is checked against the step.

    The constructor takes the number of channels D, the number of heads H (of per-head parameters;
    D must be a multiple), device, dtype and config values. Raises CellError for malformed classes
    and values; the step itself is checked when a layer or `solve` first takes the cell.

    Of `self`, a step may read config, class attributes and methods: parameters arrive as `param`.
    What else it reads is frozen when it is traced, and traced again when it has changed: see
    `pararnn.program.reads`. It must broadcast over leading dimensions. A method
    `jacobian(self, state, gate, param)` may override the derived Jacobian: it returns the
    structure's entries (a tensor for one state, N rows of N tensors for N states, a registered
    structure's representation) and is checked against the derived one.

    A method `readout(self, state, gate, param)` makes a layer's output of the step's new states,
    and of the gates, fields and parameters that the step got: one tensor like a state, of plain
    PyTorch over leading dimensions (B, T). It is no part of the recurrence: `solve` returns states.

    Matrix cells: where `states` and `gates` are dicts of axes ("" a number, "K" a vector,
    ("K", "V") a matrix), each head has tensors of these axes. The axis V is D / H long, the others
    are arguments of the constructor by name, D / H long by default. A step is PyTorch on
    (..., K, V), with leading dimensions (B, H), and so is the readout, (..., V), which `solve` then
    returns in place of the states. Such a cell has a readout unless its first state is ("V",).
    Where `outputs` names tensors, the readout returns a tuple of them, a head's output has their
    numbers next to each other, and V is how many these are: `head_sizes.split_output` takes them
    apart.
    `memory = {"keys": ("S", "K")}` declares what a caller passes for each sequence; step and
    readout get it as one more argument: step(self, state, gate, param, memory). Axes that only
    memories have are as long as the tensors of a call.
    """

    states: ClassVar[Sequence[str] | Mapping[str, str | tuple[str, ...]]] = ()
    gates: ClassVar[Sequence[str] | Mapping[str, str | tuple[str, ...]]] = ()
    fields: ClassVar[Sequence[str]] = ()
    outputs: ClassVar[Mapping[str, str | tuple[str, ...]]] = {}
    params: ClassVar[Mapping[str, Param]] = {}
    config: ClassVar[Mapping[str, Any]] = {}
    memory: ClassVar[Mapping[str, str | tuple[str, ...]]] = {}
    structure: ClassVar[str | None] = None
    is_derivative: ClassVar[bool] = False
    """True for a step that differentiates another: it makes autograd's zeros."""
    head_axes: ClassVar[HeadAxes | None] = None
    """Axes of the states and gates of a matrix cell, which `states` and `gates` declare."""

    hidden_size: int
    num_heads: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # For editors and `help`, from which `__new__` would hide it.
        cls.__signature__ = _signature_of(cls.__init__)  # type: ignore[attr-defined]
        for attr in ("states", "gates", "fields"):
            names = getattr(cls, attr)
            by_axes = isinstance(names, Mapping) and attr != "fields"
            if isinstance(names, str) or not (by_axes or isinstance(names, Sequence)):
                raise CellError(f"{cls.__name__}.{attr} must be a tuple of names, got {names!r}")
        _check_names(cls, "states", [*cls.states])
        _check_names(cls, "gates and fields", [*cls.gates, *cls.fields])
        for attr, entry in (("params", "Param"), ("config", "default"), ("memory", "axes")):
            entries = getattr(cls, attr)
            if not isinstance(entries, Mapping):
                raise CellError(
                    f"{cls.__name__}.{attr} must be a dict of each name's {entry}, got {entries!r}"
                )
        _check_names(cls, "params and config", [*cls.params, *cls.config])
        _check_names(cls, "memories", [*cls.memory])
        for name, param in cls.params.items():
            if not isinstance(param, Param):
                raise CellError(f"{cls.__name__}.params[{name!r}] must be a Param, got {param!r}")
        cls.head_axes = _axes_of(cls)
        if cls.head_axes is not None:
            bases = [base.head_axes for base in cls.__mro__[1:] if issubclass(base, Cell)]
            stale = {axis for axes in bases if axes is not None for axis in axes.arguments}
            stale -= {*cls.head_axes.arguments, *vars(cls).get("config", {})}
            config = {key: value for key, value in cls.config.items() if key not in stale}
            cls.config = {**dict.fromkeys(cls.head_axes.arguments), **config}
            _check_names(cls, "params and axes", [*cls.params, *cls.config])
            if VALUES in cls.config:
                raise CellError(
                    f"{cls.__name__}: config {VALUES!r} is the name of the axis of hidden_size / "
                    f"num_heads entries, which a step reads as self.{VALUES}; rename it"
                )
        if "forward" in vars(cls):
            raise CellError(
                f"{cls.__name__}.forward: a call of a cell gives its parameters, by which hooks on "
                "it run; give the method another name"
            )
        names = [*cls.params, *cls.config]
        module_names = (*nn.Module.__annotations__, *OPTIONAL_METHODS)
        reserved_names = [name for name in names if hasattr(Cell, name) or name in module_names]
        if reserved_names:
            raise CellError(
                f"{cls.__name__}: {reserved_names[0]!r} is a name of torch.nn.Module or Cell"
            )
        for name in cls.config:
            if name in LAYER_ARGUMENTS:
                raise CellError(
                    f"{cls.__name__}: config {name!r} could not be given to a layer, which has an "
                    "argument of that name; rename it"
                )

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a cell; of a class whose name is torch.nn's too, the module of torch.nn's where it
        is given an input size."""
        module = NAMESAKES.get(cls)
        has_input = len(args) > 1 or "input_size" in kwargs or (args and "hidden_size" in kwargs)
        return module(*args, **kwargs) if module and has_input else super().__new__(cls)

    def __init__(
        self,
        hidden_size: int,
        *positional: Any,
        num_heads: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        cls = type(self)
        of_layers = [f"{name}={config[name]!r}" for name in config if name in LAYER_ARGUMENTS]
        if positional or of_layers:
            got = ", ".join([*map(repr, (hidden_size, *positional)), *of_layers])
            raise TypeError(_NO_LAYER.format(cls.__name__, got) + _of_torch_nn(cls.__name__))
        if not cls.states or not cls.gates:
            raise CellError(f"{cls.__name__} must name at least one state and one gate")
        if hidden_size < 1 or num_heads < 1 or hidden_size % num_heads:
            raise CellError(
                f"hidden_size must be a positive multiple of num_heads, got {hidden_size} and "
                f"{num_heads}"
            )
        self.hidden_size, self.num_heads = hidden_size, num_heads
        values = resolve_config(cls, config)
        self.tensor_sizes = sizes_of_class(cls, values, (hidden_size, num_heads))
        numbers = self.tensor_sizes.output[-1] * num_heads
        if cls.outputs and numbers != hidden_size:
            raise CellError(
                f"hidden_size of {cls.__name__} must be the numbers of its outputs, "
                f"{numbers} with {self.tensor_sizes.lengths}, got {hidden_size}"
            )
        lengths = self.tensor_sizes.lengths.items()
        self.__dict__.update(values | {axis: n for axis, n in lengths if axis not in cls.params})
        for name, param in cls.params.items():
            size = self.tensor_sizes.param(param.kind)
            value = torch.empty(size, device=device, dtype=dtype)
            if param.trainable:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        self.reset_parameters()

    @property
    def head_sizes(self) -> HeadSizes | None:
        """Sizes of a matrix cell's heads, None for other cells."""
        return self.tensor_sizes if isinstance(self.tensor_sizes, HeadSizes) else None

    @property
    def keeps_states(self) -> bool:
        """True if solvers return the states of all steps; those of matrix cells are too large."""
        return self.tensor_sizes.keeps_states

    @property
    def num_gates(self) -> int:
        """G, the gates of `gate_channels` channels that a projection gives."""
        return self.tensor_sizes.projected[0]

    @property
    def gate_channels(self) -> int:
        """Channels of a gate that a projection gives."""
        return self.tensor_sizes.projected[1]

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the states of one sequence: (D,) each, of a matrix cell such as (H, K, V).
        ValueError where a memory decides them, see `state_sizes_in`."""
        return self.tensor_sizes.state_sizes

    def state_sizes_in(self, memory: Mapping[str, Any] | None) -> tuple[tuple[int, ...], ...]:
        """Return `state_sizes` in a call with these memories. ValueError where one is missing
        that decides a size."""
        sizes, given = self.head_sizes, memory if isinstance(memory, Mapping) else {}
        if sizes is None or not all(isinstance(given.get(name), Tensor) for name in self.memory):
            return self.state_sizes
        memories = [tuple(given[name].shape) for name in self.memory]
        return sizes.of_call(sizes.memory_lengths(memories)).state_sizes

    def draws(self, recurrent_std: float | None = None) -> dict[str, Draw]:
        """Return each parameter's distribution: its Param's Gaussian (paper, Appendix C: Xavier's).

        `recurrent_std` is that of Params with `std=None`. By default it is 1/sqrt(D): Xavier's
        Gaussian for a matrix D x D, sqrt(2 / (D + D)), of which a vector is the diagonal; for
        matrices of heads, which are K x K, 1/sqrt(K). The paper does not say how it reads Xavier
        for a vector. Of matrix cells it is 1/sqrt of a matrix's rows, a vector's entries, and V.
        """
        draws = {}
        for name, param in type(self).params.items():
            fan_in = self.tensor_sizes.fan_in(param.kind)
            usual = 1 / math.sqrt(fan_in) if recurrent_std is None else recurrent_std
            draws[name] = Draw("normal", param.mean, usual if param.std is None else param.std)
        return draws

    def reset_parameters(self, recurrent_std: float | None = None) -> None:
        """Draw every parameter from its distribution in `draws`."""
        draw_parameters(self, self.draws(recurrent_std))

    def step(self, state: Any, gate: Any, param: Any, *memory: Any) -> Tensor | tuple[Tensor, ...]:
        """One time step: previous state(s), gates and fields, parameters -> new state(s).

        A class that declares `memory` gets one more argument.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define step(self, state, gate, param)"
        )

    @property
    def itself(self) -> Cell:
        """This cell, also through a module that stands in its place: see `unwrap`."""
        return self

    @property
    def has_readout(self) -> bool:
        """True if the class has a `readout`, which computes a layer's output from the states."""
        return _has_readout(type(self))

    def config_values(self) -> dict[str, Any]:
        """Return the config that this cell was made with."""
        return {name: getattr(self, name) for name in type(self).config}

    def recurrent_parameters(self) -> Iterable[Tensor]:
        """Return the trainable recurrent parameters: those that clipping concerns."""
        for name, param in type(self).params.items():
            if param.recurrent and param.trainable:
                yield getattr(self, name)

    def lifted_params(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Return the parameters as a program takes them: scalars and per-head ones as (D,).

        In `dtype`; None leaves their own. Those of a matrix cell as they are.
        """
        sizes, params = self.tensor_sizes, []
        for name, param in type(self).params.items():
            value: Any = self._parameters.get(name)  # getattr takes a microsecond longer
            if value is None:
                value = getattr(self, name)
            if dtype is not None and value.dtype != dtype:
                value = value.to(dtype)
            params.append(sizes.lifted(param.kind, value))
        return tuple(params)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return `lifted_params()`: see `call_cell`. TypeError for arguments."""
        if args or kwargs:
            raise TypeError(
                f"{type(self).__name__} is called without arguments, for its parameters, got "
                f"{(*args, *kwargs)}: a forward pre-hook on a cell must return None, and a layer's "
                f"step(x, state) runs one time step{_of_torch_nn(type(self).__name__)}"
            )
        return self.lifted_params()

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script, of all modules that hold a cell: every layer does."""
        raise NotImplementedError(
            "torch.jit.script is not supported: use torch.compile or torch.export, or torch.onnx"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if _VIEW in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__}.step sets self.{name}, which it may not: it runs at any "
                "time and in any order. Name the value, or make it a state"
            )
        if name in type(self).config:
            raise AttributeError(
                f"config is immutable: make a new {type(self).__name__} with {name}={value!r}"
            )
        if name in ("step", *OPTIONAL_METHODS):
            raise AttributeError(
                f"the {name} of a cell is its class's: override it in a subclass of "
                f"{type(self).__name__}"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if _VIEW not in self.__dict__:
            return super().__getattr__(name)
        cls = type(self)
        hint = f"declare it in {cls.__name__}.config, or pass it in as a field or a Param"
        if name in cls.params:
            hint = f"read it as param.{name}"
        elif cls.head_axes is not None and name in cls.head_axes.of_calls:
            hint = f"{name} is as long as a call's memory: mask what a sequence does not have"
        elif cls.head_axes is not None and name in ("hidden_size", "num_heads"):
            axes = " and ".join(f"self.{axis}" for axis in (*cls.head_axes.arguments, VALUES))
            hint = f"it gets the tensors of one head, and reads lengths as {axes}"
        elif name in ("hidden_size", "num_heads"):
            hint = (
                "it is traced on a few channels, and serves any number of them and of heads; "
                "give the number another name in config"
            )
        method = "step (or readout)" if self.has_readout else "step"
        raise AttributeError(f"{cls.__name__}.{method} reads self.{name}, which it may not: {hint}")

    def extra_repr(self) -> str:
        items = {"num_heads": self.num_heads, **self.config_values()}
        return ", ".join([str(self.hidden_size), *(f"{k}={v!r}" for k, v in items.items())])


NAMESAKES: dict[type[Cell], Callable[..., nn.Module]] = {}
"""Modules for one step of torch.nn's recurrences that cells share their names with. An input size
tells them apart: no cell has one, and each of these needs one."""


def _signature_of(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of calls of a class, by that of its method."""
    return inspect.Signature([*inspect.signature(method).parameters.values()][1:])


Cell.__signature__ = _signature_of(Cell.__init__)  # type: ignore[attr-defined]

_NO_LAYER = (
    "{0} is a recurrence alone, without an input: it takes hidden_size, and by name num_heads, "
    "device, dtype and its config, got ({1}). A layer of it is pararnn.ParaRNN({0}, input_size, "
    "hidden_size), whose step(x, state) runs one time step"
)


def _of_torch_nn(name: str) -> str:
    """Return a hint for a user who takes a cell for torch.nn's of the same name."""
    if not hasattr(nn, name):
        return ""
    return (
        f". It is not torch.nn.{name}, which has full recurrent matrices: one step of that is "
        f"pararnn.{name}(input_size, hidden_size)"
    )


def unwrap(module: nn.Module) -> Cell:
    """Return the cell, out of a module that stands in its place and forwards attributes.

    So peft wraps what `modules_to_save` names. TypeError for hooks on that module, which is not
    called.
    """
    if isinstance(module, Cell):
        return module
    if module._forward_pre_hooks or module._forward_hooks:
        raise TypeError(
            f"hooks on {type(module).__name__}, which stands in the place of a cell, do not run: "
            "put them on the cell, layer.cell.itself"
        )
    cell: Cell = module.itself  # type: ignore[assignment]
    return cell


def call_cell(cell: Cell) -> tuple[Tensor, ...]:
    """Return the cell's parameters by a call of it, so that hooks on it run, and parameters are
    read behind those that compute or load them.

    A forward hook may give others in their place, as many. Raises TypeError where it gives
    something else, and for parameters that are sharded by the cell itself: after the call they
    would be gone.
    """
    if cell._forward_pre_hooks and any(hasattr(p, "full_tensor") for p in cell.parameters()):
        raise TypeError(SHARDED.format(type(cell).__name__))
    params = cell()
    if not cell._forward_hooks and type(params) is tuple:
        return params
    names = tuple(type(cell).params)
    if type(params) is not tuple or len(params) != len(names):
        got = len(params) if type(params) is tuple else type(params).__name__
        raise TypeError(
            f"a call of {type(cell).__name__} must give a tuple of {len(names)} tensors, its "
            f"parameters {names}, got {got}: a forward hook on a cell must return that, or None"
        )
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and any(p.numel() and not p.untyped_storage().nbytes() for p in params):
        raise TypeError(SHARDED.format(type(cell).__name__))
    return params


SHARDED = (
    "the parameters of {} are DTensors, which a solve cannot read: what shards a cell gathers them "
    "for its own call alone. Shard the layer around it: fully_shard(rnn.layers[i]), or "
    "fully_shard(rnn)"
)


def _has_readout(cls: type) -> bool:
    return getattr(cls, "readout", None) is not None


_VIEW = "_is_view"
"""Mark of the objects that steps run on: a missing attribute is an error with a cure."""


@cache
def _record(name: str, *fields: str) -> Any:
    """Return a named tuple's class, by which a step reads its arguments, with clear errors."""

    def refuse_read(record: Any, field: str) -> NoReturn:
        has = f"it has {', '.join(fields)}" if fields else "it has none"
        raise AttributeError(f"{name}.{field} is not there: {has}")

    def refuse_write(record: Any, field: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"{name}.{field} cannot be set: state, gate and param may only be read. Name the new "
            f"tensor ({field} = ...) and return it"
        )

    record_type: Any = cast("Any", namedtuple)(name, fields)
    record_type.__getattr__, record_type.__setattr__ = refuse_read, refuse_write
    return record_type


class Step:
    """A cell class's step as a pure function of flat tensors: (states, inputs, params) -> states.

    params: the parameters, then the memories, which are parameters of a sequence. It runs the
    user's method on an object that holds nothing but config and `training`, so that the result can
    depend on the class, these and the arguments only. `training`: the mode, None where the step
    does not read it. `sizes`: the channels and heads that it must be traced on, if only these will
    do. `num_rows`: of states and inputs. `num_params`: with memories. `by_heads`, `matrices`: for
    each of these, whether it is a matrix of each head, and whether it is any matrix. `head_sizes`:
    of a matrix cell, whose tensors are plain ones; None for others.
    """

    def __init__(
        self,
        cls: type[Cell],
        config: Mapping[str, Any],
        training: bool | None = None,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        self.cls, self.training, self.sizes = cls, training, sizes
        self.view = object.__new__(cls)
        nn.Module.__init__(self.view)  # whole, or torch.compile would not look inside
        self.head_sizes = None if sizes is None else head_sizes_of(cls, config, sizes)
        lengths = self.head_sizes.lengths if self.head_sizes else {}
        mode = {"training": training is not False}
        self.view.__dict__.update({**config, **lengths, **mode, _VIEW: True})
        self.state_type = _record("state", *cls.states)
        self.gate_type = _record("gate", *cls.gates, *cls.fields)
        self.param_type = _record("param", *cls.params)
        self.memory_type = _record("memory", *cls.memory)
        shapes = [param.kind for param in cls.params.values()]
        # Of matrix cells, a matrix 'H,K,K' is a plain tensor: K is an axis like others.
        plain = cls.head_axes is not None
        by_heads = [s.by_heads and not (plain and s is SHAPES["H,K,K"]) for s in shapes]
        pairs = zip(by_heads, shapes, strict=True)
        no_matrices = [False] * len(cls.memory)
        self.matrices = [head or shape is SHAPES["D,D"] for head, shape in pairs] + no_matrices
        self.by_heads = by_heads + no_matrices
        self.num_states, self.num_params = len(cls.states), len(shapes) + len(cls.memory)
        self.num_rows = len([*cls.states, *cls.gates, *cls.fields])

    @property
    def head(self) -> HeadSizes:
        """Sizes of a matrix cell's heads."""
        assert self.head_sizes is not None
        return self.head_sizes

    @property
    def axes(self) -> HeadAxes:
        """Axes of a matrix cell's states and gates."""
        assert self.cls.head_axes is not None
        return self.cls.head_axes

    @property
    def has_jacobian(self) -> bool:
        """True if the class overrides the derived Jacobian by hand."""
        return hasattr(self.cls, "jacobian")

    @property
    def has_readout(self) -> bool:
        """True if the class has a `readout`, which computes a layer's output from the states."""
        return _has_readout(self.cls)

    def call(self, method: str, states: Any, inputs: Any, params: Any) -> Any:
        """Call the cell's `method` (step, jacobian or readout) on flat tensors."""
        return self._call(method, states, inputs, params, self.by_heads, product)

    def _call(
        self,
        method: str,
        states: Any,
        inputs: Any,
        params: Any,
        matrices: Sequence[bool],
        multiply: Product,
    ) -> Any:
        if True in matrices:
            pairs = zip(params, matrices, strict=True)
            params = [Matrix(p, multiply) if is_matrix else p for p, is_matrix in pairs]
        records = [self.state_type(*states), self.gate_type(*inputs)]
        count = len(self.cls.params)
        records.append(self.param_type(*params[:count]))
        if self.cls.memory:
            records.append(self.memory_type(*params[count:]))
        return getattr(self.view, method)(*records)

    def by_ops(
        self, states: Any, inputs: Any, params: Any, multiply: Product = recorded_product
    ) -> tuple[Tensor, ...]:
        """Return new states as a call does, with the op `pararnn::mix`, or `multiply`, for each
        product."""
        new = self._call("step", states, inputs, params, self.matrices, multiply)
        return self._check_states(new)

    def __call__(self, states: Any, inputs: Any, params: Any) -> tuple[Tensor, ...]:
        """Return new states; CellError when the step does not return one tensor a state."""
        return self._check_states(self.call("step", states, inputs, params))

    def of_matrices(self, states: Any, inputs: Any, params: Any) -> tuple[Tensor, ...]:
        """Return new states as a call does, with params as a step gets them: see `Matrix`."""
        return self._check_states(self._call("step", states, inputs, params, (), product))

    def outputs_of(self, states: Any, inputs: Any, params: Any) -> tuple[Tensor, ...]:
        """Return a matrix cell's outputs of a step's new states, inputs and parameters."""
        if not self.has_readout:
            return tuple(states[: len(self.axes.outputs)])
        outputs = self.call("readout", states, inputs, params)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def output_of(self, states: Any, inputs: Any, params: Any) -> Tensor:
        """Return `outputs_of`, with leading dimensions (..., H), next to each other."""
        return self.head.join_outputs(self.outputs_of(states, inputs, params))

    def _check_states(self, new: Any) -> tuple[Tensor, ...]:
        new = (new,) if isinstance(new, Tensor) else new
        names = self.cls.states
        kinds = [type(item).__name__ for item in new] if isinstance(new, (tuple, list)) else new
        if kinds is new or len(new) != len(names) or any(not torch.is_tensor(s) for s in new):
            raise CellError(
                f"{self.cls.__name__}.step must return {len(names)} tensor(s), one for each of "
                f"{tuple(names)}, got {kinds}"
            )
        return tuple(new)


def sizes_of_class(cls: type[Cell], config: Mapping[str, Any], sizes: tuple[int, int]) -> Sizes:
    """Return the sizes of a cell's tensors for (D, H)."""
    if cls.head_axes is None:
        return ChannelSizes(*sizes, len(cls.states), len(cls.gates))
    return sizes_of(cls.__name__, cls.head_axes, config, *sizes)


def head_sizes_of(
    cls: type[Cell], config: Mapping[str, Any], sizes: tuple[int, int]
) -> HeadSizes | None:
    """Return the sizes of a matrix cell's heads for (D, H); None for other cells."""
    found = sizes_of_class(cls, config, sizes)
    return found if isinstance(found, HeadSizes) else None


def _axes_of(cls: type[Cell]) -> HeadAxes | None:
    """Return the axes that a class declares, None where its states are vectors of channels."""
    if not isinstance(cls.states, Mapping) and not isinstance(cls.gates, Mapping):
        if cls.memory:
            raise CellError(
                f"{cls.__name__} has a memory, which cells have whose states and gates are dicts "
                'of axes: states = {"h": "V"}, gates = {"x": "V"}'
            )
        for param in cls.params.values():
            if param.kind.axes and not param.kind.by_heads:
                param.size(1, 1)  # raises
        return None
    shapes = {name: param.kind for name, param in cls.params.items()}
    tensors = (cls.states, cls.gates, cls.outputs, cls.memory)
    axes = axes_of_class(cls.__name__, *tensors, shapes, cls.config)
    unsupported = {
        "fields": cls.fields,
        "structure": cls.structure,
        "jacobian": hasattr(cls, "jacobian"),
    }
    for name, value in unsupported.items():
        if value:
            raise CellError(
                f"{cls.__name__} has {name}, which cells whose states are matrices of heads cannot "
                "have: make a field a gate, and drop the rest"
            )
    methods = ("step", *["readout"] * _has_readout(cls)) if cls.memory else ()
    for method in methods:
        try:
            inspect.signature(getattr(cls, method)).bind("self", "state", "gate", "param", "memory")
        except TypeError as error:
            raise CellError(
                f"{cls.__name__} has a memory, and its {method} must take (self, state, gate, "
                f"param, memory): {error}"
            ) from None
    first = next(iter(axes.states.values()), (VALUES,))
    if not _has_readout(cls) and first != (VALUES,):
        raise CellError(
            f"{cls.__name__} needs a readout(self, state, gate, param) that returns a vector (..., "
            f'{VALUES}) for each head, as its first state has the axes {first}, not ("{VALUES}",)'
        )
    return axes


def resolve_config(cls: type[Cell], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class's config with `config` put over it, in values that cannot change.

    Lists become tuples. Raises CellError for unknown names, and values that JSON does not have.
    """
    extra = sorted(set(config) - set(cls.config))
    if extra:
        raise CellError(
            f"{cls.__name__} has no config {extra[0]!r}; it has {sorted(cls.config) or 'none'}"
        )
    values = {**cls.config, **config}
    return {
        name: immutable(value, f"{cls.__name__}: config {name}") for name, value in values.items()
    }


def _check_names(cls: type, what: str, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise CellError(f"{cls.__name__}: {what} must be identifiers, got {name!r}")
        if name.startswith("_") or hasattr(tuple, name):
            raise CellError(f"{cls.__name__}: {what} may not be called {name!r}; rename it")
    if len(set(names)) != len(names):
        raise CellError(f"{cls.__name__}: {what} must be distinct, got {list(names)}")
