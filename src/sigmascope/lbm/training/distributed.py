"""Training in several processes: agreement between them, sharded tensors, and DeepSpeed's settings.

The processes agree before each step (`Processes`), so that none waits for one that has ended.

The functions from `full_tensor` on handle tensors that FSDP shards over processes (PyTorch's DTensor): they gather them
for files, and shard them again. A plain tensor passes through unchanged, so that training in one process uses the same
code.

Below stage 3 of ZeRO every process has all weights. From stage 1 on, each process holds a piece of the optimizer's
state: all trained weights are laid end to end and cut into as many pieces as there are processes. Checkpoints store
    this state as that of a single process.
"""

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, TypeVar, overload

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, gather_object
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import Tensor, nn
from torch.distributed import DistError
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from sigmascope.errors import ConfigError, OtherProcessError, SigmascopeError
from sigmascope.lbm.samples import Batch
from sigmascope.lbm.training.settings import TrainSettings

Position = TypeVar("Position")
State = dict[str, Any]
"""An optimizer's `state_dict()`: what it holds for each parameter by number, and its groups."""
_log = logging.getLogger(__name__)
_LOST_CONNECTION_WORDS: Final = ("gloo", "nccl", "connection", "socket")
"""What messages of a broken connection hold: gloo raises a bare RuntimeError."""


