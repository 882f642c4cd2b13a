"""A plan for a pipeline: what to do to it, what was left out and why, for which hardware, under which configuration.

`OptimizationConfig` is what the user says beforehand: what may happen to the image, which call is planned for, and
single choices. `read_hardware` and `parts_of` read what choices depend on.

A `Kind` of optimization says when its choice is taken, how that is applied, and what it does to weights. All that
it looks at is the `PlanningContext`: the pipeline, the hardware, the user's wishes, the call, and the memory that the
call takes. Choices on several pipelines may hold one setting of the process at once: `ProcessSetting`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from sigmascope import units
from sigmascope.errors import ConfigError
from sigmascope.probes import Accelerator, detect_accelerator, memory_snapshot
from sigmascope.probes.matmul_precision import multiplies_bfloat16
from sigmascope.probes.models import components_of, pipeline_facts, unwrap
from sigmascope.probes.reading import attempt
from sigmascope.records.run import JsonScalar, PipelineFacts, Role

ImageEffect = Literal["none", "rounding", "precision", "approximation"]
IMAGE_EFFECTS: Final[tuple[ImageEffect, ...]] = get_args(ImageEffect)
"""What a choice does to the image, the least first; see `OptimizationConfig.image`."""
Gain = Literal["speed", "memory"]
PIPELINE: Final = "pipeline"
"""The component of a choice that concerns all of them."""
Auto = Literal["auto"]
Switch = bool | Auto
Precision = Literal["bfloat16", "float16"]
Offloading = Literal["model", "group"]
Caching = Literal["first_block", "pyramid", "faster", "taylorseer"]
Quantisation = Literal["int8", "float8"]
_BFLOAT16: Final = (8, 0)
_FLOAT8: Final = (8, 9)
"""Compute capabilities from which tensor cores multiply these (CUDA C++ Programming Guide, table of features)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing to do to a pipeline.

    Attributes:
        kind: Which kind of choice, such as "precision".
        component: The pipeline's name of what it is done to, or "pipeline".
        call: The call of diffusers or torch that does the same by hand.
        reason: Why, with numbers.
        expected: What it should bring, in words.
        gains: Whether it should bring speed or memory.
        image: What it does to the image.
        options: Its parameters.
        numbers: Estimates, such as `mb_before` and `mb_after`.
        necessary: Without it the pipeline is not expected to run on the device at all.
        ram_mb: RAM that keeping the originals for an exact undo takes; 0: they are not needed.
    """

    kind: str
    component: str
    call: str
    reason: str
    expected: str
    gains: Gain
    image: ImageEffect
    options: Mapping[str, JsonScalar] = field(default_factory=dict)
    numbers: Mapping[str, JsonScalar] = field(default_factory=dict)
    necessary: bool = False
    ram_mb: float = 0.0

    @property
    def name(self) -> str:
        """Kind and component, which tell the choices of a plan apart."""
        return f"{self.kind} of {self.component}"


@dataclass(frozen=True, slots=True)
class NotTaken:
    """What was considered and left out."""

    kind: str
    component: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reckoning:
    """Memory in MiB, estimated beforehand. None: unknown, with the reason in `unavailable`.

    Attributes:
        weights_mb: Of each component as it is, by name.
        planned_weights_mb: The same with the plan's number formats.
        denoiser_mb: Activations of the denoiser at work: a rough count of the tensors that are alive.
        vae_mb: Peak of decoding at once, from the layers that the VAE's configuration describes.
        room_mb: What the device has for this pipeline.
    """

    weights_mb: Mapping[str, float] = field(default_factory=dict)
    planned_weights_mb: Mapping[str, float] = field(default_factory=dict)
    denoiser_mb: float | None = None
    vae_mb: float | None = None
    room_mb: float | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, or the CPU. None: unknown.

    Make one by hand to plan for another machine.

    Attributes:
        device: As torch calls it.
        name: Of the device.
        total_bytes: Its memory.
        free_bytes: What is free of it now; None: not read, and then all of it counts.
        capability: (major, minor) of an NVIDIA device.
        ram_available_bytes: RAM that can be taken now.
        cpu_bfloat16: Whether the CPU multiplies bfloat16 (AMX or AVX512-BF16).
        absence: Why there is no accelerator.
        architecture: Of an AMD device, such as "gfx942".
    """

    device: str = "cpu"
    name: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    ram_available_bytes: int | None = None
    cpu_bfloat16: bool = False
    absence: str | None = None
    architecture: str | None = None

    @property
    def kind(self) -> str:
        """The device's type: "cuda", "xpu", "mps", "cpu"."""
        return self.device.partition(":")[0]

    @property
    def is_accelerator(self) -> bool:
        """Whether it is not the CPU."""
        return self.kind != "cpu"

    def multiplies_bfloat16(self) -> bool:
        """Whether bfloat16 is fast on it; a device of unknown capability counts as a recent one."""
        if not self.is_accelerator:
            return self.cpu_bfloat16
        if self.architecture is not None:
            return multiplies_bfloat16(self.architecture)
        return self.capability is None or self.capability >= _BFLOAT16

    def multiplies_float8(self) -> bool:
        """Whether its tensor cores multiply float8; unknown counts as no."""
        return self.kind == "cuda" and self.capability is not None and self.capability >= _FLOAT8

    def __str__(self) -> str:
        if not self.is_accelerator:
            return f"the CPU ({self.absence})" if self.absence else "the CPU"
        named = self.device if self.name is None else f"{self.device} ({self.name})"
        return f"{named}, {units.mib(self.total_bytes)} MB"


