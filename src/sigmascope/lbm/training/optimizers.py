"""Optimizers and learning-rate schedules by name, and a moving average of the trained weights.

Every optimizer of `torch.optim` is there, and every schedule of diffusers; the average is diffusers' `EMAModel`.
Importing this loads no diffusers, so that settings are checked quickly.
"""

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from sigmascope.errors import ConfigError
from sigmascope.lbm.config import did_you_mean

NOT_FOR_THIS_LOOP = frozenset({"Optimizer", "LBFGS", "SparseAdam"})
"""The base class, the one that calls the model itself, and the one for sparse gradients."""
SCHEDULES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": (),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("power",),
    "constant": (),
    "constant_with_warmup": (),
    "piecewise_constant": ("step_rules",),
}
"""diffusers' schedules and the arguments of each."""
NO_WARMUP = frozenset({"constant", "piecewise_constant"})
"""Schedules that take no `warmup_steps`."""


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], learning_rate: float, kwargs: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Make an optimizer of `torch.optim`.

    Args:
        name: Of its class, in any case.
        parameters: What it changes.
        learning_rate: At the schedule's full height.
        kwargs: Its other arguments; lists (YAML has no tuples) become tuples.

    Raises:
        ConfigError: There is no such optimizer, or it refuses an argument or its value.
    """
    make: Any = optimizer_class(name)  # each class has arguments of its own
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()}
    try:
        optimizer: torch.optim.Optimizer = make(list(parameters), lr=learning_rate, **given)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer: {name} refuses {dict(kwargs)} ({error}).",
            hint="Correct optimizer_kwargs, or choose another optimizer.",
        ) from error
    return optimizer


def check_optimizer(name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse an optimizer or arguments of it that do not exist or have no such value, before any model is loaded.

    Raises:
        ConfigError: Names the optimizer or the argument, and the known ones or what is wrong with the value.
    """
    kind = optimizer_class(name)
    known = [argument for argument in inspect.signature(kind).parameters if argument not in ("params", "lr")]
    for key in kwargs:
        if key == "lr":
            raise ConfigError("optimizer_kwargs.lr: is set by learning_rate.", hint="Leave it out here.")
        _require_known("optimizer_kwargs", key, known, kind.__name__)
    # Whether a fused kernel can be had depends on where the parameters will be.
    anywhere = {key: value for key, value in kwargs.items() if key != "fused"}
    make_optimizer(name, [nn.Parameter(torch.zeros(1, 1))], 1e-3, anywhere)


def _require_known(where: str, key: str, known: Sequence[str], owner: str) -> None:
    if key in known:
        return
    raise ConfigError(
        f"{where}.{key}: {owner} has no such argument{did_you_mean(key, known)}.",
        hint=f"Known: {', '.join(known) or 'none'}.",
    )


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Find an optimizer of `torch.optim` by its name, in any case.

    Raises:
        ConfigError: There is none that the training loop can use; lists them.
    """
    candidates = (getattr(torch.optim, name) for name in dir(torch.optim) if name not in NOT_FOR_THIS_LOOP)
    known: dict[str, type[torch.optim.Optimizer]] = {
        kind.__name__.lower(): kind
        for kind in candidates
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    optimizer = known.get(name.lower())
    if optimizer is None:
        names = sorted(kind.__name__ for kind in known.values())
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        guess = f" (did you mean {known[near[0]].__name__}?)" if near else ""
        raise ConfigError(f"optimizer: there is no {name!r}{guess}.", hint=f"Use one of {', '.join(names)}.")
    return optimizer


def make_schedule(
    name: str,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int | None,
    warmup_steps: int = 0,
    kwargs: Mapping[str, Any] | None = None,
) -> LRScheduler:
    """Make a schedule of diffusers, which multiplies the learning rate once for each optimizer step.

    Args:
        name: A key of `SCHEDULES`.
        optimizer: Whose learning rate it sets.
        steps: Optimizer steps of the whole run; None where it is not known, which schedules that fall refuse.
        warmup_steps: Over which the rate rises from 0.
        kwargs: Its other arguments.

    Raises:
        ConfigError: The schedule, an argument or the number of steps is not right.
    """
    from diffusers.optimization import get_scheduler

    kwargs = dict(kwargs or {})
    check_schedule(name, warmup_steps, kwargs)
    falls = name not in {*NO_WARMUP, "constant_with_warmup"}
    if falls and steps is None:
        raise ConfigError(
            f"lr_scheduler: {name} needs to know the number of steps.",
            hint="Set max_steps, or use constant.",
        )
    if falls and steps is not None and warmup_steps >= steps:
        raise ConfigError(
            f"warmup_steps: {warmup_steps} leave nothing of a run of {steps} steps.", hint="Use fewer."
        )
    try:
        schedule: LRScheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=steps,
            **kwargs,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"lr_scheduler: {name} refuses {kwargs} ({error}).", hint="Correct lr_scheduler_kwargs."
        ) from error
    return schedule


def check_schedule(name: str, warmup_steps: int, kwargs: Mapping[str, Any]) -> None:
    """Refuse a schedule or arguments of it that do not exist.

    Raises:
        ConfigError: Names what is wrong, and the known schedules or arguments.
    """
    arguments = SCHEDULES.get(name)
    if arguments is None:
        raise ConfigError(
            f"lr_scheduler: there is no {name!r}{did_you_mean(name, SCHEDULES)}.",
            hint=f"Use one of {', '.join(SCHEDULES)}.",
        )
    if warmup_steps and name in NO_WARMUP:
        raise ConfigError(
            f"warmup_steps: lr_scheduler {name} has no warm-up.", hint="Use constant_with_warmup, or 0."
        )
    for key in kwargs:
        _require_known("lr_scheduler_kwargs", key, arguments, name)
    if name == "piecewise_constant" and "step_rules" not in kwargs:
        raise ConfigError(
            "lr_scheduler_kwargs: piecewise_constant needs step_rules.",
            hint='Such as "1:10,0.1:20,0.01": a factor up to each step, and the last one.',
        )


class MovingAverage:
    """Follows parameters: shadow ← decay·shadow + (1 − decay)·parameter after each step.

    The decay rises from 0 as (1 + step)/(10 + step), so that the beginning is soon forgotten.

    Args:
        parameters: What to follow, always in this order.
        decay: That the decay rises to, below 1.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        from diffusers.training_utils import EMAModel  # not above: to check settings needs no diffusers

        self._parameters = list(parameters)
        self._average = EMAModel(self._parameters, decay=decay)

    def update(self) -> None:
        """Take the parameters as they are after a step."""
        self._average.step(self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the parameters hold the average; after it, bit for bit what they held before."""
        self._average.store(self._parameters)
        self._average.copy_to(self._parameters)
        try:
            yield
        finally:
            self._average.restore(self._parameters)

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The average by the parameters' names, given in their order."""
        return dict(zip(names, self._average.shadow_params, strict=True))

    def numbers(self) -> dict[str, Any]:
        """All that is needed to go on, but for the weights."""
        state: dict[str, Any] = self._average.state_dict()
        return {key: value for key, value in state.items() if key != "shadow_params"}

    def restore(self, numbers: Mapping[str, Any], weights: Sequence[Tensor]) -> None:
        """Go on from `numbers` and `weights`."""
        places = [shadow.device for shadow in self._average.shadow_params]
        shadows = [weight.to(place) for weight, place in zip(weights, places, strict=True)]
        self._average.load_state_dict({**numbers, "shadow_params": shadows})
