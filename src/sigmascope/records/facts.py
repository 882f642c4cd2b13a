"""Plain facts about tensors, models, pipelines, calls, errors and the machine (no torch here)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

JsonScalar = str | int | float | bool | None
Role = Literal["denoiser", "text_encoder", "image_encoder", "vae", "tokenizer", "scheduler", "other"]
Offload = Literal["model", "sequential", "group"]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor. Statistics are over its finite elements; counts are of the others."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    nbytes: int
    num_elements: int
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """One model or part of a model.

    `dtypes` and `devices` count elements; they and `nbytes` include buffers. `wrapper_class_name` is the
    class of what the module came in, such as ComfyUI's ModelPatcher.
    """

    class_name: str
    parameters: int | None = None
    trainable_parameters: int | None = None
    nbytes: int | None = None
    dtypes: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    training: bool | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    wrapper_class_name: str | None = None


@dataclass(frozen=True, slots=True)
class ExceptionDetails:
    """An exception of the watched code: its type, message and stack trace as text."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class ComponentFacts:
    """One component of a pipeline.

    Attributes:
        role: What it does in the pipeline.
        class_name: Of the component.
        module: Weights, dtypes and devices; None for what is no model.
        config: The scalars of its configuration.
        offload: Which offloading moves its weights in and out while it runs; None: none.
        compiled: Whether it, or a block in it, is compiled by torch.compile.
        layerwise_casting: Whether its weights are stored in a narrower type than they are used in.
        channels_last: Whether most of its convolution weights lie channels-last; None: it has none.
        tiling: Of a VAE: whether tiling is switched on.
        slicing: Of a VAE: whether slicing is.
    """

    role: Role
    class_name: str
    module: ModuleFacts | None = None
    config: Mapping[str, JsonScalar] = field(default_factory=dict)
    offload: Offload | None = None
    compiled: bool | None = None
    layerwise_casting: bool | None = None
    channels_last: bool | None = None
    tiling: bool | None = None
    slicing: bool | None = None


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What computes the denoiser's attention.

    Attributes:
        processors: How many attention modules have a processor of each class.
        joint_processors: The same for the modules of joint blocks, which project text and image apart.
        backends: How many processors are set to each backend ("default": none was chosen).
    """

    processors: Mapping[str, int] = field(default_factory=dict)
    joint_processors: Mapping[str, int] = field(default_factory=dict)
    backends: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """A pipeline, or a denoiser alone, before it runs.

    Attributes:
        class_name: Of the pipeline; of the model if it is one alone.
        architecture: "MMDiT", "DiT" or "UNet"; None: not known.
        architecture_evidence: By which modules.
        components: By the pipeline's own names.
        attention: Of the denoiser.
        source: Where it was loaded from, as its configuration says: a folder or a name on the hub.
        unavailable: What could not be read, with the reason.
    """

    class_name: str
    architecture: str | None = None
    architecture_evidence: str | None = None
    components: Mapping[str, ComponentFacts] = field(default_factory=dict)
    attention: AttentionFacts = field(default_factory=AttentionFacts)
    source: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def of_role(self, role: Role) -> dict[str, ComponentFacts]:
        """The components that do this, by name."""
        return {name: part for name, part in self.components.items() if part.role == role}


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a pipeline was called with. None: not given, or not known.

    Attributes:
        guidance_scale: Above 1 the classifier-free kind runs the denoiser for the negative prompt too.
        guidance_batches: How many times the denoiser works for each step's sample: 2 under classifier-free
            guidance, 1 without, or where guidance is distilled into the model.
        has_image: Whether an image to start from or to edit was given.
        callback: The name of what the pipeline calls after each step.
    """

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_batches: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    batch_size: int | None = None
    has_image: bool | None = None
    seed: int | None = None
    callback: str | None = None


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """One accelerator device."""

    device: str
    name: str | None = None
    total_bytes: int | None = None
    driver_version: str | None = None
    compute_capability: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """CPU, RAM, system, Python, library versions, and every accelerator."""

    cpu_model: str | None = None
    cpu_count_logical: int | None = None
    cpu_count_physical: int | None = None
    ram_total_bytes: int | None = None
    os: str | None = None
    python_version: str | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    accelerators: tuple[AcceleratorFacts, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