@dataclass(frozen=True, slots=True)
class Plan:
    """Choices in the order in which they are applied. `str(plan)` explains it."""

    pipeline: str
    architecture: str | None
    hardware: Hardware
    choices: tuple[Choice, ...] = ()
    not_taken: tuple[NotTaken, ...] = ()
    memory: Reckoning = field(default_factory=Reckoning)

    def without(self, names: Iterable[str], reason: str = "left out") -> "Plan":
        """The plan without the choices of these names or kinds."""
        dropped = set(names)
        gone = [choice for choice in self.choices if choice.name in dropped or choice.kind in dropped]
        kept = tuple(choice for choice in self.choices if choice not in gone)
        left = (*self.not_taken, *(NotTaken(choice.kind, choice.component, reason) for choice in gone))
        return replace(self, choices=kept, not_taken=left)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(plan: Plan) -> Iterable[str]:
    yield f"{plan.pipeline} ({plan.architecture or 'architecture unknown'}) on {plan.hardware}"
    needed = sum(plan.memory.planned_weights_mb.values())
    room = plan.memory.room_mb
    yield f"Weights {units.mebibytes(needed)} MB as planned, room {'-' if room is None else units.mebibytes(room)} MB"
    for number, choice in enumerate(plan.choices, start=1):
        yield f"{number}. {choice.name}: {choice.call}"
        yield f"   {choice.reason} Expected: {choice.expected}. Image: {choice.image}."
    if plan.not_taken:
        yield "Not taken:"
    for left in plan.not_taken:
        yield f"- {left.kind} of {left.component}: {left.reason}"


