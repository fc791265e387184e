# SPDX-License-Identifier: Apache-2.0
"""What a module keeps in Python objects of its own, as it was before its forward ran."""

from __future__ import annotations

import logging
import operator
import types
from collections import deque
from typing import Any

from torch import Tensor, nn

_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_NOT_OWN = (nn.Module, Tensor, logging.Logger, *_CODE)


def _contents(value: Any) -> Any:
    """A list of a container's items, a dict of what is in a mapping or in an object's attributes; None for the rest."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, deque, set)):
        return list(value)
    return dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, _NOT_OWN) else None


def same(one: Any, other: Any) -> bool:
    """Whether the contents are the same objects in the same order."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(map(operator.is_, one, other))


# What nn.Module, its compile(), torch.jit.script and FSDP keep in a module; no forward of its own looks at it.
_BOOKKEEPING = frozenset(vars(nn.Module())) | {
    "_compiled_call_impl",
    "__overloads__",
    "_is_fsdp_managed_module",
    "_fsdp_use_orig_params",
}


def own_values(module: nn.Module) -> dict[Any, Any]:
    """A module's attributes, and of which names there are parameters, buffers and children."""
    state = vars(module)
    values: dict[Any, Any] = {name: value for name, value in state.items() if name not in _BOOKKEEPING}
    for kind in ("_parameters", "_buffers", "_modules"):
        values.update({(kind, name): value is None for name, value in state.get(kind, {}).items()})
    return values


class OwnState:
    """All that is reachable from a module's attributes but for modules, parameters and buffers.

    The objects are kept as they are, since a forward may compare them by identity: what has changed is put back.
    """

    def __init__(self, module: nn.Module) -> None:
        self.kept: dict[int, tuple[Any, Any]] = {}  # by id: the object and its contents
        waiting = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
        while waiting:
            value = waiting.pop()
            if id(value) in self.kept or (contents := _contents(value)) is None:
                continue
            self.kept[id(value)] = value, contents
            waiting.extend(contents.values() if isinstance(contents, dict) else contents)

    def put_back(self) -> bool:
        """Whether something has changed, which is then undone."""
        changed = [(value, before) for value, before in self.kept.values() if not same(before, _contents(value))]
        for value, before in changed:
            into = value if isinstance(value, (dict, list, deque, set)) else vars(value)
            into.clear()
            into.extend(before) if isinstance(into, (list, deque)) else into.update(before)
        return bool(changed)
