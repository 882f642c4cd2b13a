"""Run a model on calibration inputs, and sum up how each layer's weight affects its output.

The pipeline calls the model as usual. Each call is repeated with gradients, and a random projection is propagated back
through it: a projection of the call's own output or, if `collect_statistics` is given whole samplings, of the
sampling's result. Then an error of an early step counts by its effect at the end.

The repeated call needs as much memory for activations as training, one call at a time; a diffusers model's
`enable_gradient_checkpointing` keeps this small. Weights that are stored in float8 or moved layer by layer stay wide
and on the device until gradients have passed. A weight's gradient is freed once it is summed up; the gradients of a
whole sampling are added up first if all of them together are small.
"""

import inspect
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sigmascope.checkpoints import open_checkpoint, save_safetensors
from sigmascope.errors import CheckpointError, ConfigError, NonFiniteError
from sigmascope.lora.linalg import matrix_shape
from sigmascope.lora.statistics import (
    FULL_UP_TO,
    RANK,
    LayerStatistics,
    ModelStatistics,
    MomentSum,
    sketch_columns,
)
from sigmascope.probes.models import layerwise_casting
from sigmascope.probes.reading import is_out_of_memory
from sigmascope.progress import Progress, no_progress

__all__ = ["UnfinishedSums", "collect_statistics"]

logger = logging.getLogger(__name__)

_LAYERS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PIECE: Final = 1 << 24  # elements of patches at a time: 64 MiB in float32
_MAX_ADDED_UP_BYTES: Final = 4 << 30
"""Gradients of all weights that take more bytes than this are not added up over a sampling; each call counts by
itself."""
_WRITE_INTERVAL_SECONDS: Final = 120.0
"""Least seconds between two writings of unfinished sums."""
_WRAPPED_NAMES: Final = ("base_layer", "_orig_mod")
"""Names that PEFT's adapters and `torch.compile` give to the module that they wrap."""


def collect_statistics(
    model: nn.Module,
    run: Callable[[], object],
    *,
    probes: int = 1,
    calls: int | None = None,
    full_up_to: int = FULL_UP_TO,
    rank: int = RANK,
    seed: int = 0,
    fingerprint: str = "",
    unfinished: "UnfinishedSums | None" = None,
    progress: Progress = no_progress,
) -> ModelStatistics:
    """Sum up second moments for every Linear and convolution layer of a model while a pipeline runs.

    Args:
        model: The denoiser: a module whose calls return a tensor, or a tuple, dict or object whose first item is one.
            Its weights are not changed, and afterwards it is as it was before.
        run: Calls the model, directly or through a pipeline, any number of times. A generator may yield the result of
            its calls since the last yield, such as the latents after the last step, computed with gradients.
            Projections are then of that tensor, and all count alike. If no gradient leads from it to the calls, each
            call's own output is used.
        probes: Random projections of each output.
        calls: How many calls `run` makes, for the progress; None if it is not known.
        full_up_to: Width up to which a layer's moments are kept whole.
        rank: Number of directions kept of wider layers.
        seed: Seed of the projections.
        fingerprint: Fingerprint of the model, for the file.
        unfinished: Sums of a killed run to continue from; `run` starts at its input and reports each finished one to
            it.
        progress: Called after each call.

    Returns:
        The statistics, by the path of the layer in the model.

    Raises:
        ConfigError: The model was not called, has no layers, or returns no tensor; or no gradient came back from the
            result.
        NonFiniteError: NaN or Inf went through a layer; the message names the first.
        Exception: Whatever `run` raises.
    """
    if probes < 1:
        raise ConfigError(f"--probes {probes} measures nothing.", hint="Use 1 or more.")
    if rank < 1 or full_up_to < 1:
        raise ConfigError(f"--rank {rank} and --full_up_to {full_up_to}: both are 1 or more.")
    if getattr(model, "is_cache_enabled", False):
        raise ConfigError(
            f"{type(model).__name__} has a cache that skips layers.", hint="Call disable_cache() on it first."
        )
    if layerwise_casting(model) and getattr(model, "is_gradient_checkpointing", False):
        raise ConfigError(
            f"{type(model).__name__} stores its weights in float8 by layerwise casting, which does not go with "
            "gradient checkpointing.",
            hint="Call disable_gradient_checkpointing() on it, or load it without enable_layerwise_casting().",
        )
    new_sum = _sums(full_up_to, rank, seed)
    known = _layers_of(model)
    of_module = {module: LayerSums(module, new_sum) for module in known.values() if _is_plain(module)}
    sums = {name: of_module.get(module) for name, module in known.items()}
    if not of_module:
        raise ConfigError(
            f"{type(model).__name__} has no Linear or convolution layer.", hint="Pass the denoiser itself."
        )
    watched = _Watched(model, list(of_module.values()), probes, seed, calls, progress)
    with ExitStack() as hooks:
        if unfinished is not None:
            unfinished.begin(watched)
        if inspect.isgeneratorfunction(run):
            hooks.enter_context(frozen(model))
            hooks.enter_context(watched.linked_calls())
            with torch.enable_grad():
                for made in run():
                    watched.take_back_from(made)
        else:
            hooks.enter_context(watched.single_calls())
            run()
    if watched.calls == 0:
        raise ConfigError(
            f"the model ({type(model).__name__}) was not called.",
            hint="Pass the module that the pipeline calls at each step, such as pipe.unet or pipe.transformer.",
        )
    facts = {"calls": watched.calls, "probes": probes, "seed": seed, "full_up_to": full_up_to, "rank": rank}
    return _finished(sums, watched.calls, facts | {"samplings": watched.samplings}, fingerprint)


