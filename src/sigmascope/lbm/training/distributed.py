"""What several processes must agree on before each step, so that none waits for another that has ended.

The functions from `whole` on serve tensors that FSDP spreads over processes (PyTorch's DTensor): made whole for
files, and spread again from them. A plain tensor passes through them as it is, so that the same code serves training
in one process.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, TypeVar, overload

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed import DistError
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from sigmascope.errors import DataError, OtherProcessError, SigmascopeError
from sigmascope.lbm.data import Batch

Position = TypeVar("Position")
State = dict[str, Any]
"""An optimizer's `state_dict()`: what it holds for each parameter by number, and its groups."""

_FAILED: Final = -1
"""Stands for a batch's length where there is none because of an error."""
_LOST: Final = ("gloo", "nccl", "connection", "socket")
"""What messages of a broken connection hold: gloo raises a bare RuntimeError."""


class Team:
    """All processes of one training run; a single one is a team too, and talks to nobody."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.size: int = accelerator.num_processes

    def gather(self, values: list[int]) -> list[list[int]]:
        """Give everybody's numbers, a row for each process. All call this together."""
        if self.size == 1:
            return [values]
        row = torch.tensor([values], dtype=torch.int64, device=self._accelerator.device)
        rows: list[list[int]] = self._accelerator.gather(row).tolist()
        return rows

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return any(row[0] for row in self.gather([int(flag)]))

    def objects(self, value: Any) -> list[Any]:
        """Give everybody's object, by process."""
        found: list[Any] = [value] if self.size == 1 else gather_object([value])
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails in any process within the block ends all of them, and says the same everywhere.

        All enter the block and leave it together; within it none waits for another, so that none can wait in vain.

        Raises:
            OtherProcessError: It failed in another process; says what that one said.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failure = error
        if self.size > 1:
            self._end_together(failure)

    def _end_together(self, failure: Exception | None) -> None:
        """Raise in every process where there is a failure in any. All call this together."""
        try:
            said = self.objects(None if failure is None else _failure_text(failure))
        except Exception:
            if failure is not None:
                raise failure from None  # the others are gone, so this is the news
            raise
        if failure is not None:
            raise failure
        if told := next(((number, words) for number, words in enumerate(said) if words), None):
            raise OtherProcessError(
                f"process {told[0]} of {self.size} failed: {told[1]}",
                hint="The checkpoints written before are intact; see what that process says.",
            )


def _failure_text(failure: Exception) -> str:
    return str(failure) if isinstance(failure, SigmascopeError) else f"{type(failure).__name__}: {failure}."


@dataclass(frozen=True)
class Group(Generic[Position]):
    """The batches of one optimizer step, in this process.

    Attributes:
        batches: As many in every process.
        samples: Of all processes together.
        position: Where this process's data stands after them.
    """

    batches: tuple[Batch, ...]
    samples: int
    position: Position


def groups(stream: Iterable[tuple[Batch, Position]], size: int, team: Team) -> Iterator[Group[Position]]:
    """Join up to `size` batches for each optimizer step, as many in every process.

    The epoch ends for all as soon as any process has no batch left; what the others still had stays unused. Where
    one's data fails, all stop, so that none waits for ever for one that has ended.

    Args:
        stream: Batches of an epoch, each with the position after it.
        size: Batches of an optimizer step; the last one of an epoch may have fewer.
        team: The processes.

    Raises:
        DataError: Another process's data failed; says what it said.
        SigmascopeError: Whatever is wrong with the data of this one.
    """
    rest = iter(stream)
    while True:
        taken, failure = _taken(rest, size)
        lengths = [len(batch) for batch, _ in taken]
        rows = team.gather([_FAILED] * size if failure else lengths + [0] * (size - len(lengths)))
        if any(_FAILED in row for row in rows):
            raise _agreed_failure(failure, team)
        count = min(sum(1 for length in row if length) for row in rows)
        if count == 0:
            return
        samples = sum(sum(row[:count]) for row in rows)
        yield Group(tuple(batch for batch, _ in taken[:count]), samples, taken[count - 1][1])


def _taken(
    rest: Iterator[tuple[Batch, Position]], size: int
) -> tuple[list[tuple[Batch, Position]], SigmascopeError | None]:
    """The next batches, or why there are none."""
    try:
        return list(islice(rest, size)), None
    except SigmascopeError as error:
        return [], error


def _agreed_failure(own: SigmascopeError | None, team: Team) -> SigmascopeError:
    """What this process raises. All call this together."""
    said = team.objects(None if own is None else str(own))
    if own is not None:
        return own
    number, words = next((number, words) for number, words in enumerate(said) if words)
    return DataError(
        f"the data of process {number} of {team.size} failed: {words}", hint="See what that process says."
    )


@contextmanager
def naming_lost_processes(team: Team) -> Iterator[None]:
    """Say it plainly when a process is gone in whose place the system reports a broken connection.

    Raises:
        OtherProcessError: In place of what PyTorch says of it.
    """
    try:
        yield
    except RuntimeError as error:
        if team.size == 1 or not _is_of_connection(error):
            raise
        raise OtherProcessError(
            f"another of the {team.size} processes of this training has ended ({_connection_reason(error)}).",
            hint="See what that process says; the checkpoints written before are intact, and the same command goes on.",
        ) from error


def _is_of_connection(error: RuntimeError) -> bool:
    return isinstance(error, DistError) or any(word in str(error).lower() for word in _LOST)


def _connection_reason(error: RuntimeError) -> str:
    """The first sentence, without the place in gloo's source."""
    return re.sub(r"^\[\S+\]\s*", "", str(error)).splitlines()[0].partition(". ")[0]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Every process calls this, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards are on the CPU, and collect where the mesh's processes meet.
    parts: DTensor = tensor.detach().to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    gathered: Tensor = parts.full_tensor()
    return gathered


def here(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


@overload
def collected(value: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]: ...
@overload
def collected(value: Any, *, keep: bool) -> Any: ...
def collected(value: Any, *, keep: bool) -> Any:
    """Nested state with all of its tensors whole; every process calls this.

    Args:
        value: Dicts, lists, tuples, tensors and anything else.
        keep: Whether this process needs the result. Where it does not, spread tensors come out empty, so that one
            process alone holds them all; where it does, they are on the CPU.
    """
    if isinstance(value, DTensor):
        full = whole(value)
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(value, Mapping):
        return {key: collected(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(collected(item, keep=keep) for item in value)
    return value


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like` is spread: each process takes its own part, and nobody waits for another.

    Args:
        tensor: The same in every process, of the shape of `like`.
        like: A parameter.
    """
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    own = distribute_tensor(tensor.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
    return own.to(like.device)


def spread_optimizer_state(state: State, parameters: list[nn.Parameter]) -> State:
    """An optimizer's whole state as its parameters are spread.

    What has a parameter's shape is spread as it is; counters of steps and other numbers stay.

    Args:
        state: `state_dict()` with whole tensors.
        parameters: In the optimizer's order.
    """
    return {
        **state,
        "state": {
            number: {name: _like(value, parameters[number]) for name, value in values.items()}
            for number, values in state["state"].items()
        },
    }


def _like(value: Any, parameter: nn.Parameter) -> Any:
    return spread(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward one left gathered: it would be stale once weights change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