@dataclass(frozen=True, slots=True)
class OptimizationConfig:
    """What `PipelineOptimizer` may do. "auto" is decided from model, hardware and call; None and False: left alone.

    What is asked for by name or True is done wherever it is possible, whatever `image` says. So are moving to the
    device, and tiles where an image does not fit without them.

    Attributes:
        image: The most that may happen to the image. "none": bit for bit the same; "rounding": the same arithmetic
            in another order; "precision": narrower number formats; "approximation": results of steps reused.
        device: Where to run, such as "cuda:0"; None: what torch would use, else where the pipeline is.
        dtype: Of weights.
        attention_backend: A name that diffusers' `set_attention_backend` takes, "auto" or None.
        compile: The blocks that repeat, by torch.compile.
        compile_backend: torch.compile's.
        channels_last: Memory format of convolutions.
        fuse_qkv: One projection where there are three.
        fast_matmul: TensorFloat-32 and cuDNN's choice of algorithms, which hold for the whole process.
        vae_slicing: Decode images one by one.
        vae_tiling: Encode and decode in tiles.
        offload: Weights in RAM while they are not at work.
        layerwise_casting: Store the denoiser's weights in float8, compute as before.
        quantisation: Of the denoiser's linear layers, by torchao.
        cache: Use results of earlier steps again.
        height: Of the images to be planned for, in pixels; None: the pipeline's own.
        width: The same.
        num_frames: Of videos.
        batch_size: Images made at once.
        generations: How many are to be made with the pipeline as it is set up: what compiling must pay within.
        headroom: Share of the device's memory that is to stay free.
        keep_originals: Keep weights that a choice changes for good in RAM, so that it can be undone exactly. False
            saves that RAM; `undo` then refuses.

    Raises:
        ConfigError: A value that is not known.
    """

    image: ImageEffect = "precision"
    device: str | None = None
    dtype: Precision | Auto | None = "auto"
    attention_backend: str | None = "auto"
    compile: Switch = "auto"
    compile_backend: str = "inductor"
    channels_last: Switch = "auto"
    fuse_qkv: Switch = "auto"
    fast_matmul: Switch = "auto"
    vae_slicing: Switch = "auto"
    vae_tiling: Switch = "auto"
    offload: Offloading | Auto | None = "auto"
    layerwise_casting: Switch = "auto"
    quantisation: Quantisation | Auto | None = None
    cache: Caching | Auto | None = "auto"
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    batch_size: int = 1
    generations: int = 100
    headroom: float = 0.1
    keep_originals: bool = True

    def __post_init__(self) -> None:
        refuse_unknown({name: getattr(self, name) for name in _options()})
        if not 0 <= self.headroom < 1:
            raise ConfigError(
                f"OptimizationConfig.headroom is {self.headroom}.", hint="Give a share from 0 to below 1."
            )
        if self.batch_size < 1 or self.generations < 1:
            raise ConfigError("batch_size and generations are at least 1.", hint="Give 1 or more.")

    @classmethod
    def nothing(cls, **asked: JsonScalar) -> "OptimizationConfig":
        """A configuration that changes nothing but what is asked for."""
        off: dict[str, object] = {"attention_backend": None}
        for name, allowed in _options().items():
            if "auto" in allowed:
                off[name] = False if False in allowed else None
        return cls(**{**off, **asked})  # type: ignore[arg-type]


@cache
def _options() -> dict[str, tuple[object, ...]]:
    """The values of each option that has a list of them, as its annotation says."""
    allowed = {name: _values_of(hint) for name, hint in get_type_hints(OptimizationConfig).items()}
    return {name: values for name, values in allowed.items() if values}


def _values_of(hint: Any) -> tuple[object, ...]:
    """What a union of literals, bool and None allows; nothing where it names another type."""
    values: list[object] = []
    for part in get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,):
        if get_origin(part) is Literal:
            values += get_args(part)
        elif part in (bool, NoneType):
            values += (True, False) if part is bool else (None,)
        else:
            return ()
    return tuple(values)


def refuse_unknown(values: Mapping[str, object]) -> None:
    """Refuse values that an option does not have.

    Raises:
        ConfigError: One of them is not known.
    """
    for name, value in values.items():
        allowed = _options()[name]
        if not any(value is option or (isinstance(value, str) and value == option) for option in allowed):
            known = ", ".join(map(repr, allowed))
            raise ConfigError(f"OptimizationConfig.{name} is {value!r}.", hint=f"Give one of {known}.")