_SUMS_VERSION: Final = 2  # of what is summed up: sums of another are not gone on with


class UnfinishedSums:
    """The sums so far, kept beside the target, so that a killed run can continue.

    A context manager: leaving it, normally or by an exception, removes the file; a kill leaves it.

    Args:
        target: The file of statistics to make.
        settings: Model, inputs and seeds of the run. The sums of a run with other settings are not used. The file has
            their hash alone, as prompts may be among them.

    Attributes:
        inputs: How many inputs are summed up; the next run starts there.
    """

    def __init__(self, target: Path, settings: Mapping[str, object]) -> None:
        self.path = target.with_name(f".{target.name}.part")
        self.inputs = 0
        told = json.dumps({"scheme": _SUMS_VERSION, **settings}, sort_keys=True, default=str)
        self._settings = sha256(told.encode()).hexdigest()
        self._watched: _Watched | None = None
        self._written = time.monotonic()

    def begin(self, watched: "_Watched") -> None:
        """Continue from the sums in the file, if there is one with the same settings."""
        self._watched = watched
        if not self.path.is_file():
            return
        try:
            with open_checkpoint(self.path) as checkpoint:
                facts = json.loads(checkpoint.metadata["facts"])
                if facts["settings"] != self._settings:
                    return
                for index, layer in enumerate(watched.layers):
                    parts = [checkpoint.tensor(f"{index}.{part}") for part in range(facts["parts"][index])]
                    layer.restore(facts["rows"][index], parts)
            inputs, calls, samplings = (int(facts[name]) for name in ("inputs", "calls", "samplings"))
        except (CheckpointError, KeyError, IndexError, TypeError, ValueError):
            logger.warning("%s: cannot be read; the run begins anew.", self.path)
            for layer in watched.layers:
                layer.restore(0, [])
            return
        self.inputs, watched.calls, watched.samplings = inputs, calls, samplings
        logger.warning("%s: goes on after %d inputs.", self.path.name, self.inputs)

    def input_done(self) -> None:
        """Write the sums if it is time.

        Raises:
            WriteError: They cannot be written.
        """
        self.inputs += 1
        watched = self._watched
        if watched is None or time.monotonic() - self._written < _WRITE_INTERVAL_SECONDS:
            return
        parts = [layer.parts for layer in watched.layers]
        tensors = {
            f"{index}.{number}": part.cpu()
            for index, of_layer in enumerate(parts)
            for number, part in enumerate(of_layer)
        }
        facts = {
            "settings": self._settings,
            "inputs": self.inputs,
            "calls": watched.calls,
            "samplings": watched.samplings,
            "rows": [layer.rows for layer in watched.layers],
            "parts": [len(of_layer) for of_layer in parts],
        }
        save_safetensors(self.path, tensors, {"facts": json.dumps(facts)})
        self._written = time.monotonic()

    def __enter__(self) -> "UnfinishedSums":
        return self

    def __exit__(self, *exception: object) -> None:
        self.path.unlink(missing_ok=True)


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Linear and convolution layers by the names that a checkpoint has for them; a shared one by each of its names."""
    layers: dict[str, nn.Module] = {}
    adapted: list[str] = []  # prefixes of what PEFT has put its adapters around
    for name, module in model.named_modules(remove_duplicate=False):
        inside = next((prefix for prefix in adapted if name.startswith(prefix)), None)
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            adapted.append(f"{name}.")
        elif isinstance(module, _LAYERS) and (inside is None or name == f"{inside}base_layer"):
            layers[".".join(part for part in name.split(".") if part not in _WRAPPED_NAMES)] = module
    return layers


def _is_plain(module: nn.Module) -> bool:
    """Whether it multiplies its weight with what PyTorch's own layer does: a causal convolution pads by itself."""
    if isinstance(module, nn.Linear):
        return module.weight.shape == (module.out_features, module.in_features)  # packed weights are not
    own = next(kind for kind in _LAYERS if isinstance(module, kind))
    is_own = all(getattr(type(module), name) is getattr(own, name) for name in ("forward", "_conv_forward"))
    return is_own and getattr(module, "groups", 1) == 1


