"""The peak memory of an encoding or decoding, predicted before it begins.

A twin of the VAE is run in its stead: the same layers without weights, rebuilt from its config or copied. The VAE
itself is never called, and nothing about it changes. The twin is on PyTorch's "meta" device, where tensors have a size
but no content. Every tensor counts until it is freed, so that the count is what an allocator would have seen.

Past runs, where there are some, correct the count by what they really took (`learn`).
"""

import copy
import inspect
import math
import statistics
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from sigmascope.pipeline.model_state import tensors_on
from sigmascope.pipeline.tile_plan import TilePlan
from sigmascope.pipeline.vae_adapters import decoded, encoded
from sigmascope.probes.reading import attempt, describe
from sigmascope.records.latents import (
    NEEDS_TILES,
    RECORD_FACT,
    Basis,
    Direction,
    EncodingRecord,
    Strategy,
    StrategyAttempt,
    encoding_record,
)
from sigmascope.records.memory import MIB, MemorySnapshot
from sigmascope.records.run import Run
from sigmascope.stages.latent_facts import inner_vae

MARGIN_ON_ACCELERATOR = 0.1
MARGIN_IN_RAM = 0.25
"""Shares of a prediction that must be free on top of it, for what allocators waste."""
_FEWEST_AXES = 4
"""Batch, channels, height, width."""
SMALLEST_BYTES = 64 * MIB
"""Below this a process's memory says more of what it had kept from before than of the attempt."""
_META = torch.device("meta")
Switch = tuple[str, bool | int | float]
"""An attribute of a VAE that its config does not have, such as `use_slicing`, with its value."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Peak memory beyond what is in use when an attempt begins.

    Attributes:
        bytes: The peak; None if it could not be predicted, with the reason in `unavailable`.
        basis: "config" if counted from the VAE's layers, "learned" if past runs corrected that.
        tensor_bytes: Of these, those of tensors; the rest is workspace of convolutions, and weights.
        weights_bytes: Weights that the attempt is to move.
        unavailable: Reasons.
    """

    bytes: int | None = None
    basis: Basis | None = None
    tensor_bytes: int | None = None
    weights_bytes: int = 0
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planned:
    """An attempt that is to be made.

    Attributes:
        shape: Of the whole input: (batch, channels, [frames,] height, width), pixels or latents.
        direction: Whether it encodes or decodes.
        strategy: By which strategy.
        tile: The tiles; None: at once.
        dtype: Of the weights and the computation; None: the VAE's own.
        device_type: Where it runs, such as "cuda".
        batch_at_once: Parts of the batch put through the VAE together; None: one if in tiles, else all.
        moved_weights_bytes: Weights that are copied to where it runs.
        together: Whether tiles meet at norms. On a CPU, those that wait are part of the peak.
    """

    shape: tuple[int, ...]
    direction: Direction = "encoding"
    strategy: Strategy = "direct"
    tile: TilePlan | None = None
    dtype: torch.dtype | None = None
    device_type: str = "cpu"
    batch_at_once: int | None = None
    moved_weights_bytes: int = 0
    together: bool = False

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of what the VAE is given at once."""
        batch, *middle = self.shape[:-2]
        at_once = self.batch_at_once or (batch if self.tile is None else 1)
        sides = self.shape[-2:] if self.tile is None else self._tile_sides(self.tile)
        return (min(at_once, batch), *middle, *sides)

    def _tile_sides(self, tile: TilePlan) -> tuple[int, int]:
        if self.direction == "encoding":
            return tile.largest_input
        rows, columns = tile.rows, tile.columns
        return min(rows.tile, rows.length), min(columns.tile, columns.length)


@dataclass(frozen=True, slots=True)
class Kind:
    """What two attempts must have in common for one to predict the other."""

    class_name: str
    direction: Direction
    strategy: Strategy
    device_type: str


@dataclass(frozen=True, slots=True)
class Experience:
    """What was learned, by kind of attempt.

    Attributes:
        ratios: Measured peaks over those counted from the config.
        rates: Measured bytes for each element (pixels or latents, all channels) that the VAE was given at once.
    """

    ratios: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    rates: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)

    def peak(self, kind: Kind, elements: int, counted_bytes: int | None) -> int | None:
        """The peak to expect: what was counted times the median ratio, or the median rate times the size.

        Returns:
            Bytes, or None if nothing was learned of that kind.
        """
        known, factor = (self.rates, elements) if counted_bytes is None else (self.ratios, counted_bytes)
        values = known.get(kind)
        return None if not values else round(statistics.median(values) * factor)


def predict_peak(vae: object, wanted: Planned, experience: Experience | None = None) -> Prediction:
    """Predict the peak memory of an attempt. The VAE is neither called nor changed; nothing is raised.

    A copy of what is put through the VAE at once is part of the peak, since the caller's may be elsewhere or
    of another dtype. So are the output, in tiles its sums in float32, and the weights that are to be moved.

    Args:
        vae: A diffusers VAE, any module with `encode` and `decode`, or ComfyUI's VAE.
        wanted: What is to be done.
        experience: From `learn`.
    """
    from_layers = _predicted_from_layers(vae, wanted)
    if experience is None or len(wanted.shape) < _FEWEST_AXES:
        return from_layers
    kind = Kind(type(inner_vae(vae)).__name__, wanted.direction, wanted.strategy, wanted.device_type)
    learned = experience.peak(kind, math.prod(wanted.part), from_layers.bytes)
    return from_layers if learned is None else replace(from_layers, bytes=learned, basis="learned")


def _predicted_from_layers(vae: object, wanted: Planned) -> Prediction:
    weights = wanted.moved_weights_bytes
    if len(wanted.shape) < _FEWEST_AXES:
        reason = f"a shape of {len(wanted.shape)} axes does not have batch, channels, height and width"
        return Prediction(None, None, None, weights, dict.fromkeys(("bytes", "tensor_bytes"), reason))
    try:
        own_tiles = wanted.tile is None
        run = dry_run(vae, wanted.part, wanted.direction, wanted.dtype, own_tiles=own_tiles)
    except NoTwinError as error:
        own = _own_estimate(vae, wanted)
        gaps = dict.fromkeys(("bytes", "tensor_bytes") if own is None else ("tensor_bytes",), str(error))
        return Prediction(own, None if own is None else "config", None, weights, gaps)
    total = _with_what_is_around(run, wanted)
    tensors = total - weights - run.peak_bytes + run.tensor_bytes
    return Prediction(total, "config", tensors, weights)


class NoTwinError(Exception):
    """Why a VAE cannot be run without its weights."""


def _own_estimate(vae: object, wanted: Planned) -> int | None:
    """What ComfyUI's VAE estimates when it makes room for itself."""
    reckon = getattr(
        vae, "memory_used_encode" if wanted.direction == "encoding" else "memory_used_decode", None
    )
    dtype = wanted.dtype or getattr(inner_vae(vae), "vae_dtype", None)
    if not callable(reckon) or dtype is None:
        return None
    reckoned = attempt(lambda: int(reckon(wanted.part, dtype))).value
    return None if reckoned is None else reckoned + wanted.moved_weights_bytes


