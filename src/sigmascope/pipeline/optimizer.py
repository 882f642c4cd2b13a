"""`PipelineOptimizer`: plan, apply, undo and measure what makes a pipeline faster or lets it fit.

`make_plan` asks every kind of optimization, in order, what it would do to this pipeline on this hardware.
`settings_for` takes steps, guidance and image size from the pipeline's own defaults, from the model's facts, or by
architecture alone. `shrink_to_fit` then looks for a size whose work fits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from torch import nn

from sigmascope import units
from sigmascope.analysis.rules_model import few_step_evidence
from sigmascope.errors import ConfigError, OptimizationError
from sigmascope.pipeline.apply_undo import (
    KINDS,
    AppliedChoice,
    AppliedPlan,
    require_last_applied,
    undo_all,
)
from sigmascope.pipeline.measure import Demands, Measurement, measure_plan
from sigmascope.pipeline.memory_optimizations import PRECISION, context_of, estimate_work, memory_estimate
from sigmascope.pipeline.optimization_plan import (
    PIPELINE,
    Choice,
    Considered,
    Hardware,
    Kind,
    NotTaken,
    OptimizationConfig,
    PipelineParts,
    Plan,
    PlanningContext,
    default_side,
    parts_of,
    read_hardware,
    spatial_factor,
)
from sigmascope.probes.models import components_of
from sigmascope.progress import Progress, no_progress

__all__ = ["GenerationSettings", "Hardware", "Measurement", "OptimizationConfig", "PipelineOptimizer", "Plan"]


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


class PipelineOptimizer:
    """Plans, applies, undoes and measures what diffusers and torch offer for a pipeline.

    Args:
        config: What may be done; None: anything that changes the image by no more than narrower number formats.
        hardware: What to plan for; None: this machine, read when a plan is made.

    Examples:
        >>> optimizer = PipelineOptimizer()
        >>> settings = optimizer.configure_generation_settings("MMDiT")
        >>> settings["num_inference_steps"]
        28
    """

    def __init__(self, config: OptimizationConfig | None = None, *, hardware: Hardware | None = None) -> None:
        self.config = OptimizationConfig() if config is None else config
        self._hardware = hardware
        self._applied: list[AppliedPlan] = []

    def configure_generation_settings(self, architecture: object) -> GenerationSettings:
        """Arguments for a pipeline's call: steps, guidance, size. `.reasons` says why each is what it is.

        For a pipeline or a model, the size is made smaller where the device cannot hold the work on it.

        Args:
            architecture: "MMDiT", "DiT" or "UNet"; or a pipeline or a denoiser, whose own facts count for more.

        Raises:
            ConfigError: No such architecture, or a thing that is neither pipeline nor denoiser.
        """
        settings = settings_for(architecture)
        if not isinstance(architecture, str):
            shrink_to_fit(parts_of(architecture), settings, self._where(), self.config)
        return settings

    def plan(self, pipeline: Any) -> Plan:
        """Choose for a pipeline, with reasons; nothing is changed. `print(plan)` explains it.

        Args:
            pipeline: A diffusers pipeline, or a model of diffusers alone.

        Raises:
            ConfigError: Neither of these.
        """
        return make_plan(pipeline, self._where(), self.config)

    def apply(self, pipeline: Any, plan: Plan | None = None) -> Plan:
        """Do what a plan says. If anything fails, all of it is undone.

        Choices that this optimizer applied to the pipeline and did not undo are in force, and are left out: to apply a
        plan again changes nothing, and one `undo` takes it back.

        Args:
            pipeline: A diffusers pipeline.
            plan: None: what `plan` gives.

        Returns:
            The plan.

        Raises:
            OptimizationError: A choice failed. The pipeline is as it was.
        """
        mine = [applied for applied in self._applied if applied.pipeline is pipeline]
        config = self.config if plan is None else None

        def is_in_force(choice: Choice) -> bool:
            return any(done.is_of(choice) for applied in mine for done in applied.done)

        if plan is None:
            # A pipeline that is being optimized would seem smaller, or not to need it: it is not planned for again.
            mine_again = (
                applied.plan
                for applied in reversed(mine)
                if applied.config == config and all(map(is_in_force, applied.plan.choices))
            )
            plan = next(mine_again, None) or self.plan(pipeline)
        done: list[AppliedChoice] = []
        try:
            for choice in plan.choices:
                if not is_in_force(choice):
                    done.append(self.apply_choice(pipeline, choice))  # noqa: PERF401 - undone if a later one fails
        except BaseException:
            undo_all(done)
            raise
        if done or not mine:
            self._applied.append(AppliedPlan(pipeline, plan, done, config))
        return plan

    def undo(self, pipeline: Any = None) -> list[str]:
        """Put back what the last `apply` changed: structure, hooks, flags, and weights bit for bit.

        Args:
            pipeline: Whose last `apply`; None: the last of all.

        Returns:
            Names of weights that somebody else changed meanwhile, as fusing a LoRA does: their new values stay.

        Raises:
            OptimizationError: Nothing was applied, or a choice cannot be undone; see the message.
        """
        last = self._last(pipeline)
        if last is None:
            raise OptimizationError(
                "There is nothing to undo: no plan was applied to this pipeline by this optimizer.",
                hint="Undo with the PipelineOptimizer that applied it.",
            )
        require_last_applied(last.done)
        changed = undo_all(last.done)
        self._applied.remove(last)
        return changed

    @contextmanager
    def applied(self, pipeline: Any, plan: Plan | None = None) -> Iterator[Plan]:
        """`apply` on entering, `undo` on leaving, whatever ended it; what was in force before stays so.

        Args:
            pipeline: A diffusers pipeline.
            plan: None: what `plan` gives.
        """
        before = self._last(pipeline)
        applied_plan = self.apply(pipeline, plan)
        changes = self._last(pipeline) is not before
        try:
            yield applied_plan
        finally:
            if changes:
                self.undo(pipeline)

    def measure(
        self,
        pipeline: Any,
        call: Callable[[Any], object] | Mapping[str, object],
        plan: Plan | None = None,
        *,
        repeats: int = 3,
        warmup: int = 1,
        seed: int = 0,
        least_gain: float = 0.02,
        min_psnr: float | None = None,
        keep: bool = False,
        progress: Progress = no_progress,
    ) -> Measurement:
        """Run before and after each choice: what it gained, how far the image moved, and whether it stays.

        Choices are added one after another; one that did not pay, failed, or broke the image is undone before the
        next. In the end all are undone, unless they are to be kept.

        Args:
            pipeline: A diffusers pipeline.
            call: Takes the pipeline and gives its output, with the same seed each time; or the arguments of the
                pipeline's call, to which a generator of `seed` is added.
            plan: None: what `plan` gives.
            repeats: Timed runs of each set-up.
            warmup: Runs before these, where compiling and caching falls.
            seed: Of the generator.
            least_gain: The share of time, or of peak memory, that a choice must save to stay.
            min_psnr: Drop a choice if the image is farther than this from the first one, in dB, or if that is not
                known.
            keep: Leave what paid applied; `undo` then takes it back.
            progress: Called after each run.

        Raises:
            ConfigError: A number of runs or a demand that makes no sense.
        """
        demands = Demands(least_gain, min_psnr)
        plan = self.plan(pipeline) if plan is None else plan
        measurement, stack = measure_plan(
            pipeline,
            call,
            plan,
            self.apply_choice,
            repeats=repeats,
            warmup=warmup,
            seed=seed,
            demands=demands,
            progress=progress,
        )
        if keep and stack:
            self._applied.append(AppliedPlan(pipeline, measurement.plan, stack))
        else:
            undo_all(stack)
        return measurement

    def apply_choice(self, pipeline: Any, choice: Choice) -> AppliedChoice:
        """Apply one choice; its `undo` is the caller's to call, the last applied first.

        Args:
            pipeline: A diffusers pipeline.
            choice: Of a plan.

        Raises:
            OptimizationError: It failed. The pipeline is as it was.
        """
        return AppliedChoice(pipeline, choice, keep_originals=self.config.keep_originals)

    def _last(self, pipeline: Any = None) -> AppliedPlan | None:
        """What was applied last, to this pipeline if one is given."""
        plans = (plan for plan in reversed(self._applied) if pipeline is None or plan.pipeline is pipeline)
        return next(plans, None)

    def _where(self) -> Hardware:
        return read_hardware(self.config.device) if self._hardware is None else self._hardware


def make_plan(pipeline: Any, hardware: Hardware, config: OptimizationConfig) -> Plan:
    """Consider every kind of choice for a pipeline. Nothing is changed, and nothing runs.

    Raises:
        ConfigError: It is neither a pipeline nor a module; what places and casts its models by itself, as ComfyUI does,
            is left alone.
    """
    if not isinstance(pipeline, nn.Module) and not components_of(pipeline):
        raise ConfigError(
            f"{type(pipeline).__name__} is not a diffusers pipeline: it has no components.",
            hint="Give the pipeline, or its denoiser.",
        )
    context = context_of(parts_of(pipeline), hardware, config)
    left: list[NotTaken] = []
    for kind in KINDS:
        for considered in _considered(kind, context):
            if isinstance(considered, Choice):
                context.chosen.append(considered)
            else:
                left.append(considered)
        if kind.name == PRECISION:
            estimate_work(context)
    facts = context.parts.facts
    return Plan(
        facts.class_name,
        facts.architecture,
        hardware,
        tuple(context.chosen),
        tuple(left),
        memory_estimate(context),
    )


def _considered(kind: Kind, context: PlanningContext) -> Considered:
    """What a kind says, unless it would change weights that are not there: accelerate holds them elsewhere."""
    components = context.parts.facts.components
    moving = [name for name, part in components.items() if part.offload == "sequential"]
    if moving and kind.changes:
        reason = f"accelerate holds the weights of {', '.join(moving)} elsewhere (sequential offloading)"
        yield NotTaken(kind.name, PIPELINE, reason)
    else:
        yield from kind.consider(context)


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
            "The default of diffusers' SD3 and FLUX pipelines, and SD3.5's model card.",
        ),
        "guidance_scale": (3.5, "Recommended for FLUX.1-dev and SD3.5."),
        "height": (1024, "SD3, FLUX and Qwen-Image are trained at about a megapixel."),
        "width": (1024, "SD3, FLUX and Qwen-Image are trained at about a megapixel."),
    },
    "DiT": {
        "num_inference_steps": (30, "Between PixArt's 20 and WAN's 50; further steps change little."),
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
"""Current models do poorly at smaller sizes."""


def settings_for(architecture: object) -> GenerationSettings:
    """Arguments for an architecture, a pipeline, or a denoiser.

    Args:
        architecture: "MMDiT", "DiT" or "UNet"; or the thing itself.

    Raises:
        ConfigError: Neither of these.
    """
    if isinstance(architecture, str):
        return _by_name(architecture)
    parts = parts_of(architecture)
    if parts.facts.architecture is None:
        reason = parts.facts.unavailable.get("architecture", "it holds no denoiser")
        raise ConfigError(
            f"{type(architecture).__name__}: {reason}.",
            hint=f"Give a pipeline, a denoiser, or one of {ARCHITECTURES}.",
        )
    settings = _of_pipeline(parts) if parts.parameter("num_inference_steps") else _of_model(parts)
    _shorten(parts, settings)
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


def _of_pipeline(parts: PipelineParts) -> GenerationSettings:
    """What the pipeline's makers gave its call as defaults, where it has them, and the sizes that follow from it."""
    settings = GenerationSettings()
    name = parts.facts.class_name
    for argument in ("num_inference_steps", *_GUIDANCE, *_SIZES):
        parameter = parts.parameter(argument)
        if parameter is None:
            continue
        if isinstance(parameter.default, int | float):
            settings.put(argument, parameter.default, f"The default of {name}.")
        elif argument in ("height", "width"):
            side = default_side(parts)
            settings.put(
                argument,
                side,
                f"{side // spatial_factor(parts)} latent elements, the size that the model is made for.",
            )
    return settings