def read_hardware(device: str | None = None, accelerator: Accelerator | None = None) -> Hardware:
    """The device that a pipeline is to run on. Never raises, and does not wake the device.

    Args:
        device: Such as "cuda:1" or "cpu"; None: what torch would use.
        accelerator: Where to read devices; None finds out.
    """
    accelerator = detect_accelerator() if accelerator is None else accelerator
    snapshot = memory_snapshot(accelerator)
    ram = snapshot.ram_available_bytes
    if device is None:
        name, absence = accelerator.current_device(), accelerator.absence
    else:
        name, absence = device if ":" in device or device == "cpu" else f"{device}:0", None
    if name is None or name.startswith("cpu"):
        capabilities = attempt(lambda: dict(torch.cpu.get_capabilities())).value or {}
        bfloat16 = any(capabilities.get(feature) for feature in ("amx_bf16", "avx512_bf16"))
        return Hardware("cpu", ram_available_bytes=ram, cpu_bfloat16=bfloat16, absence=absence)
    facts, memory = accelerator.facts(name), snapshot.accelerator(name)
    free_bytes = memory.free_bytes
    if free_bytes is not None:  # what the allocator holds without using it is as good as free
        free_bytes += max(0, (memory.reserved_bytes or 0) - (memory.allocated_bytes or 0))
    return Hardware(
        name,
        facts.name,
        facts.total_bytes or memory.total_bytes,
        free_bytes,
        _capability(facts.compute_capability),
        ram,
        architecture=_architecture(facts.compute_capability),
    )


def _architecture(text: str | None) -> str | None:
    return text if text is not None and text.startswith("gfx") else None