@dataclass(frozen=True, slots=True)
class DryRun:
    """The most that a twin held, not counting its input, and what came out.

    Attributes:
        tensor_bytes: All tensors.
        peak_bytes: With the workspace of convolutions.
        output_shape: Of the latent, of the parameters of its distribution, or of the pictures.
        output_itemsize: Bytes of one of its elements.
        result_shape: Of the latent or the pictures, once the distribution's mode is taken.
        at_norms: As of `Counted`.
    """

    tensor_bytes: int
    peak_bytes: int
    output_shape: tuple[int, ...]
    output_itemsize: int
    result_shape: tuple[int, ...]
    at_norms: tuple[tuple[int, int], ...] = ()


def _with_what_is_around(part_run: DryRun, wanted: Planned) -> int:
    """The dry run of a part, the copy of its input, and the output that all parts are put together in."""
    itemsize = part_run.output_itemsize
    total = part_run.peak_bytes + math.prod(wanted.part) * itemsize
    parts = -(-wanted.shape[0] // wanted.part[0])
    whole = math.prod(part_run.output_shape)
    if wanted.tile is not None:
        size = wanted.tile.size(latents=wanted.direction == "encoding")
        whole = math.prod(part_run.output_shape[:-2]) * math.prod(size)
        total += whole * max(itemsize, 4) if wanted.tile.count > 1 else 0
        if wanted.together and wanted.device_type == "cpu":
            total += _waiting_bytes(part_run, wanted.tile)
    if parts > 1:
        total += whole * itemsize * parts
    return total + wanted.moved_weights_bytes


def _waiting_bytes(part_run: DryRun, tile: TilePlan) -> int:
    """What tiles hold that wait at a norm, with the features of the whole, at this norm and at the one before."""
    tiled = math.prod(axis.tile * len(axis.starts) for axis in (tile.rows, tile.columns))
    share = tile.rows.length * tile.columns.length / tiled
    waiting = [
        (tile.count - 1) * held + 2 * share * tile.count * features for held, features in part_run.at_norms
    ]
    return round(max(waiting, default=0.0)) if tile.count > 1 else 0


def fits(prediction: Prediction, memory: MemorySnapshot, device: str | None = None) -> tuple[bool, str]:
    """Whether a predicted peak has room, and the numbers behind it as a sentence.

    Beyond the prediction, a quarter of it must be free in RAM, or a tenth on a device. If something is unknown, the
    answer is that it fits, and the sentence says what is unknown.

    Args:
        prediction: From `predict_peak`.
        memory: Read just before.
        device: An accelerator such as "cuda:0"; None or "cpu" is the machine's RAM.
    """
    if prediction.bytes is None:
        why = prediction.unavailable.get("bytes", "no reason is known")
        return True, f"Its peak could not be predicted: {why}."
    if device in (None, "cpu"):
        where, free, margin = "RAM", memory.ram_available_bytes, MARGIN_IN_RAM
    else:
        where, free, margin = str(device), _free_on(str(device), memory), MARGIN_ON_ACCELERATOR
    if free is None:
        return (
            True,
            f"How much {where if where == 'RAM' else f'memory of {where}'} is free could not be read.",
        )
    needed = int(prediction.bytes * (1 + margin))
    room = needed <= free
    said = f"A peak of {prediction.bytes / MIB:,.0f} MB is expected ({prediction.basis})"
    return room, f"{said}; {'' if room else 'only '}{free / MIB:,.0f} MB of {where} are free."


def _free_on(device: str, memory: MemorySnapshot) -> int | None:
    current = memory.current_device or ""
    if ":" not in device and current.startswith(f"{device}:"):  # without a number, the current one is meant
        device = current
    there = memory.accelerator(device)
    if there.free_bytes is None:
        return None
    return there.free_bytes + (there.reserved_bytes or 0) - (there.allocated_bytes or 0)


def dry_run(
    vae: object,
    shape: tuple[int, ...],
    direction: Direction,
    dtype: torch.dtype | None = None,
    *,
    own_tiles: bool = True,
) -> DryRun:
    """Encode or decode with a twin of the VAE, and count the bytes.

    Args:
        vae: A module, or what holds one: ComfyUI's VAE, a pipeline.
        shape: Of what goes in.
        direction: Whether to encode or to decode.
        dtype: Of the weights and of what goes in; None: the VAE's own.
        own_tiles: Whether the VAE cuts tiles of its own, if it is set to; False for a tile that was cut already.

    Raises:
        NoTwinError: It cannot be rebuilt, or its twin cannot be run.
    """
    module = _module_of(vae)
    wanted = dtype or _dtype_of(module)
    try:
        if hasattr(type(module), "from_config"):
            return _dry_run_of_recipe(_recipe_of(module, own_tiles), shape, direction, wanted)
        return _run_twin(_cast(_copy_without_weights(module, own_tiles), wanted), shape, direction, wanted)
    except Exception as error:  # the caller's model may raise anything
        raise NoTwinError(f"its layers could not be run without weights: {describe(error)}") from error


def _module_of(vae: object) -> nn.Module:
    inner = inner_vae(vae)
    module = inner if isinstance(inner, nn.Module) else getattr(inner, "first_stage_model", None)
    if not isinstance(module, nn.Module):
        raise NoTwinError(f"{type(vae).__name__} is not a module, so its layers cannot be counted")
    return module


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


@dataclass(frozen=True, slots=True)
class _Recipe:
    kind: type
    described: str
    switches: tuple[Switch, ...]
    config: Mapping[str, Any] = field(compare=False)


@lru_cache(maxsize=256)
def _dry_run_of_recipe(
    recipe: _Recipe, shape: tuple[int, ...], direction: Direction, dtype: torch.dtype
) -> DryRun:
    kind: Any = recipe.kind
    with _META:
        twin: nn.Module = kind.from_config(dict(recipe.config))
    own = vars(twin)
    own.update((name, value) for name, value in recipe.switches if name in own)
    return _run_twin(_cast(twin, dtype), shape, direction, dtype)


def _run_twin(twin: Any, shape: tuple[int, ...], direction: Direction, dtype: torch.dtype) -> DryRun:
    frames = _streamed_frames(twin, shape, direction)
    if frames is not None:
        few, more = (_run_twin(twin, (*shape[:2], count, *shape[3:]), direction, dtype) for count in frames)
        return _continued(few, more, (shape[2] - frames[0]) // (frames[1] - frames[0]))
    twin.eval()
    source = torch.empty(shape, dtype=dtype, device=_META)
    if direction == "encoding":
        counted_run = counted(lambda: twin.encode(source))
        output = encoded(counted_run.result)
        made, result = output.tensor, output.latent(sample=False, generator=None)
    else:
        counted_run = counted(lambda: twin.decode(source, **_frame_count(twin, shape)))
        made = result = decoded(counted_run.result)
    sizes = tuple(made.shape), made.element_size(), tuple(result.shape)
    return DryRun(counted_run.tensor_bytes, counted_run.peak_bytes, *sizes, at_norms=counted_run.at_norms)


def _streamed_frames(twin: Any, shape: tuple[int, ...], direction: Direction) -> tuple[int, int] | None:
    """Two numbers of frames from which any higher one follows, of causal VAEs that work chunk by chunk.

    Each further chunk of theirs (WAN's are 4 frames, 1 of the latent) adds its input and output to the peak and
    nothing else, as the caches of features are full after three.
    """
    if len(shape) != 5 or not hasattr(twin, "clear_cache"):
        return None
    few, step = (9, 4) if direction == "encoding" else (4, 1)
    whole_chunks = (shape[2] - few) % step == 0
    return (few, few + step) if shape[2] > few + step and whole_chunks else None


def _continued(few: DryRun, more: DryRun, steps: int) -> DryRun:
    """The straight line through two dry runs, at `steps` times their distance."""

    def shape(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a + steps * (b - a) for a, b in zip(first, second, strict=True))

    return DryRun(
        few.tensor_bytes + steps * (more.tensor_bytes - few.tensor_bytes),
        few.peak_bytes + steps * (more.peak_bytes - few.peak_bytes),
        shape(few.output_shape, more.output_shape),
        few.output_itemsize,
        shape(few.result_shape, more.result_shape),
    )


def _frame_count(twin: Any, shape: tuple[int, ...]) -> dict[str, int]:
    """Decoders that mix the pictures of a batch must be told how many belong together."""
    return {"num_frames": shape[0]} if "num_frames" in inspect.signature(twin.decode).parameters else {}


def _cast(twin: nn.Module, dtype: torch.dtype) -> nn.Module:
    """To a dtype throughout: a class's own `.to` may keep a part in float32."""
    apply: Callable[[Callable[[Tensor], Tensor]], nn.Module] = twin._apply
    return apply(lambda tensor: tensor.to(_META, dtype if tensor.is_floating_point() else tensor.dtype))


def _keeps_tiling(module: object, own_tiles: bool) -> bool:
    return own_tiles or type(module).__name__ in NEEDS_TILES


def _recipe_of(module: Any, own_tiles: bool) -> _Recipe:
    """With its switches: slicing and the like, which are attributes and not in the config."""
    config: dict[str, Any] = dict(module.config)
    own = {name: value for name, value in vars(module).items() if name != "training"}
    if "use_tiling" in own and not _keeps_tiling(module, own_tiles):
        own["use_tiling"] = False
    switches = tuple((name, value) for name, value in own.items() if isinstance(value, bool | int | float))
    return _Recipe(type(module), repr(config), switches, config)


def _copy_without_weights(module: nn.Module, own_tiles: bool) -> nn.Module:
    """Its layers without weights and hooks: whoever put hooks on must not hear of this run."""
    tensors = (tensor for part in module.modules() for tensor in tensors_on(part))
    memo: dict[int, Any] = {id(tensor): _without_content(tensor) for tensor in tensors}
    twin: nn.Module = copy.deepcopy(module, memo)
    if getattr(twin, "use_tiling", False) and not _keeps_tiling(module, own_tiles):
        vars(twin)["use_tiling"] = False
    for part in twin.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
        _as_its_class_has_it(part)
    return twin


def _without_content(weight: Tensor) -> Tensor:
    empty = torch.empty_like(weight, device=_META, requires_grad=False)
    return nn.Parameter(empty, requires_grad=False) if isinstance(weight, nn.Parameter) else empty


def _as_its_class_has_it(part: nn.Module) -> None:
    """Without functions in the places of its methods: they may belong to the VAE itself."""
    own = vars(part)
    for name in [name for name, value in own.items() if callable(value) and hasattr(type(part), name)]:
        del own[name]


@dataclass(frozen=True, slots=True)
class Counted:
    """What a dry run gave.

    Attributes:
        result: What the code returned, on the meta device.
        tensor_bytes: The most that its tensors held at one time, its inputs not counted.
        peak_bytes: The same with what convolutions take for themselves while they run.
        at_norms: At each group norm, what was held beside its features, and these.
    """

    result: Any
    tensor_bytes: int
    peak_bytes: int
    at_norms: tuple[tuple[int, int], ...] = ()


def counted(code: Callable[[], object]) -> Counted:
    """Run code whose tensors are on the meta device, and count.

    A convolution takes as much again as its input and weight, to lay them out as its kernel wants them; that
    is what oneDNN was measured to take. Attention is counted as the fused kernels that never hold the matrix
    of all pairs.
    """
    live = _LiveBytes()
    layers = _Layers(live)
    with _disable_current_modes(), torch.no_grad(), _META, layers, live:
        result = code()
    return Counted(result, live.highest, live.highest_with_workspace, tuple(layers.at_norms))


class FusedAttention(TorchFunctionMode):
    """Takes attention as one operation, as fused kernels do; on the meta device it would hold the matrix of all pairs."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
        return self.attention(named["query"], named["key"], named["value"])

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A tensor like the result."""
        return query.new_empty(*query.shape[:-1], value.shape[-1])


class _Layers(FusedAttention):
    """Notes what is held at each group norm."""

    def __init__(self, live: "_LiveBytes") -> None:
        super().__init__()
        self._live = live
        self.at_norms: list[tuple[int, int]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.group_norm and args:
            features = nbytes_of(args[0])
            self.at_norms.append((max(self._live.now - features, 0), features))
        return super().__torch_function__(func, types, args, kwargs)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the storages that are alive, after each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.highest = self.highest_with_workspace = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in _tensors_in((args, kwargs)):
            self._count(tensor.untyped_storage(), made_here=False)
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(output):
            self._count(tensor.untyped_storage(), made_here=True)
        self.highest = max(self.highest, self.now)
        self.highest_with_workspace = max(self.highest_with_workspace, self.now + _workspace(func, args))
        return output

    def _count(self, storage: torch.UntypedStorage, *, made_here: bool) -> None:
        """Count a storage once; of what is given, views are made that must not count as new."""
        key = id(storage)
        if key in self._alive:
            return
        nbytes = storage.nbytes() if made_here else 0
        self._alive[key] = weakref.ref(storage, partial(self._let_go, key, nbytes))
        self.now += nbytes

    def _let_go(self, key: int, nbytes: int, _: object) -> None:
        del self._alive[key]
        self.now -= nbytes


def _tensors_in(values: object) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _workspace(func: Any, args: tuple[Any, ...]) -> int:
    if getattr(func, "overloadpacket", None) is not torch.ops.aten.convolution:
        return 0
    return nbytes_of(args[0]) + nbytes_of(args[1])


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, wherever they are."""
    return tensor.numel() * tensor.element_size()


def learn(past: Iterable[Run | EncodingRecord]) -> Experience:
    """Learn from runs that were saved, or from records as `encode_latents` gives them.

    Attempts that succeeded count, if their peak was measured and is 64 MB or more. A ratio comes only from a
    prediction that was itself made from the config: one that had learned already would count twice.
    """
    ratios: dict[Kind, list[float]] = defaultdict(list)
    rates: dict[Kind, list[float]] = defaultdict(list)
    for record in _records(past):
        for tried in record.attempts:
            measured = tried.measured_peak_bytes or 0
            kind = _kind_of(record, tried)
            if kind is None or measured < SMALLEST_BYTES:
                continue
            if tried.prediction_basis == "config" and tried.predicted_peak_bytes:
                ratios[kind].append(measured / tried.predicted_peak_bytes)
            elements = _elements(record, tried)
            if elements:
                rates[kind].append(measured / elements)
    ratios_seen, rates_seen = ({kind: tuple(v) for kind, v in seen.items()} for seen in (ratios, rates))
    return Experience(ratios_seen, rates_seen)


def _records(past: Iterable[Run | EncodingRecord]) -> Iterable[EncodingRecord]:
    for recorded in past:
        if isinstance(recorded, EncodingRecord):
            yield recorded
            continue
        for stage in recorded.walk():
            record = _record_in(stage.facts.get(RECORD_FACT))
            if record is not None:
                yield record


def _record_in(plain: object) -> EncodingRecord | None:
    if not isinstance(plain, Mapping):
        return None
    try:
        return encoding_record(plain)
    except (ValueError, TypeError, LookupError):
        return None


def _kind_of(record: EncodingRecord, attempt: StrategyAttempt) -> Kind | None:
    if (
        record.vae is None
        or attempt.outcome != "succeeded"
        or attempt.name == "dummy"
        or attempt.device is None
    ):
        return None
    device_type = attempt.device.split(":")[0]
    return Kind(record.vae.class_name, record.direction, attempt.name, device_type)


def _elements(record: EncodingRecord, attempt: StrategyAttempt) -> int | None:
    """How many the VAE was given at once: of one picture or video if it was in tiles."""
    given = record.input
    if given is None or None in (given.batch, given.channels, given.height, given.width):
        return None
    sides = [given.height or 0, given.width or 0]
    batch = given.batch or 0
    if attempt.tile is not None:
        factor = 1  # pixels along one element of the input
        if record.direction == "decoding":
            factor = (None if record.vae is None else record.vae.spatial_factor) or 0
        if not factor:
            return None
        tile = (attempt.tile.height // factor, attempt.tile.width // factor)
        sides = [min(pair) for pair in zip(sides, tile, strict=True)]
        batch = 1
    return math.prod((batch, given.frames or 1, given.channels or 0, *sides))
