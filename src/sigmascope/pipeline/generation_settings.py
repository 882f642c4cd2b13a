"""Steps, guidance and image size for a model, made smaller where the device could not hold the work.

`settings_for` takes them from the pipeline's own defaults, from the model's facts, or by architecture alone.
`shrink_to_fit` then looks for a size whose work fits.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from sigmascope import units
from sigmascope.analysis.rules_model import few_step_evidence
from sigmascope.errors import ConfigError
from sigmascope.pipeline.optimizations.interface import Circumstances
from sigmascope.pipeline.optimizations.memory_budget import circumstances_of, reckon_work
from sigmascope.pipeline.pipeline_parts import Subject, default_side, look_at, spatial_factor
from sigmascope.pipeline.plan import Hardware, OptimizationConfig

ARCHITECTURES: Final = ("MMDiT", "DiT", "UNet")
FEW_STEPS: Final = 4
_FAST_SOLVERS: Final = frozenset(
    {
        "DPMSolverMultistepScheduler",
        "DPMSolverSinglestepScheduler",
        "UniPCMultistepScheduler",
        "DEISMultistepScheduler",
    }
)
_FAST_SOLVER_STEPS: Final = 25
"""Enough for these solvers, which are of a higher order."""
_BY_ARCHITECTURE: Final[Mapping[str, Mapping[str, tuple[Any, str]]]] = {
    "MMDiT": {
        "num_inference_steps": (
            28,
            "What diffusers' SD3 and FLUX pipelines take by default, and SD3.5's card names.",
        ),
        "guidance_scale": (3.5, "What FLUX.1-dev and SD3.5 are recommended with."),
        "height": (1024, "SD3, FLUX and Qwen-Image are trained at about a megapixel."),
        "width": (1024, "SD3, FLUX and Qwen-Image are trained at about a megapixel."),
    },
    "DiT": {
        "num_inference_steps": (30, "Between PixArt's 20 and WAN's 50, from where on little changes."),
        "guidance_scale": (5.0, "WAN's default; PixArt's is 4.5."),
    },
    "UNet": {
        "num_inference_steps": (30, "Enough for the usual solvers; DPM-Solver++ needs 20 to 25."),
        "guidance_scale": (7.0, "Between SDXL's 5 and SD1.5's 7.5."),
    },
}
_GUIDANCE: Final = ("true_cfg_scale", "guidance_scale")
_SIZES: Final = ("height", "width", "num_frames")
_SHRINK_FACTOR: Final = 0.8
_SIDE_MULTIPLE: Final = 64
"""How `shrink_to_fit` makes a side smaller: by this factor, down to a multiple of so many pixels."""
_SMALLEST_SIDE: Final = 256
"""Models of today make little of smaller images."""


class GenerationSettings(dict[str, Any]):
    """Arguments for a pipeline's call: `pipeline(prompt, **settings)`.

    Attributes:
        reasons: Why each argument is what it is, by name; and of others why they are left to the pipeline.
    """

    def __init__(self, reasons: Mapping[str, str] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.reasons: dict[str, str] = dict(reasons or {})

    def put(self, name: str, value: Any, reason: str) -> None:
        """Set an argument with its reason."""
        self[name] = value
        self.reasons[name] = reason


def settings_for(architecture: object) -> GenerationSettings:
    """Arguments for an architecture, a pipeline, or a denoiser.

    Args:
        architecture: "MMDiT", "DiT" or "UNet"; or the thing itself.

    Raises:
        ConfigError: Neither of these.
    """
    if isinstance(architecture, str):
        return _by_name(architecture)
    subject = look_at(architecture)
    if subject.facts.architecture is None:
        reason = subject.facts.unavailable.get("architecture", "it holds no denoiser")
        raise ConfigError(
            f"{type(architecture).__name__}: {reason}.",
            hint=f"Give a pipeline, a denoiser, or one of {ARCHITECTURES}.",
        )
    settings = _of_pipeline(subject) if subject.parameter("num_inference_steps") else _of_model(subject)
    _shorten(subject, settings)
    return settings


def _by_name(architecture: str) -> GenerationSettings:
    known = {name.lower(): name for name in ARCHITECTURES}
    name = known.get(architecture.lower())
    if name is None:
        raise ConfigError(
            f"There is no architecture {architecture!r}.",
            hint=f"Give one of {', '.join(ARCHITECTURES)}, or the model.",
        )
    settings = GenerationSettings()
    for argument, (value, reason) in _BY_ARCHITECTURE[name].items():
        settings.put(argument, value, reason)
    for argument in ("height", "width"):
        if argument not in settings:
            settings.reasons[argument] = "Left to the pipeline: models of this architecture differ in size."
    return settings


def _of_pipeline(subject: Subject) -> GenerationSettings:
    """What the pipeline's makers gave its call as defaults, where it has them, and the sizes that follow from it."""
    settings = GenerationSettings()
    name = subject.facts.class_name
    for argument in ("num_inference_steps", *_GUIDANCE, *_SIZES):
        parameter = subject.parameter(argument)
        if parameter is None:
            continue
        if isinstance(parameter.default, int | float):
            settings.put(argument, parameter.default, f"The default of {name}.")
        elif argument in ("height", "width"):
            side = default_side(subject)
            settings.put(
                argument,
                side,
                f"{side // spatial_factor(subject)} latent elements, which the model is made for.",
            )
    return settings