class Processes:
    """All processes of one training run; with a single process, no messages are sent."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.size: int = accelerator.num_processes

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return the numbers of all processes, a row for each. All call this together."""
        if self.size == 1:
            return [values]
        row = torch.tensor([values], dtype=torch.int64, device=self._accelerator.device)
        rows: list[list[int]] = self._accelerator.gather(row).tolist()
        return rows

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process."""
        return any(row[0] for row in self.gather([int(flag)]))

    def objects(self, value: Any) -> list[Any]:
        """Return the objects of all processes, in order."""
        gathered: list[Any] = [value] if self.size == 1 else gather_object([value])
        return gathered

    @contextmanager
    def together(self) -> Iterator[None]:
        """A failure in any process within the block ends all of them with the same message.

        All processes enter and leave the block together. Inside, none waits for another, so that none can wait in vain.

        Raises:
            OtherProcessError: Another process failed; the message is its message.
        """
        failure: Exception | None = None
        words: str | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failure = error
            known = isinstance(error, SigmascopeError)
            words = str(error) if known else f"{type(error).__name__}: {error}."
        if self.size == 1:
            return
        try:
            failures = self.objects(words)
        except Exception:
            if failure is not None:
                raise failure from None  # the others are gone, so this is the news
            raise
        if failure is not None:
            raise failure
        for number, words in enumerate(failures):
            if words:
                raise OtherProcessError(
                    f"process {number} of {self.size} failed: {words}",
                    hint="See that process's output. Earlier checkpoints are intact.",
                )


@dataclass(frozen=True)
class StepBatches(Generic[Position]):
    """The batches of one optimizer step, in this process.

    Attributes:
        batches: As many in every process.
        samples: Of all processes together; 0 where none of their pictures can be decoded.
        position: Where the data stands after them.
    """

    batches: tuple[Batch, ...]
    samples: int
    position: Position


def step_batches(
    stream: Iterable[tuple[Batch, Position]], size: int, team: Processes
) -> Iterator[StepBatches[Position]]:
    """Group up to `size` batches for each optimizer step, the same number in every process.

    All have as many batches in an epoch, unless they read different data. It then ends for all as soon as any has no
    batch left, and that is said. Where one's data fails, all stop, so that none waits for ever for one that has ended.

    Args:
        stream: Batches of an epoch, each with the position after it.
        size: Batches of an optimizer step; the last one of an epoch may have fewer.
        team: The processes.

    Raises:
        SigmascopeError: Something is wrong with the data.
        OtherProcessError: The data of another process is wrong; the message is its message.
    """
    rest = iter(stream)
    while True:
        with team.together():
            taken = list(islice(rest, size))
        lengths = [len(batch) for batch, _ in taken]
        rows = team.gather([len(taken), *lengths, *[0] * (size - len(taken))])
        count = min(row[0] for row in rows)
        if count < max(row[0] for row in rows):
            _log.warning("Processes read different data: some have batches left where others have none.")
        if count == 0:
            return
        samples = sum(sum(row[1 : 1 + count]) for row in rows)
        yield StepBatches(tuple(batch for batch, _ in taken[:count]), samples, taken[count - 1][1])


@contextmanager
def naming_lost_processes(team: Processes) -> Iterator[None]:
    """Turn the broken connection to a process that has ended into a clear error.

    Raises:
        OtherProcessError: In place of PyTorch's error.
    """
    try:
        yield
    except RuntimeError as error:
        words = str(error)
        is_lost = isinstance(error, DistError) or any(
            word in words.lower() for word in _LOST_CONNECTION_WORDS
        )
        if team.size == 1 or not is_lost:
            raise
        # The first sentence, without the place in gloo's source.
        reason = re.sub(r"^\[\S+\]\s*", "", words).splitlines()[0].partition(". ")[0]
        raise OtherProcessError(
            f"another of the {team.size} processes of this training has ended ({reason}).",
            hint="See that process's output. Earlier checkpoints are intact, and the same command resumes.",
        ) from error


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor. Every process calls this, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards are on the CPU, and collect where the mesh's processes meet.
    parts: DTensor = tensor.detach().to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    gathered: Tensor = parts.full_tensor()
    return gathered


def local_tensor(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


@overload
def gather_state(value: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]: ...
@overload
def gather_state(value: Any, *, keep: bool) -> Any: ...
def gather_state(value: Any, *, keep: bool) -> Any:
    """Nested state with all of its tensors whole; every process calls this.

    Args:
        value: Dicts, lists, tuples, tensors and anything else.
        keep: Whether this process needs the result. If so, sharded tensors are gathered on the CPU; if not, they come
            out empty, so that only one process holds them all.
    """
    if isinstance(value, DTensor):
        full = full_tensor(value)
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(value, Mapping):
        return {key: gather_state(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gather_state(item, keep=keep) for item in value)
    return value


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor like `like`: each process takes its own part, without communication.

    Args:
        tensor: The same in every process, of the shape of `like`.
        like: A parameter.
    """
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    own = distribute_tensor(tensor.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
    return own.to(like.device)


def shard_optimizer_state(state: State, parameters: list[nn.Parameter]) -> State:
    """Shard an optimizer's whole state like its parameters.

    Tensors with a parameter's shape are sharded like it; step counters and other numbers stay the same.
    """
    spread: State = {}
    for number, values in state["state"].items():
        parameter = parameters[number]
        spread[number] = {
            name: shard_like(value, parameter) if getattr(value, "shape", None) == parameter.shape else value
            for name, value in values.items()
        }
    return {**state, "state": spread}


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass left gathered: they would be stale once weights
    change.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


ZERO_WEIGHTS_STAGE: Final = 3
"""The stage of ZeRO that shards the weights too."""
NOT_UNDER_ZERO: Final = ("adafactor", "adagrad", "muon")
"""Optimizers that ZeRO cannot give flat pieces of all weights: two need the shapes of the weights, and in place of
the Adagrad it is given DeepSpeed makes one of its own, which no schedule reaches. All others were tried."""
_FORBIDDEN_KEYS: Final = ("optimizer", "scheduler")
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
        ConfigError: DeepSpeed's configuration cannot be read, contradicts the settings, or asks for something
            unsupported.
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
    """Refuse a configuration that is not supported or contradicts the settings.

    Raises:
        ConfigError: Names the key of the file, or of the YAML.
    """
    if stage >= ZERO_WEIGHTS_STAGE:
        raise ConfigError(
            f"accelerate: zero_optimization.stage {stage} shards the weights too; use FSDP for that.",
            hint="Use stage 2, or launch with --use_fsdp --fsdp_version 2.",
        )
    if settings.mixed_precision == "fp16":
        raise ConfigError(
            "mixed_precision: fp16 does not work with DeepSpeed, which scales the loss by its own rules.",
            hint="Use bf16 or no.",
        )
    if stage > 0 and settings.optimizer.lower() in NOT_UNDER_ZERO:
        raise ConfigError(
            f"optimizer: {settings.optimizer} does not work on the flat shards of weights that ZeRO makes.",
            hint=f"Use AdamW, or any other than {', '.join(NOT_UNDER_ZERO)}; or stage 0.",
        )
    for key in _FORBIDDEN_KEYS:
        if key in asked:
            raise ConfigError(
                f"accelerate: DeepSpeed's configuration has {key}, which the YAML sets.",
                hint=f"Remove {key} from DeepSpeed's configuration.",
            )
    steps, batch = settings.gradient_accumulation_steps, settings.batch_size
    bf16 = settings.mixed_precision == "bf16"
    agreed = {
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
    for key, wanted in agreed.items():
        section, _, name = key.rpartition(".")
        value = (asked.get(section) or {} if section else asked).get(name, "auto")
        if value not in ("auto", wanted):
            raise ConfigError(
                f"accelerate: {key} is {value} in DeepSpeed's configuration, and {wanted} by the YAML.",
                hint=f'Leave {key} out of DeepSpeed\'s configuration, or set it to "auto".',
            )


def fit(config: dict[str, Any], settings: TrainSettings) -> None:
    """Put the settings into DeepSpeed's configuration; other keys stay unchanged.

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
    """Redirect DeepSpeed's warnings from stdout, which is for results, to stderr. Call it after importing DeepSpeed."""
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


class EngineOptimizer:
    """An engine's optimizer with the interface that the loop and checkpoints expect.

    Args:
        engine: The `DeepSpeedEngine` that has taken over `inner`.
        inner: The YAML's optimizer, with one group; from stage 1 on its only parameter is this process's piece.
        parameters: The trained parameters, in the order of `inner`.
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
        """The optimizer's groups; their learning rate is the one that the schedule set."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Clip, change the weights and clear the gradients: the engine does these together."""
        self._engine.step()

    def zero_grad(self) -> None:
        """Do nothing: `step` has cleared the gradients."""

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
        """Continue from the state of a single process's optimizer, and from the model's current weights.

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