def _of_model(parts: PipelineParts) -> GenerationSettings:
    settings = _by_name(str(parts.facts.architecture))
    sizes = [part.config.get("sample_size") for part in parts.facts.of_role("denoiser").values()]
    size = next((side for side in sizes if isinstance(side, int)), None)
    for argument in ("height", "width") if size is not None and parts.facts.architecture == "UNet" else ():
        settings.put(argument, default_side(parts), f"Its configuration: {size} latent elements.")
    return settings


def _shorten(parts: PipelineParts, settings: GenerationSettings) -> None:
    """Fewer steps where the model is distilled to few, or the solver does with fewer."""
    steps = int(settings["num_inference_steps"])
    why = few_step_evidence(parts.facts)
    solver = next((part.class_name for part in parts.facts.of_role("scheduler").values()), None)
    if why is not None:
        settings.put("num_inference_steps", FEW_STEPS, f"It is distilled to few steps: {why}.")
        _without_guidance(parts, settings)
    elif solver in _FAST_SOLVERS and steps > _FAST_SOLVER_STEPS:
        settings.put(
            "num_inference_steps",
            _FAST_SOLVER_STEPS,
            f"{solver} is of a higher order: 20 to 25 steps are enough.",
        )


def _without_guidance(parts: PipelineParts, settings: GenerationSettings) -> None:
    """Off where the model is distilled to do without, unless it takes the scale as an input."""
    configs = [part.config for part in parts.facts.of_role("denoiser").values()]
    if any(c.get("guidance_embeds") is True or c.get("time_cond_proj_dim") is not None for c in configs):
        return
    for argument in _GUIDANCE:
        if argument in settings:
            off = 1.0 if argument == "true_cfg_scale" else 0.0
            settings.put(
                argument, off, "It is distilled to work without guidance, which would double the work."
            )