def _of_model(subject: Subject) -> GenerationSettings:
    settings = _by_name(str(subject.facts.architecture))
    sizes = [part.config.get("sample_size") for part in subject.facts.of_role("denoiser").values()]
    size = next((one for one in sizes if isinstance(one, int)), None)
    for argument in ("height", "width") if size is not None and subject.facts.architecture == "UNet" else ():
        settings.put(argument, default_side(subject), f"Its configuration: {size} latent elements.")
    return settings


def _shorten(subject: Subject, settings: GenerationSettings) -> None:
    """Fewer steps where the model is distilled to few, or the solver does with fewer."""
    steps = int(settings["num_inference_steps"])
    why = few_step_evidence(subject.facts)
    solver = next((part.class_name for part in subject.facts.of_role("scheduler").values()), None)
    if why is not None:
        settings.put("num_inference_steps", FEW_STEPS, f"It is distilled to few steps: {why}.")
        _without_guidance(subject, settings)
    elif solver in _FAST_SOLVERS and steps > _FAST_SOLVER_STEPS:
        settings.put(
            "num_inference_steps", _FAST_SOLVER_STEPS, f"{solver} is of a higher order: 20 to 25 steps do."
        )


def _without_guidance(subject: Subject, settings: GenerationSettings) -> None:
    embedded = any(
        part.config.get("guidance_embeds") is True for part in subject.facts.of_role("denoiser").values()
    )
    latent_consistency = any(
        part.config.get("time_cond_proj_dim") is not None
        for part in subject.facts.of_role("denoiser").values()
    )
    for argument in _GUIDANCE:
        if argument in settings and not embedded and not latent_consistency:
            off = 1.0 if argument == "true_cfg_scale" else 0.0
            settings.put(argument, off, "It is distilled to do without; guidance would double the work.")


def shrink_to_fit(
    subject: Subject, settings: GenerationSettings, hardware: Hardware, config: OptimizationConfig
) -> None:
    """Make the size smaller until what is needed beside weights fits; weights can take turns, this cannot.

    Args:
        subject: The pipeline.
        settings: With the size that is wanted; changed where that does not fit.
        hardware: Where it shall run.
        config: Of the optimizer.
    """
    if not {"height", "width"} <= settings.keys():
        return
    wanted = (int(settings["height"]), int(settings["width"]))
    frames = settings.get("num_frames")
    sizes = [wanted]
    while min(sizes[-1]) > _SMALLEST_SIDE:
        sizes.append((_smaller(sizes[-1][0]), _smaller(sizes[-1][1])))
    first: Circumstances | None = None
    for height, width in sizes:
        asked = replace(config, height=height, width=width, num_frames=frames)
        found = circumstances_of(subject, hardware, asked)
        reckon_work(found)
        first = first or found
        room = _room(found)
        if room is None or found.work_bytes <= room:
            break
    else:
        return  # nothing fits as far as can be told: leave the size that the model is made for
    if (height, width) != wanted:
        reason = (
            f"{wanted[0]} × {wanted[1]} pixels take about {units.mib(first.work_bytes)} MB beside weights, and "
            f"{hardware.device} has {units.mib(_room(first))} MB."
        )
        settings.put("height", height, reason)
        settings.put("width", width, reason)


def _smaller(side: int) -> int:
    return max(_SIDE_MULTIPLE, int(side * _SHRINK_FACTOR) // _SIDE_MULTIPLE * _SIDE_MULTIPLE)


def _room(found: Circumstances) -> int | None:
    return found.room_bytes if found.hardware.is_accelerator else found.hardware.ram_available_bytes
