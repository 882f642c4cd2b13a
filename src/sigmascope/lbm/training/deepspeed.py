"""DeepSpeed: the launcher's configuration, in which the YAML has the last word on training, and its optimizer.

Below stage 3 of ZeRO every process has all weights. From stage 1 each holds a piece of the optimizer's state: all
trained weights are laid end to end, and cut into as many pieces as there are processes. Checkpoints keep that
state, and read it, as that of one process.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import Tensor, nn

from sigmascope.errors import ConfigError
from sigmascope.lbm.training.distributed import State
from sigmascope.lbm.training.settings import TrainSettings

WEIGHTS_STAGE: Final = 3
"""The stage of ZeRO that spreads the weights too."""
NOT_IN_PIECES: Final = ("adafactor", "adagrad", "muon")
"""Optimizers that ZeRO cannot give flat pieces of all weights: two need the shapes of the weights, and in place of
the Adagrad it is given DeepSpeed makes one of its own, which no schedule reaches. All others were tried."""
_OF_THE_YAML: Final = ("optimizer", "scheduler")
"""Keys that DeepSpeed's configuration may not have."""
_SIZED_BY_MODEL: Final = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
"""Keys that Accelerate works out of a language model's hidden size when they are `auto`."""


def deepspeed_plugin(settings: TrainSettings) -> DeepSpeedPlugin | None:
    """Accelerate's plugin for DeepSpeed, as the launcher's environment and the settings say.

    Returns:
        None where the launcher does not ask for DeepSpeed.

    Raises:
        ConfigError: DeepSpeed's configuration cannot be read, contradicts the settings or wants what training has not.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    try:
        asked = {} if file == "none" else HfDeepSpeedConfig(file).config
        plugin = DeepSpeedPlugin()
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"accelerate: DeepSpeed's configuration is refused ({error}).",
            hint="Correct the file that --deepspeed_config_file names, or use --zero_stage in its place.",
        ) from error
    config = plugin.deepspeed_config
    plugin.zero_stage = config["zero_optimization"].setdefault("stage", 0)
    check_deepspeed(asked, plugin.zero_stage, settings, processes=launched_processes())
    fit(config, settings)
    return plugin


def launched_processes() -> int:
    """How many processes the launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_deepspeed(asked: Mapping[str, Any], stage: int, settings: TrainSettings, *, processes: int) -> None:
    """Refuse what training has not, and what contradicts the settings.

    Args:
        asked: The user's file, as it is; empty where flags of the launcher stand for it.
        stage: Of ZeRO.
        settings: Of the run.
        processes: Of the run.

    Raises:
        ConfigError: Names the key of the file, or of the YAML.
    """
    if stage >= WEIGHTS_STAGE:
        raise ConfigError(
            f"accelerate: zero_optimization.stage {stage} spreads the weights too, which training leaves to FSDP.",
            hint="Use stage 2, or launch with --use_fsdp --fsdp_version 2.",
        )
    if settings.mixed_precision == "fp16":
        raise ConfigError(
            "mixed_precision: fp16 does not go with DeepSpeed, which would scale the loss by rules of its own.",
            hint="Use bf16 or no.",
        )
    if stage > 0 and settings.optimizer.lower() in NOT_IN_PIECES:
        raise ConfigError(
            f"optimizer: {settings.optimizer} does not work on the flat pieces of weights that ZeRO makes.",
            hint=f"Use AdamW, or any other than {', '.join(NOT_IN_PIECES)}; or stage 0.",
        )
    for key in _OF_THE_YAML:
        if key in asked:
            raise ConfigError(
                f"accelerate: DeepSpeed's configuration has {key}, which the YAML chooses.",
                hint=f"Take {key} out of DeepSpeed's configuration.",
            )
    for key, wanted in _agreed(settings, processes).items():
        _require(asked, key, wanted)


def _agreed(settings: TrainSettings, processes: int) -> dict[str, Any]:
    """Keys of DeepSpeed that say what the settings say."""
    steps, batch = settings.gradient_accumulation_steps, settings.batch_size
    bf16 = settings.mixed_precision == "bf16"
    return {
        "gradient_accumulation_steps": steps,
        "gradient_clipping": settings.max_grad_norm or 0.0,
        "train_micro_batch_size_per_gpu": batch,
        "train_batch_size": batch * steps * processes,
        "bf16.enabled": bf16,
        "torch_autocast.enabled": bf16,
        "fp16.enabled": False,
        "amp.enabled": False,
        "zero_force_ds_cpu_optimizer": False,
        "managed_gradient_accumulation": True,
    }


def _require(asked: Mapping[str, Any], key: str, wanted: Any) -> None:
    section, _, name = key.rpartition(".")
    found = (asked.get(section) or {} if section else asked).get(name, "auto")
    if found not in ("auto", wanted):
        raise ConfigError(
            f"accelerate: {key} is {found} in DeepSpeed's configuration, and {wanted} by the YAML.",
            hint=f'Leave {key} out of DeepSpeed\'s configuration, or set it to "auto".',
        )


def fit(config: dict[str, Any], settings: TrainSettings) -> None:
    """Put the settings into DeepSpeed's configuration; what does not follow from them stays as it is.

    Weights stay as they are in one process and autocast chooses the precision: DeepSpeed's own bf16 would train
    rounded weights, and the VAE would compute in them too.
    """
    bf16 = settings.mixed_precision == "bf16"
    config |= {
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "gradient_clipping": settings.max_grad_norm or 0.0,
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "train_batch_size": "auto",  # Accelerate multiplies
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        # Without safe modules: their gradients would be added up over the processes in bfloat16.
        "torch_autocast": {"enabled": bf16, "dtype": "bfloat16", "lower_precision_safe_modules": []},
        # Accelerate would otherwise take DeepSpeed's Adam in place of the YAML's optimizer.
        "zero_force_ds_cpu_optimizer": False,
    }
    zero = config["zero_optimization"]
    for key in _SIZED_BY_MODEL:
        if zero.get(key) == "auto":
            del zero[key]


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