def _capability(text: str | None) -> tuple[int, int] | None:
    major, _, minor = (text or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


_SPATIAL_FACTOR: Final = 8
"""Pixels along one latent element, where the pipeline does not say: that of the usual VAEs."""
_USUAL_SIDE: Final = 1024


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """A pipeline and what is known of it. It holds the models; it is for the time of planning.

    Attributes:
        pipeline: The pipeline itself.
        facts: What was read off it.
        models: Its modules, by the pipeline's names; a module under two names is here once.
    """

    pipeline: Any
    facts: PipelineFacts
    models: Mapping[str, nn.Module] = field(default_factory=dict)

    def of_role(self, role: Role) -> dict[str, nn.Module]:
        """Its models that do this, by name."""
        return {name: self.models[name] for name in self.facts.of_role(role) if name in self.models}

    def parameter(self, name: str) -> inspect.Parameter | None:
        """A parameter of the pipeline's call; None: it has none of that name, or cannot be called."""
        if isinstance(self.pipeline, nn.Module | type):
            return None
        parameters = attempt(lambda: inspect.signature(type(self.pipeline).__call__).parameters).value
        return None if parameters is None else parameters.get(name)

    def default(self, name: str) -> Any:
        """The default of such a parameter; None: there is none."""
        parameter = self.parameter(name)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default


def parts_of(pipeline: Any) -> PipelineParts:
    """Read a pipeline's models and facts. Never raises.

    Args:
        pipeline: What has `components` as diffusers' have; a denoiser alone counts as one of a single component.
    """
    return PipelineParts(pipeline, pipeline_facts(pipeline), models_of(pipeline))


def models_of(pipeline: Any) -> dict[str, nn.Module]:
    """The modules of a pipeline by its own names, each once."""
    parts = attempt(lambda: dict(components_of(pipeline))).value or {"denoiser": pipeline}
    models: dict[str, nn.Module] = {}
    for name, part in parts.items():
        module = part if isinstance(part, nn.Module) else attempt(lambda part=part: unwrap(part)).value  # type: ignore[misc]
        if module is not None and not any(module is other for other in models.values()):
            models[str(name)] = module
    return models


@dataclass(frozen=True, slots=True)
class Call:
    """The call that is planned for. Sizes in pixels.

    Attributes:
        batch_size: Images at once.
        branches: How often the denoiser works for each: 2 under classifier-free guidance.
        num_frames: 1 for images.
    """

    height: int
    width: int
    num_frames: int = 1
    batch_size: int = 1
    branches: int = 1


def planned_call(
    parts: PipelineParts,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    batch_size: int = 1,
) -> Call:
    """The call with these sizes, or else with the pipeline's own."""
    side = default_side(parts)
    return Call(
        height or parts.default("height") or side,
        width or parts.default("width") or side,
        num_frames or parts.default("num_frames") or 1,
        batch_size,
        2 if _guides(parts) else 1,
    )


def default_side(parts: PipelineParts) -> int:
    """Side of the square image that the pipeline makes when no size is given, in pixels."""
    factor = spatial_factor(parts)
    sizes = [getattr(parts.pipeline, "default_sample_size", None)]
    sizes += [config_value(model, "sample_size") for model in parts.of_role("denoiser").values()]
    size = next((side for side in sizes if isinstance(side, int)), None)
    return _USUAL_SIDE if size is None else size * factor


def spatial_factor(parts: PipelineParts) -> int:
    """Pixels along one element of the latent."""
    for name in ("vae_scale_factor", "vae_scale_factor_spatial"):
        factor = getattr(parts.pipeline, name, None)
        if isinstance(factor, int):
            return factor
    return _SPATIAL_FACTOR


def config_value(model: object, name: str) -> Any:
    """A value of a model's configuration; None where it has none."""
    config = getattr(model, "config", None)
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _guides(parts: PipelineParts) -> bool:
    """Whether the pipeline, called without saying anything about guidance, computes two predictions at once.

    Qwen-Image, WAN and FLUX compute them one after the other, which takes no more memory.
    """
    in_turn = any(hasattr(model, "cache_context") for model in parts.of_role("denoiser").values())
    if in_turn and parts.facts.class_name.startswith(("Flux", "Qwen", "Wan")):
        return False
    return guidance_by_default(parts, "guidance_scale")


def guidance_by_default(parts: PipelineParts, *names: str) -> bool:
    """Whether the first of these parameters that the pipeline's call has asks for guidance."""
    scale = next((parts.default(name) for name in names if parts.parameter(name)), None)
    return isinstance(scale, int | float) and scale > 1


Change = Literal["dtype", "device", "layout"]
"""What a choice does to weights, and so what has to be put back."""
Undo = Callable[[], None]
Considered = Iterator[Choice | NotTaken]
T = TypeVar("T")


@dataclass(slots=True)
class PlanningContext:
    """What is known while a plan is made. It grows: each kind sees what those before it chose.

    Attributes:
        room_bytes: What the device has for this pipeline, with headroom kept free; None: not known.
        denoiser_bytes: Activations of the denoiser, a rough count.
        vae_bytes: Peak of decoding at once; None: not known.
        least_vae_bytes: The same with whatever the VAE offers to need less: image by image, tile by tile.
        dtypes: Planned dtype of each model, by name.
        chosen: Choices so far.
        unavailable: What could not be estimated, and why.
    """

    parts: PipelineParts
    hardware: Hardware
    config: OptimizationConfig
    call: Call
    room_bytes: int | None = None
    denoiser_bytes: int | None = None
    vae_bytes: int | None = None
    least_vae_bytes: int | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    chosen: list[Choice] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)

    def has(self, *kinds: str) -> bool:
        """Whether a choice of one of these kinds was taken."""
        return any(choice.kind in kinds for choice in self.chosen)

    @property
    def no_accelerator(self) -> str:
        """Why it runs on the CPU."""
        return self.hardware.absence or "no accelerator: it runs on the CPU"

    def why_not(self, effect: ImageEffect) -> str | None:
        """Why a choice with this effect on the image, which needs an accelerator, is not allowed; None: it is."""
        return self.too_much(effect) if self.hardware.is_accelerator else self.no_accelerator

    def too_much(self, effect: ImageEffect) -> str | None:
        """Why this effect on the image is not allowed; None: it is."""
        if IMAGE_EFFECTS.index(effect) <= IMAGE_EFFECTS.index(self.config.image):
            return None
        return f'it changes the image by {effect}, but the configuration allows only "{self.config.image}"'

    @property
    def total_bytes(self) -> int:
        """All weights as planned."""
        return sum(self.weights.values())

    @property
    def largest(self) -> tuple[str, int]:
        """The model with the most weights as planned, and how many bytes these are."""
        name = max(self.weights, key=lambda component: self.weights[component], default="")
        return name, self.weights.get(name, 0)

    @property
    def available_bytes(self) -> int | None:
        """Memory for this pipeline where it runs: the device's, or RAM on the CPU; None: not known."""
        return self.room_bytes if self.hardware.is_accelerator else self.hardware.ram_available_bytes

    @property
    def work_bytes(self) -> int:
        """What is needed at once beside weights: the denoiser's activations, or decoding, which come in turn.

        Decoding that does not fit at once is done in slices and tiles, before weights are moved for it.
        """
        return max(self.denoiser_bytes or 0, self.least_vae_bytes or 0)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of choice.

    Attributes:
        name: As `Choice.kind` has it.
        consider: Choices for a pipeline, and reasons where there are none.
        apply: Do one of them to a pipeline by the calls of diffusers and torch. It may give what has to be undone
            besides the pipeline's own structure and weights, such as a flag of the process; done first.
        changes: What it does to weights.
        narrows: Whether values are lost by it.
    """

    name: str
    consider: Callable[[PlanningContext], Considered]
    apply: Callable[[Any, Choice], Undo | None]
    changes: frozenset[Change] = frozenset()
    narrows: bool = False


def consider_each(
    kind: str, role: Role, consider: Callable[[PlanningContext, str, nn.Module], Choice | str]
) -> Callable[[PlanningContext], Considered]:
    """What considers each of a pipeline's models of a role by itself: a choice, or why there is none."""

    def considered(context: PlanningContext) -> Considered:
        for name, model in context.parts.of_role(role).items():
            yield outcome(kind, name, consider(context, name, model))

    return considered


