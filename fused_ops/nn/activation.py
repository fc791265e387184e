# SPDX-License-Identifier: Apache-2.0
"""Which activations can be fused, with their parameters, and how they are recognised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

# Each activation's parameters and their defaults, torch's own.
ACTIVATIONS: dict[str, dict[str, float]] = {
    "identity": {},
    "relu": {},
    "relu_squared": {},
    "gelu": {},
    "gelu_tanh": {},
    "quick_gelu": {},
    "silu": {},
    "mish": {},
    "sigmoid": {},
    "tanh": {},
    "leaky_relu": {"negative_slope": 0.01},
    "elu": {"alpha": 1.0},
    "selu": {},
    "celu": {"alpha": 1.0},
    "softplus": {"beta": 1.0, "threshold": 20.0},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0},
    "relu6": {},
    "hardswish": {},
    "hardsigmoid": {},
}

# Other names that configurations use.
_ALIASES = {
    "linear": "identity",
    "relu2": "relu_squared",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "swish": "silu",
}

_REFERENCES: dict[str, Callable[..., Tensor]] = {
    "identity": lambda z: z,
    "relu": F.relu,
    "relu_squared": lambda z: F.relu(z).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}

# Pure functions of one tensor; F.gelu's approximate and other arguments come with functools.partial.
_FUNCTIONS: dict[Callable[..., Any], str] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    F.mish: "mish",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    F.leaky_relu: "leaky_relu",
    F.elu: "elu",
    F.selu: "selu",
    torch.selu: "selu",
    F.celu: "celu",
    F.softplus: "softplus",
    F.hardtanh: "hardtanh",
    F.relu6: "relu6",
    F.hardswish: "hardswish",
    F.hardsigmoid: "hardsigmoid",
}

_MODULES: dict[type[nn.Module], str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.LeakyReLU: "leaky_relu",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.CELU: "celu",
    nn.Softplus: "softplus",
    nn.Hardtanh: "hardtanh",
    nn.ReLU6: "relu6",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
}

# Classes of packages that need not be installed, by their full name.
_NAMED_MODULES = {
    "transformers.activations.LinearActivation": "identity",
    "transformers.activations.ReLUSquaredActivation": "relu_squared",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.FastGELUActivation": "gelu_tanh",
    "transformers.activations.AccurateGELUActivation": "gelu_tanh",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.MishActivation": "mish",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "timm.layers.activations.Swish": "silu",
    "timm.layers.activations.Mish": "mish",
    "timm.layers.activations.Sigmoid": "sigmoid",
    "timm.layers.activations.Tanh": "tanh",
    "timm.layers.activations.HardSwish": "hardswish",
    "timm.layers.activations.HardSigmoid": "hardsigmoid",
}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Activation:
    """An activation that can be fused: its name and the values of its parameters.

    Args:
        name: a key of ACTIVATIONS.
        parameters: a value for each of ACTIVATIONS[name], in that order. Default: its defaults.

    Raises:
        ValueError: the name is not known, or the number of parameters is wrong.

    Example:
        >>> Activation("leaky_relu")
        Activation(name='leaky_relu', parameters=(0.01,))
    """

    name: str
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(
                f"Activation: expected name in ({', '.join(ACTIVATIONS)}), got {self.name!r}. Use one of these names."
            )
        defaults = ACTIVATIONS[self.name]
        for value in self.parameters:
            if not _is_number(value):
                raise ValueError(f"Activation: expected parameters of {self.name} to be numbers, got {value!r}.")
        values = tuple(float(value) for value in self.parameters) or tuple(defaults.values())
        if len(values) != len(defaults):
            raise ValueError(
                f"Activation: expected len(parameters) == {len(defaults)} for {self.name}, got {len(values)}. "
                f"Give {', '.join(defaults) or 'none'}."
            )
        if self.name == "hardtanh" and not values[0] < values[1]:
            raise ValueError(f"Activation: expected min_val < max_val for hardtanh, got {values}. Exchange them.")
        object.__setattr__(self, "parameters", values)

    @classmethod
    def of(cls, activation: Any, **parameters: float) -> Activation | None:
        """The activation that a name, a module or a function stands for.

        Args:
            activation: an Activation; a name in ACTIVATIONS, or one that transformers' configurations use; a module
                of torch.nn, transformers or timm, by its exact class; a function of torch or torch.nn.functional,
                with or without functools.partial.
            **parameters: values for some of ACTIVATIONS[name], in place of the activation's own.

        Returns:
            The activation, or None where it is none of ACTIVATIONS for certain.

        Raises:
            TypeError: the activation has no such parameter.

        Example:
            >>> Activation.of(torch.nn.GELU(approximate="tanh"))
            Activation(name='gelu_tanh', parameters=())
        """
        found = cls._recognise(activation)
        if found is None or not parameters:
            return found
        values = found.keywords()
        unknown = [name for name in parameters if name not in values]
        if unknown:
            raise TypeError(
                f"Activation: expected parameters of {found.name} in ({', '.join(values)}), got {unknown[0]}. "
                "Leave it out."
            )
        return cls(found.name, tuple({**values, **parameters}.values()))

    @classmethod
    def _recognise(cls, activation: Any) -> Activation | None:
        if isinstance(activation, cls):
            return activation
        if isinstance(activation, str):
            name = _ALIASES.get(activation, activation)
            return cls(name) if name in ACTIVATIONS else None
        if isinstance(activation, nn.Module):
            return cls._of_module(activation)
        if isinstance(activation, functools.partial):
            return None if activation.args else cls._of_call(activation.func, activation.keywords)
        return cls._of_call(activation, {})

    @classmethod
    def _of_module(cls, module: nn.Module) -> Activation | None:
        kind = type(module)
        name = _MODULES.get(kind) or _NAMED_MODULES.get(f"{kind.__module__}.{kind.__qualname__}")
        if name is None or "forward" in vars(module):
            return None
        if kind is nn.GELU:
            return cls._of_call(F.gelu, {"approximate": getattr(module, "approximate", None)})
        values = [getattr(module, parameter, None) for parameter in ACTIVATIONS[name]]
        numbers = tuple(filter(_is_number, values))
        return cls(name, numbers) if len(numbers) == len(values) else None

    @classmethod
    def _of_call(cls, function: Any, keywords: dict[str, Any]) -> Activation | None:
        try:
            name = _FUNCTIONS.get(function)
        except TypeError:  # not hashable
            return None
        if name is None:
            return None
        values = {**ACTIVATIONS[name]}
        for keyword, value in keywords.items():
            if keyword == "approximate" and name in ("gelu", "gelu_tanh") and value in ("none", "tanh"):
                name = "gelu" if value == "none" else "gelu_tanh"
            elif keyword in values and _is_number(value):
                values[keyword] = value
            elif keyword != "inplace" or value is not False:
                return None
        return cls(name, tuple(values.values()))

    def reference(self, z: Tensor) -> Tensor:
        """The activation of z, in stock operations."""
        return _REFERENCES[self.name](z, *self.parameters)

    def keywords(self) -> dict[str, float]:
        """The parameters by name."""
        return dict(zip(ACTIVATIONS[self.name], self.parameters, strict=True))

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value:g}" for name, value in self.keywords().items())
        return f"{self.name}({parameters})" if parameters else self.name
