"""The optimizer in DeepSpeed's engine, whose state is kept and read as that of one process.

Below stage 3 of ZeRO every process has all weights. From stage 1 each holds a piece of the optimizer's state: all
trained weights are laid end to end, and cut into as many pieces as there are processes.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigmascope.lbm.training.sharding import State


def log_to_stderr() -> None:
    """Turn DeepSpeed's warnings from stdout, where results go, to stderr. DeepSpeed has been imported."""
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


class EngineOptimizer:
    """The optimizer in an engine, as the loop and checkpoints see one.

    Args:
        engine: `DeepSpeedEngine`, which has taken over `inner`.
        inner: The YAML's optimizer, of one group; from stage 1 its only parameter is this process's piece.
        parameters: What is trained, in the order of `inner`.
        keep: Whether this process needs the whole state.
    """

    def __init__(
        self, engine: Any, inner: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], *, keep: bool
    ) -> None:
        self.optimizer = inner
        self._engine = engine
        self._parameters = list(parameters)
        self._keep = keep
        self._in_pieces: bool = engine.zero_optimization_stage() > 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the optimizer; its learning rate is what the schedule set."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Clip, change the weights and clear the gradients: the engine does these together."""
        self._engine.step()

    def zero_grad(self) -> None:
        """Nothing: `step` has done it."""

    def state_dict(self) -> State:
        """The state of one process's optimizer. Every process calls this; it is whole where `keep` says so."""
        if not self._in_pieces:
            return self.optimizer.state_dict()
        held = self.optimizer.state.get(self._piece, {})
        (group,) = self.optimizer.state_dict()["param_groups"]
        numbers = range(len(self._parameters)) if held else ()
        return {
            "state": {
                number: {name: self._whole(number, name, value) for name, value in held.items()}
                for number in numbers
            },
            "param_groups": [{**group, "params": list(range(len(self._parameters)))}],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from the state of one process's optimizer, and from the weights as the model holds them now.

        Every process calls this, before the first step.
        """
        from deepspeed import utils

        if not self._in_pieces:
            self.optimizer.load_state_dict(state)
            return
        for parameter in self._parameters:
            utils.safe_set_full_fp32_param(parameter, parameter.detach())
        (group,) = state["param_groups"]
        values = state["state"]
        spread = [name for name, value in values[0].items() if self._is_spread(value)] if values else []
        empty = {name: torch.zeros_like(self._piece) for name in spread}
        pieces = {0: {**values[0], **empty}} if values else {}
        self.optimizer.load_state_dict({"state": pieces, "param_groups": [{**group, "params": [0]}]})
        if not values:
            return
        utils.lazy_init_hp_params_optimizer_state(self._parameters, self._piece, self.optimizer.state)
        for number, parameter in enumerate(self._parameters):
            for name in spread:
                utils.safe_set_full_optimizer_state(
                    parameter, values[number][name].to(parameter.device), name
                )

    @property
    def _piece(self) -> Tensor:
        piece: Tensor = self.optimizer.param_groups[0]["params"][0]
        return piece

    def _is_spread(self, value: Any) -> bool:
        """Whether a value of the first parameter's state has a number for each of its weights."""
        return isinstance(value, Tensor) and value.shape == self._parameters[0].shape

    def _whole(self, number: int, name: str, value: Any) -> Any:
        from deepspeed.utils import safe_get_full_optimizer_state

        if not isinstance(value, Tensor):
            return value
        if value.shape != self._piece.shape:
            return value.clone()  # a counter of steps, the same for all weights
        full: Tensor = safe_get_full_optimizer_state(self._parameters[number], name)
        return full.cpu() if self._keep else full.new_empty(0)
