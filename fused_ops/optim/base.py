# SPDX-License-Identifier: Apache-2.0
"""The one step() that all fused optimizers share."""

import functools
import inspect
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from fused_ops._build import check_device, load_native


@functools.cache
def _schema(rule: str) -> dict[str, Any]:
    """The rule's states, hyperparameters and whether it counts steps, as its native definition says."""
    return load_native().optimizer_schemas()[rule]


def _number(value: Any) -> float:
    """What a number or a one-element tensor holds; NaN for anything else."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _callers_stacklevel() -> int:
    """How far up, seen from who calls this, the code lies that is neither torch's nor ours."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "fused_ops"):
        frame, level = frame.f_back, level + 1
    return level


class _Gathered(NamedTuple):
    """A parameter group whose step has been checked and is ready to run."""

    plan: Any
    group: dict[str, Any]
    device_lr: Tensor | None  # read by the kernel when it runs
    again: Callable[[list[int]], tuple[str | None, list[int]]]  # gathers once more, given who takes a first step
    reason: str | None  # why the fused step cannot take the group
    lacking: list[int]  # positions of parameters that lack state

    @classmethod
    def of(cls, plan: Any, group: dict[str, Any], state: Any, hyperparameters: Any, device_steps: bool) -> "_Gathered":
        lr = group.get("lr")
        device_lr = lr if isinstance(lr, Tensor) and lr.is_cuda and group.get("capturable") else None
        values = hyperparameters(group, device_lr is not None)
        again = functools.partial(plan.gather, group["params"], state, values, device_steps)
        return cls(plan, group, device_lr, again, *again([]))