def shrink_to_fit(
    parts: PipelineParts, settings: GenerationSettings, hardware: Hardware, config: OptimizationConfig
) -> None:
    """Make the size smaller until the memory needed beside weights fits; unlike weights, it cannot be offloaded."""
    if not {"height", "width"} <= settings.keys():
        return
    wanted = (int(settings["height"]), int(settings["width"]))
    frames = settings.get("num_frames")
    sizes = [wanted]
    while min(sizes[-1]) > _SMALLEST_SIDE:
        sizes.append((_smaller(sizes[-1][0]), _smaller(sizes[-1][1])))
    first: PlanningContext | None = None
    for height, width in sizes:
        asked = replace(config, height=height, width=width, num_frames=frames)
        context = context_of(parts, hardware, asked)
        estimate_work(context)
        first = first or context
        room = context.available_bytes
        if room is None or context.work_bytes <= room:
            break
    else:
        return  # nothing fits as far as can be told: leave the size that the model is made for
    if (height, width) != wanted:
        reason = (
            f"{wanted[0]} × {wanted[1]} pixels take about {units.mib(first.work_bytes)} MB beside weights, and "
            f"{hardware.device} has {units.mib(first.available_bytes)} MB."
        )
        settings.put("height", height, reason)
        settings.put("width", width, reason)


def _smaller(side: int) -> int:
    return max(_SIDE_MULTIPLE, int(side * _SHRINK_FACTOR) // _SIDE_MULTIPLE * _SIDE_MULTIPLE)
