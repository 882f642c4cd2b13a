"""What a user says beforehand: what may happen to the image, for which call, and single choices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from sigmascope.errors import ConfigError
from sigmascope.pipeline.optimizing.plan import IMAGE_EFFECTS, ImageEffect
from sigmascope.records.facts import JsonScalar

Auto = Literal["auto"]
Switch = bool | Auto
Precision = Literal["bfloat16", "float16"]
Offloading = Literal["model", "group"]
Caching = Literal["first_block", "pyramid", "faster", "taylorseer"]
Quantisation = Literal["int8", "float8"]

_ALLOWED: Final[dict[str, tuple[object, ...]]] = {
    "image": IMAGE_EFFECTS,
    "dtype": ("auto", None, "bfloat16", "float16"),
    "offload": ("auto", None, "model", "group"),
    "cache": ("auto", None, "first_block", "pyramid", "faster", "taylorseer"),
    "quantisation": ("auto", None, "int8", "float8"),
    "vae_slicing": ("auto", True, False),
    "vae_tiling": ("auto", True, False),
    "layerwise_casting": ("auto", True, False),
    "fuse_qkv": ("auto", True, False),
    "channels_last": ("auto", True, False),
    "compile": ("auto", True, False),
    "fast_matmul": ("auto", True, False),
}


@dataclass(frozen=True, slots=True)
class OptimizationConfig:
    """What `PipelineOptimizer` may do. "auto" is decided from model, hardware and call; None and False: left alone.

    What is asked for by name or True is done wherever it is possible, whatever `image` says. So are moving to the
    device, and tiles where an image does not fit without them.

    Attributes:
        image: The most that may happen to the image. "none": bit for bit the same; "rounding": the same arithmetic
            in another order; "precision": narrower number formats; "approximation": results of steps used again.
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
        ConfigError: A value that is not among those that are known.
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
        refuse_unknown({name: getattr(self, name) for name in _ALLOWED})
        if not 0 <= self.headroom < 1:
            raise ConfigError(
                f"OptimizationConfig.headroom is {self.headroom}.", hint="Give a share from 0 to below 1."
            )
        if self.batch_size < 1 or self.generations < 1:
            raise ConfigError("batch_size and generations are at least 1.", hint="Give 1 or more.")

    @classmethod
    def nothing(cls, **asked: JsonScalar) -> "OptimizationConfig":
        """A configuration that leaves all alone but what is asked for."""
        off = {
            name: False if True in allowed else None for name, allowed in _ALLOWED.items() if name != "image"
        }
        values: dict[str, object] = {**off, "attention_backend": None, **asked}
        return cls(**values)  # type: ignore[arg-type]


def refuse_unknown(values: Mapping[str, object]) -> None:
    """Refuse values that an option does not have.

    Args:
        values: By the names of `OptimizationConfig`.

    Raises:
        ConfigError: One of them is not known.
    """
    for name, value in values.items():
        allowed = _ALLOWED[name]
        if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
            known = ", ".join(map(repr, allowed))
            raise ConfigError(f"OptimizationConfig.{name} is {value!r}.", hint=f"Give one of {known}.")