class FusedOptimizer(Optimizer):
    """Base of the fused optimizers: a torch.optim optimizer whose step() makes one native call a parameter group.

    A subclass derives from this class and from the torch.optim optimizer it replaces, and names its native `rule`.
    Constructor, defaults, hooks, state names and state_dict() are the parent's. A step is checked as a whole before
    anything is changed. What the native rule cannot do (differentiable=True, sparse gradients, devices other than CPU
    and CUDA, tensor subclasses other than DTensor) runs the parent's step, after one UserWarning that says why.

    With torch.amp.GradScaler the step divides by the scale and skips on infinity by itself; gradients are read, never
    written back unscaled.

    Args:
        state_dtype: floating-point dtype in which new state is kept, e.g. torch.float32 moments for bfloat16
            parameters, or torch.bfloat16 moments to save memory. Default: the parameter's dtype. Arithmetic is float32
            for states and parameters of at most 32 bits, else float64. Complex parameters keep state in their dtype.

    Dtypes: parameters, gradients and each state may be float32, float64, float16, bfloat16, complex64 or complex128,
        independently of one another.

    Raises:
        RuntimeError: a gradient or state does not fit its parameter; nothing has been changed.
        ValueError, TypeError: in step(), a value of a parameter group is NaN or is no number; nothing has been changed.
            A Tensor lr that the kernel reads from its device (capturable=True) is not looked at.
        ValueError: state_dtype is not a floating-point dtype that the native rule takes.
    """

    rule: ClassVar[str]
    takes_sparse: ClassVar[bool] = False  # whether the parent takes sparse gradients

    # GradScaler then passes grad_scale and found_inf as attributes and leaves unscaling to step().
    _step_supports_amp_scaling = True

    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(self, *args: Any, state_dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        if state_dtype not in (None, torch.float32, torch.float64, torch.float16, torch.bfloat16):
            raise ValueError(
                f"{type(self).__name__}: expected state_dtype in (None, torch.float32, torch.float64, torch.float16, "
                f"torch.bfloat16), got {state_dtype}. Leave it out to keep state in each parameter's dtype."
            )
        stock = self._stock_class()
        if "fused" in kwargs and stock is not None and "fused" not in inspect.signature(stock).parameters:
            del kwargs["fused"]  # this class is fused whatever it says
        self.state_dtype = state_dtype
        self._forget()
        super().__init__(*args, **kwargs)
        self._convert_state()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        parent = cls._stock_class()
        if parent is not None and "__init__" not in vars(cls):
            signature = inspect.signature(parent)
            extra = inspect.Parameter(
                "state_dtype", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=torch.dtype | None
            )
            parameters = [*signature.parameters.values(), extra]
            cls.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]

    @classmethod
    def _stock_class(cls) -> type[Optimizer] | None:
        """The torch.optim class that this one replaces."""
        stock = (base for base in cls.__mro__ if base.__module__.startswith("torch.optim.") and base is not Optimizer)
        return next(stock, None)

    # --- state ---------------------------------------------------------------------------------------------------

    def initial_value(self, name: str, param: Tensor, group: dict[str, Any]) -> complex:
        """The value that a parameter's state `name` starts from."""
        return 0.0

    def _dtype_of_state(self, param: Tensor) -> torch.dtype:
        return self.state_dtype if self.state_dtype is not None and param.is_floating_point() else param.dtype

    def _convert_state(self) -> None:
        """Brings state that the parent made in its parameter's dtype to state_dtype."""
        for param, state in self.state.items():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor):
                    state[name] = value.to(self._dtype_of_state(param))

    def _create_state(self, group: dict[str, Any], positions: list[int], names: list[str], device_steps: bool) -> None:
        """Adds what the state of the parameters at `positions` lacks, or moves their step counter to their device."""
        schema = _schema(self.rule)
        for position in positions:
            param = group["params"][position]
            if param.is_cuda:
                check_device(param.device)
            state = self.state[param]
            on_device = device_steps or group.get("capturable") or group.get("fused")
            device = param.device if on_device else torch.device("cpu")
            if schema["counts_steps"]:
                step = state.get("step")
                state["step"] = torch.zeros((), device=device) if step is None else torch.as_tensor(step).to(device)
            for name in names:
                if not isinstance(state.get(name), Tensor):
                    like = torch.empty_like(
                        param,
                        dtype=self._dtype_of_state(param),
                        memory_format=torch.preserve_format,
                        requires_grad=False,
                    )
                    state[name] = like.fill_(self.initial_value(name, param, group))

    def _check_incomplete_state(self, one: "_Gathered") -> None:
        """A parameter with no state takes its first step; one with part of its state has lost the rest."""
        if not _schema(self.rule)["counts_steps"]:
            return  # as in torch.optim.SGD, a state that is not there starts now
        for position in one.lacking:
            state = self.state[one.group["params"][position]]
            lost = [name for name in ("step", *one.plan.used_states()) if state.get(name) is None]
            if state and lost:
                raise RuntimeError(
                    f"{type(self).__name__}: expected params[{position}] to have state[{lost[0]!r}], got none. "
                    "Load a state_dict that has it, or clear the parameter's whole state to begin anew."
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of this optimizer or of its torch.optim namesake; state keeps state_dtype, exactly."""
        # The parent casts each state to its parameter's dtype: take again what it was given, between the user's hooks.
        given: dict[str, Any] = {}
        before = self.register_load_state_dict_pre_hook(lambda _, hooked: given.update(hooked))
        after = self.register_load_state_dict_post_hook(lambda _: self._load_exactly(given), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _load_exactly(self, state_dict: dict[str, Any]) -> None:
        if self.state_dtype is None:
            return
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if name != "step" and isinstance(value, Tensor):
                    self.state[param][name] = value.detach().to(param.device, self._dtype_of_state(param), copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "state_dtype": self.state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        self._plans: list[Any] = []  # one for each parameter group
        self._reasons_said: set[str] = set()

    # --- step ----------------------------------------------------------------------------------------------------

    def _hyperparameters(self, group: dict[str, Any], lr_on_device: bool) -> list[float]:
        """The group's values in the order of the native rule. Reading a tensor that is on a device synchronizes."""
        values = dict(group)
        if "betas" in group:
            try:
                values["beta1"], values["beta2"] = group["betas"]
            except (TypeError, ValueError):
                raise self._not_a_number(group, "beta1") from None
        if lr_on_device:
            values["lr"] = 0.0  # the kernel reads it from the device
        numbers = []
        for name in _schema(self.rule)["hyperparameters"]:
            number = _number(values.get(name))
            if math.isnan(number):
                raise self._not_a_number(group, name)
            numbers.append(number)
        return numbers

    def _not_a_number(self, group: dict[str, Any], name: str) -> Exception:
        position = next(i for i, candidate in enumerate(self.param_groups) if candidate is group)
        key, wanted = ("betas", "two numbers") if name in ("beta1", "beta2") else (name, "a number")
        value = group.get(key)
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.dim() else repr(value)
        return (ValueError if isinstance(value, (float, tuple, Tensor)) else TypeError)(
            f"{type(self).__name__}: expected param_groups[{position}][{key!r}] to be {wanted}, got {got}. "
            + ("Convert it with float()." if isinstance(value, str) else "Look at what has set it.")
        )

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimization step.

        Args:
            closure: re-evaluates the model and returns the loss. Optional.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if "capturable" in self.defaults:
            self._accelerator_graph_capture_health_check()
        try:
            with torch.no_grad():
                reason = self._fused_step()
        finally:
            for plan in self._plans:
                plan.forget()
        if reason is not None:
            self._stock_step(reason)
        return loss

    def _fused_step(self) -> str | None:
        """Steps every group, or changes nothing and returns why the parent's step must run."""
        if any(group["differentiable"] for group in self.param_groups):
            return "differentiable=True"
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        infinity_on_device = found_inf is not None and found_inf.is_cuda
        if found_inf is not None and not infinity_on_device and _number(found_inf) != 0:
            return None
        while len(self._plans) < len(self.param_groups):
            self._plans.append(load_native().StepPlan(self.rule, type(self).__name__.lower()))

        gathered = [
            _Gathered.of(plan, group, self.state, self._hyperparameters, infinity_on_device)
            for plan, group in zip(self._plans, self.param_groups, strict=False)
        ]
        for one in gathered:
            if one.reason is not None:
                return one.reason

        # Every gradient fits its parameter. What is left to find fault with is state that is made now.
        a_first_step = not _schema(self.rule)["counts_steps"] and any(one.lacking for one in gathered)
        if a_first_step and infinity_on_device and _number(found_inf) != 0:
            return None  # no counter tells that the next step is still the first one, so no state must
        for one in gathered:
            self._check_incomplete_state(one)
        for one in gathered:
            if not one.lacking:
                continue
            self._create_state(one.group, one.lacking, one.plan.used_states(), infinity_on_device)
            reason, _ = one.again(one.lacking)
            if reason is not None:
                return reason
        for one in gathered:
            one.plan.run(one.device_lr, grad_scale, found_inf)
        return None

    def _stock_step(self, reason: str) -> None:
        """Runs the parent's step in place of the fused one, unscaling first where GradScaler has left that to us."""
        name, stock = type(self).__name__, self._stock_class()
        assert stock is not None
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not self.takes_sparse and any(gradient.is_sparse for gradient in gradients):
            raise RuntimeError(f"{name} does not support sparse gradients. Pass sparse=False to the layer.")
        if self.state_dtype is not None:
            raise RuntimeError(
                f"{name}: expected what the fused step can do, as state_dtype == {self.state_dtype}, but {reason}. "
                "Leave state_dtype out, so that torch.optim's step can run."
            )
        if reason not in self._reasons_said:
            self._reasons_said.add(reason)
            warnings.warn(
                f"{name}: running torch.optim's own step because {reason}.",
                UserWarning,
                stacklevel=_callers_stacklevel(),
            )
        scaling = {key: self.__dict__.pop(key) for key in ("grad_scale", "found_inf") if key in self.__dict__}
        try:
            if scaling.get("found_inf") is not None and _number(scaling["found_inf"]) != 0:
                return
            if scaling.get("grad_scale") is not None:
                with torch.no_grad():
                    for gradient in gradients:
                        gradient.div_(scaling["grad_scale"].to(gradient.device))
            step = cast(Any, stock.step)
            # Without the wrapper that torch puts around step(): the hooks have run already.
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)
        finally:
            self.__dict__.update(scaling)