def _finished(
    sums: "Mapping[str, LayerSums | None]", calls: int, facts: Mapping[str, Any], fingerprint: str
) -> ModelStatistics:
    layers: dict[str, LayerStatistics] = {}
    finished: dict[LayerSums, LayerStatistics] = {}  # a shared layer has several names
    unmet: list[str] = []
    for name, layer in sums.items():
        if layer is None or not (layer in finished or layer.is_met):
            unmet.append(name)
            continue
        try:
            statistics = finished[layer] = finished.get(layer) or layer.result(calls)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{name}: {error.message}",
                hint="Use float32 or bfloat16 for the model, and check that its pictures are right.",
            ) from error
        if statistics.weight > 0.0:
            layers[name] = statistics
        else:  # as before a projection of zeros
            unmet.append(name)
    if not layers:
        raise ConfigError(
            "no gradient reached any layer of the model.",
            hint="Its forward may disable gradients, or use weights without calling their layers.",
        )
    return ModelStatistics(layers, fingerprint, facts, tuple(unmet))


NewSum = Callable[[int, torch.device], MomentSum]
"""Gives an empty sum over rows of a width."""


def _sums(full_up_to: int, rank: int, seed: int) -> NewSum:
    """Whole sums up to a width, and sketches of wider ones; layers of one width share the sketch's columns."""

    @cache
    def columns(size: int, device: torch.device) -> Tensor:
        return sketch_columns(size, rank, seed + size).to(device)

    def new_sum(size: int, device: torch.device) -> MomentSum:
        return MomentSum(size, device, None if size <= full_up_to else columns(size, device))

    return new_sum


class _Pair(NamedTuple):
    """The sums of one layer: DᵀD over its inputs, DDᵀ over its outputs."""

    inputs: MomentSum
    outputs: MomentSum

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.inputs.parts + self.outputs.parts

    def add(self, gradient: Tensor) -> None:
        self.inputs.add(gradient)
        self.outputs.add(gradient.mT)