def consider_pipeline(
    kind: str, consider: Callable[[PlanningContext], Choice | str]
) -> Callable[[PlanningContext], Considered]:
    """What considers a pipeline as a whole: a choice, or why there is none."""

    def considered(context: PlanningContext) -> Considered:
        yield outcome(kind, PIPELINE, consider(context))

    return considered


def outcome(kind: str, component: str, found: Choice | str) -> Choice | NotTaken:
    """A choice; or what was left out, if there is only a reason."""
    return NotTaken(kind, component, found) if isinstance(found, str) else found


def model_of(pipeline: Any, choice: Choice) -> Any:
    """The model that a choice is about."""
    return models_of(pipeline)[choice.component]


@dataclass(eq=False, slots=True)
class _Hold(Generic[T]):
    before: T


class ProcessSetting(Generic[T]):
    """A setting that is put back once nobody holds it any more, in whatever order holders let go."""

    def __init__(self, read: Callable[[], T], write: Callable[[T], None]) -> None:
        self._read = read
        self._write = write
        self._holds: list[_Hold[T]] = []

    def hold(self) -> Undo:
        """Note the setting before it is changed. What is returned lets go; the last to let go puts it back."""
        hold = _Hold(self._read())
        self._holds.append(hold)
        return lambda: self._let_go(hold)

    def _let_go(self, hold: _Hold[T]) -> None:
        place = self._holds.index(hold)
        later = self._holds[place + 1 :]
        self._holds.remove(hold)
        if later:
            later[0].before = hold.before
        else:
            self._write(hold.before)