_Fused = TypeVar("_Fused", bound=Optimizer)


def fuse_optimizer(optimizer: _Fused) -> _Fused:
    """Turns a live torch.optim optimizer into its fused namesake, in place, with its state, hooks and schedulers.

    Args:
        optimizer: an instance of exactly torch.optim.Adam, AdamW, RMSprop, SGD or Adagrad; a fused one stays as it is.

    Returns:
        The same object.

    Raises:
        TypeError: there is no fused namesake of its class.

    Example:
        >>> import fused_ops, torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> isinstance(fused_ops.fuse_optimizer(optimizer), fused_ops.optim.SGD)
        True
    """
    if isinstance(optimizer, FusedOptimizer):
        return optimizer
    fused = {cls._stock_class(): cls for cls in FusedOptimizer.__subclasses__()}
    if type(optimizer) not in fused:
        known = ", ".join(sorted(cls.__name__ for cls in fused.values()))
        raise TypeError(
            f"fuse_optimizer: expected type(optimizer) in torch.optim.({known}), got {type(optimizer).__qualname__}. "
            "Keep this optimizer as it is."
        )
    own_step = optimizer.__dict__.pop("step", None)
    scheduled = getattr(own_step, "_wrapped_by_lr_sched", False)
    if own_step is not None and not scheduled:
        optimizer.step = own_step
        raise TypeError(
            f"fuse_optimizer: expected a {type(optimizer).__qualname__} with its class's step(), got one whose step "
            "attribute has been replaced. Fuse the optimizer before it is wrapped."
        )
    optimizer.__class__ = fused[type(optimizer)]
    cast(FusedOptimizer, optimizer).__setstate__({"state_dtype": None})
    if scheduled:
        optimizer.step = _tracked_step(optimizer)
    return optimizer


def _tracked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """step() with what a learning rate scheduler has put around it: a note that the optimizer has stepped."""
    reference = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        alive = cast(Any, reference())
        alive._opt_called = True
        return type(alive).step(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step