class LayerSums:
    """Sums up DᵀD and DDᵀ of one layer while it listens; D are the gradients of its weight.

    Args:
        module: The layer.
        new_sum: Makes its sums.

    Attributes:
        waits: Whether gradients wait for `settle`.
        adds_up: Whether waiting gradients are added up to a single D.
        rows: How many positions a call had.
    """

    def __init__(self, module: nn.Module, new_sum: NewSum) -> None:
        self.waits = self.adds_up = False
        weight = module.weight
        assert isinstance(weight, Tensor)
        self._sizes = matrix_shape(tuple(weight.shape))
        self._module = module
        self._new_sum = new_sum
        self._sums: _Pair | None = None
        self._waiting: _Pair | None = None
        self._gradient: Tensor | None = None
        self.rows = 0
        self._handle: RemovableHandle | None = None

    @property
    def bytes(self) -> int:
        """Bytes of its weight's gradient."""
        return 4 * math.prod(self._sizes)

    @property
    def is_met(self) -> bool:
        """Whether an input went through it and a gradient came back."""
        return self._sums is not None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The sums so far; empty if there are none."""
        return () if self._sums is None else self._sums.parts

    def restore(self, rows: int, parts: Sequence[Tensor]) -> None:
        """Continue from the `rows` and `parts` of another run.

        Raises:
            ValueError: They are of another layer.
        """
        self.rows, self._sums = rows, None
        if not parts:
            return
        self._place(torch.device("cpu"))  # until it is known where the layer runs
        if [part.shape for part in self.parts] != [part.shape for part in parts]:
            raise ValueError("the sums are of other layers")
        for own, part in zip(self.parts, parts, strict=True):
            own.copy_(part)

    def listen(self) -> None:
        """Take part in each call with gradients, until `remove`."""
        self._handle = self._module.register_forward_hook(self._called, with_kwargs=True)

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def felt(self) -> float:
        """‖D‖² of the gradients that wait for `settle`."""
        if self._gradient is not None:
            self._sum_up(self._gradient)
            self._gradient = None
        return 0.0 if self._waiting is None else self._waiting.inputs.trace

    def settle(self, share: float) -> None:
        """Add the waiting gradients to the sums, multiplied by `share`."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        self._place(waiting.parts[0].device)
        for own, part in zip(self.parts, waiting.parts, strict=True):
            own.add_(part, alpha=share)

    def result(self, calls: int) -> LayerStatistics:
        """The moments; the sums are freed.

        Raises:
            NonFiniteError: NaN or Inf was among them.
        """
        assert self._sums is not None
        inputs, outputs = self._sums
        self._sums = None  # those of all layers take more memory than the results
        return LayerStatistics(inputs.result(calls), outputs.result(outputs.trace or 1.0), self.rows // calls)

    def _called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        given = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
        if not (isinstance(given, Tensor) and torch.is_grad_enabled()):
            return output  # where the model itself forbids gradients, none can come back
        if not output.requires_grad:  # nothing before it needs a gradient, as in a time embedding
            output = output.detach().requires_grad_()
        felt: Tensor = _Felt.apply(output, given.detach(), self)  # type: ignore[no-untyped-call]
        return felt

    def add(self, given: Tensor, gradient: Tensor) -> None:
        """Add the weight's gradient for the projection of one call.

        Args:
            given: The layer's input.
            gradient: The gradient at its output.
        """
        out = _rows_out(self._module, gradient).float()
        total = torch.zeros(self._sizes, device=out.device) if self._gradient is None else self._gradient
        done = 0
        with torch.autocast(out.device.type, enabled=False):  # the host's would round what is summed up
            for rows in _rows_in(self._module, given):
                total.addmm_(out[done : done + rows.shape[0]].mT, rows.float())
                done += rows.shape[0]
        self.rows += done
        if self.adds_up:
            self._gradient = total
        else:
            self._sum_up(total)

    def _sum_up(self, gradient: Tensor) -> None:
        if self.waits:
            self._waiting = self._waiting or self._empty(gradient.device)
            self._waiting.add(gradient)
            return
        self._place(gradient.device)
        assert self._sums is not None
        self._sums.add(gradient)

    def _place(self, device: torch.device) -> None:
        """Have the sums on a device: new ones, or those that were elsewhere."""
        before = self.parts
        if before and before[0].device == device:
            return
        self._sums = self._empty(device)
        for own, part in zip(self.parts, before, strict=bool(before)):
            own.copy_(part)

    def _empty(self, device: torch.device) -> _Pair:
        rows, columns = self._sizes
        return _Pair(self._new_sum(columns, device), self._new_sum(rows, device))


class _Felt(torch.autograd.Function):
    """Gives a layer's output on, and the layer its gradient on the way back.

    The input is kept as autograd keeps what it needs, so that a checkpointed block makes it again.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, given: Tensor, layer: LayerSums) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(given)
        return output.clone()  # the model may change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (given,) = ctx.saved_tensors
        ctx.layer.add(given, gradients[0])
        return gradients[0], None, None


class Arguments(NamedTuple):
    """What a call of the model was given, and the autocast that it was made under.

    Gradients of a device pass through a thread of autograd's own, and maybe after the host has left its autocast: what
    is computed again there enters it again.
    """

    positional: tuple[Any, ...]
    named: dict[str, Any]
    autocast: dict[str, tuple[torch.dtype, bool]]

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any], kinds: set[str]) -> "Arguments":
        """Copies of what is given now, and what autocast does on these kinds of devices."""
        autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in sorted(kinds)
        }
        return cls(copied(args), copied(kwargs), autocast)

    @contextmanager
    def host_autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, (dtype, enabled) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield


class _Watched:
    """A model whose calls are made a second time, with gradients, and what its layers sum up then.

    Attributes:
        calls: How many were taken back.
        samplings: How many outcomes of several calls were.
        layers: Whose sums they go into.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[LayerSums],
        probes: int,
        seed: int,
        calls: int | None,
        progress: Progress,
    ) -> None:
        self.calls = self.samplings = 0
        self._model, self.layers = model, layers
        self._probes, self._seed = probes, seed
        self._expected, self._progress = calls, progress
        self._given: list[Arguments] = []

    @contextmanager
    def single_calls(self) -> Iterator[None]:
        """Take back each call's own output, when the host's call is over."""

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._given.append(self._arguments(args, kwargs))  # before the model can change them in place

        def after(_module: nn.Module, _args: object, _kwargs: object, _output: object) -> None:
            self._take_back_alone(self._given.pop())

        with self._hooked(before, after):
            yield

    @contextmanager
    def linked_calls(self) -> Iterator[None]:
        """Let gradients pass through each call, which keeps nothing for them but its arguments."""
        linked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def before(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            linked.append((args, kwargs))
            self._given.append(self._arguments(args, kwargs))
            return copied(args), copied(kwargs)

        def after(_module: nn.Module, _args: object, _kwargs: object, output: object) -> object:
            made = first_tensor(output)
            if made is None:
                return output
            back = partial(self._take_back, self._given[-1])
            anchor = torch.zeros((), requires_grad=True)
            through = _Call.apply(back, made, anchor, *_floating(linked.pop()))  # type: ignore[no-untyped-call]
            return _with_first(output, through)

        with self._hooked(before, after):
            yield

    def take_back_from(self, outcome: object) -> None:
        """Take projections of what the calls since the last time made back through all of them.

        Raises:
            ConfigError: They do not come through.
        """
        made, given = first_tensor(outcome), self._given
        self._given = []
        if made is None or not made.requires_grad:
            for arguments in given:
                self._take_back_alone(arguments)
            return
        weights = sum(layer.bytes for layer in self.layers)
        for layer in self.layers:
            layer.waits, layer.adds_up = True, weights <= _MAX_ADDED_UP_BYTES
        try:
            for number, probe in enumerate(self._projections(made)):
                made.backward(probe, retain_graph=number + 1 < self._probes)  # type: ignore[no-untyped-call]
                self._settle()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"no gradient flows back through sampling: {error}",
                hint='Use --through calls (in Python through="calls").',
            ) from error
        finally:
            for layer in self.layers:
                layer.waits = layer.adds_up = False
        self.samplings += 1

    def _settle(self) -> None:
        """Let each outcome count alike: ‖D‖² of one picture may be twenty times that of another."""
        felt = math.fsum(layer.felt() for layer in self.layers)
        is_usable = math.isfinite(felt) and felt > 0.0  # with NaN, only its own layer is to tell of it
        for layer in self.layers:
            layer.settle(1.0 / felt if is_usable else 1.0)

    def _take_back_alone(self, arguments: Arguments) -> None:
        self._take_back(arguments, None)

    def _take_back(self, arguments: Arguments, gradient: Tensor | None) -> list[Tensor | None]:
        """Call the model again, and take a gradient of its output back, or without one random projections.

        Returns:
            The gradients of its floating-point arguments.
        """
        model = self._model
        devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
        # Dropout of a model in training must not move the host's random numbers.
        hooks = ExitStack()
        with (
            torch.random.fork_rng(devices=list(devices)),
            torch.inference_mode(False),
            torch.enable_grad(),
            arguments.host_autocast(),
            frozen(model),
            hooks,
        ):
            leaves: list[Tensor] = []
            args, kwargs = (_tracked(copied(part), leaves) for part in arguments[:2])
            for layer in self.layers:
                layer.listen()
                hooks.callback(layer.remove)
            if layerwise_casting(
                model
            ):  # narrows each weight after its call, where gradients still need it wide
                hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _as_it_is))
            inner = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped, without its graphs
            output = first_tensor(inner.forward(*args, **kwargs))
            if output is None:
                raise ConfigError(
                    f"{type(model).__name__} returns no tensor.",
                    hint="Pass the denoiser itself, not the pipeline.",
                )
            if output.requires_grad:  # a layer was met, and under gradients
                if gradient is not None:
                    output.backward(gradient)  # type: ignore[no-untyped-call]
                else:
                    for number, probe in enumerate(self._projections(output)):
                        output.backward(probe, retain_graph=number + 1 < self._probes)  # type: ignore[no-untyped-call]
        self.calls += 1
        self._progress(self.calls, max(self.calls, self._expected) if self._expected else 0, "call")
        return [leaf.grad for leaf in leaves]

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        kinds = {"cpu", *(weight.device.type for weight in itertools.islice(self._model.parameters(), 1))}
        return Arguments.of_call(args, kwargs, kinds - {"meta"})

    def _projections(self, output: Tensor) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._seed + 7919 * self.calls)
        for _ in range(self._probes):
            yield torch.randn(output.shape, generator=generator).to(output)

    @contextmanager
    def _hooked(self, before: Any, after: Any) -> Iterator[None]:
        handles = [
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Call(torch.autograd.Function):
    """A call of the model as one step of autograd, which makes the call again on the way back."""

    @staticmethod
    def forward(
        ctx: Any, back: Callable[[Tensor], list[Tensor | None]], made: Tensor, *_given: Tensor
    ) -> Tensor:
        ctx.back = back
        return made.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(gradients[0])


def _floating(value: Any) -> Iterator[Tensor]:
    """The tensors of `_tracked`'s leaves, in their order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif type(value) in (dict, list, tuple):
        for item in value.values() if type(value) is dict else value:
            yield from _floating(item)


def _with_first(output: Any, tensor: Tensor) -> Any:
    """The same output with another first tensor."""
    if isinstance(output, Tensor):
        return tensor
    if type(output) in (list, tuple):
        index = next(index for index, item in enumerate(output) if first_tensor(item) is not None)
        return type(output)([*output[:index], _with_first(output[index], tensor), *output[index + 1 :]])
    items = output if isinstance(output, dict) else vars(output)
    name = next(name for name, item in items.items() if first_tensor(item) is not None)
    changed = _with_first(items[name], tensor)
    if isinstance(
        output, dict
    ):  # outputs of diffusers and transformers are dicts that know their items as attributes
        output[name] = changed
    else:
        setattr(output, name, changed)
    return output


def checkpoint_gradients(model: nn.Module) -> None:
    """Switch on a diffusers model's gradient checkpointing: blocks are computed twice, and fewer activations are kept.

    Raises:
        ConfigError: It cannot.
    """
    try:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"{type(model).__name__} has no gradient checkpointing.",
            hint="Leave out --gradient_checkpointing, or make smaller pictures.",
        ) from error


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Within the block no weight gets a gradient, which would take as much memory as the model; buffers are
    restored.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # A batch norm in training counts what goes through it.
    buffers = [
        (buffer, buffer.clone())
        for module in model.modules()
        if module.training
        for buffer in module.buffers(recurse=False)
    ]
    try:
        for name in trained:
            model.get_parameter(name).requires_grad_(False)
        yield
    finally:
        for name in trained:  # by name: offloading puts other objects in their places
            model.get_parameter(name).requires_grad_(True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def copied(value: Any) -> Any:
    """The same arguments with copied tensors, made outside inference mode so that autograd can use them."""
    if isinstance(value, Tensor):
        with torch.inference_mode(False), torch.no_grad():
            return value.detach().clone()
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def _tracked(value: Any, leaves: list[Tensor]) -> Any:
    """The same with gradients, which go to `leaves`. What is given is none of them: a leaf cannot be changed in place."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        leaves.append(value.requires_grad_())
        return value + 0
    if type(value) is dict:
        return {key: _tracked(item, leaves) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_tracked(item, leaves) for item in value)
    return value


def first_tensor(output: object) -> Tensor | None:
    """A call's result, or the first tensor in it."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    elif not isinstance(output, list | tuple):
        output = list(vars(output).values()) if hasattr(output, "__dict__") else []
    return next((found for item in output if (found := first_tensor(item)) is not None), None)


def _rows_in(module: nn.Module, given: Tensor) -> Iterator[Tensor]:
    """What the weight is multiplied with, (positions, columns of the weight's matrix), a piece at a time."""
    given = given.detach()
    if isinstance(module, nn.Linear):
        yield given.reshape(-1, given.shape[-1])
        return
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    dimensions = len(module.kernel_size)
    batched = given if given.dim() == dimensions + 2 else given[None]
    padding = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = nn.functional.pad(batched, padding, mode=mode)
    patches = padded
    for axis, (kernel, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        reach = dilation * (kernel - 1) + 1
        patches = patches.unfold(axis + 2, reach, stride)[..., ::dilation]
    # (batch, channels, positions…, kernel…) to (batch, positions…, channels, kernel…)
    order = [0, *range(2, 2 + dimensions), 1, *range(2 + dimensions, 2 + 2 * dimensions)]
    patches = patches.permute(order)
    columns = math.prod(patches.shape[1 + dimensions :])
    step = max(1, _PIECE // max(1, columns * math.prod(patches.shape[2 : 1 + dimensions])))
    for picture in patches:
        for start in range(0, picture.shape[0], step):
            yield picture[start : start + step].reshape(-1, columns)


def _rows_out(module: nn.Module, gradient: Tensor) -> Tensor:
    """(positions, rows of the weight's matrix)."""
    if isinstance(module, nn.Linear):
        return gradient.reshape(-1, gradient.shape[-1])
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    batched = gradient if gradient.dim() == len(module.kernel_size) + 2 else gradient[None]
    return batched.movedim(1, -1).reshape(-1, batched.shape[1])
