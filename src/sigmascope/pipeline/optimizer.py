"""`PipelineOptimizer`: plan, apply, undo and measure what makes a pipeline faster or lets it fit.

`make_plan` asks every kind of optimization, in order, what it would do to this pipeline on this hardware.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from sigmascope.errors import ConfigError, OptimizationError
from sigmascope.pipeline.apply_undo import (
    AppliedChoice,
    AppliedPlan,
    AppliedPlans,
    require_last_applied,
    undo_all,
)
from sigmascope.pipeline.generation_settings import GenerationSettings, settings_for, shrink_to_fit
from sigmascope.pipeline.measure import Demands, Measurement, measure_plan
from sigmascope.pipeline.optimizations import KINDS
from sigmascope.pipeline.optimizations.interface import Circumstances, Considered, Kind
from sigmascope.pipeline.optimizations.memory_budget import circumstances_of, reckon_work, reckoning_of
from sigmascope.pipeline.optimizations.precision import PRECISION
from sigmascope.pipeline.pipeline_parts import look_at
from sigmascope.pipeline.plan import (
    PIPELINE,
    Choice,
    Hardware,
    NotTaken,
    OptimizationConfig,
    Plan,
    read_hardware,
)
from sigmascope.probes.models import components_of
from sigmascope.progress import Progress, no_progress

__all__ = ["GenerationSettings", "Hardware", "Measurement", "OptimizationConfig", "PipelineOptimizer", "Plan"]


class PipelineOptimizer:
    """Plans, applies, undoes and measures what diffusers and torch offer for a pipeline.

    Args:
        config: What may be done; None: whatever keeps the image but for number formats.
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
        self._applied = AppliedPlans()

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
            shrink_to_fit(look_at(architecture), settings, self._where(), self.config)
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
        config = self.config if plan is None else None
        plan = plan or self._applied.planned(pipeline, self.config) or self.plan(pipeline)
        self._applied.apply(pipeline, plan, self.apply_choice, config)
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
        found = self._applied.last(pipeline)
        if found is None:
            raise OptimizationError(
                "There is nothing to undo: no plan was applied to this pipeline by this optimizer.",
                hint="Undo with the PipelineOptimizer that applied it.",
            )
        require_last_applied(found.done)
        changed = undo_all(found.done)
        self._applied.remove(found)
        return changed

    @contextmanager
    def applied(self, pipeline: Any, plan: Plan | None = None) -> Iterator[Plan]:
        """`apply` on entering, `undo` on leaving, whatever ended it; what was in force before stays so.

        Args:
            pipeline: A diffusers pipeline.
            plan: None: what `plan` gives.
        """
        before = self._applied.last(pipeline)
        made = self.apply(pipeline, plan)
        changes = self._applied.last(pipeline) is not before
        try:
            yield made
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
            progress: Told of each run.

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
            self._applied.add(AppliedPlan(pipeline, measurement.plan, stack))
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

    def _where(self) -> Hardware:
        return read_hardware(self.config.device) if self._hardware is None else self._hardware


def make_plan(pipeline: Any, hardware: Hardware, config: OptimizationConfig) -> Plan:
    """Consider every kind of choice for a pipeline. Nothing is changed, and nothing runs.

    Args:
        pipeline: A diffusers pipeline.
        hardware: Where it shall run.
        config: What may be done to it.

    Raises:
        ConfigError: It is no pipeline and no module; what places and casts its models by itself, as ComfyUI does,
            is left alone.
    """
    if not isinstance(pipeline, nn.Module) and not components_of(pipeline):
        raise ConfigError(
            f"{type(pipeline).__name__} is no diffusers pipeline: it has no components.",
            hint="Give the pipeline, or its denoiser.",
        )
    found = circumstances_of(look_at(pipeline), hardware, config)
    left: list[NotTaken] = []
    for kind in KINDS:
        for one in _considered(kind, found):
            if isinstance(one, Choice):
                found.chosen.append(one)
            else:
                left.append(one)
        if kind.name == PRECISION:
            reckon_work(found)
    facts = found.subject.facts
    return Plan(
        facts.class_name, facts.architecture, hardware, tuple(found.chosen), tuple(left), reckoning_of(found)
    )


def _considered(kind: Kind, found: Circumstances) -> Considered:
    """What a kind says, unless it would change weights that are not there: accelerate holds them elsewhere."""
    components = found.subject.facts.components
    moving = [name for name, part in components.items() if part.offload == "sequential"]
    if moving and kind.changes:
        reason = f"accelerate holds the weights of {', '.join(moving)} elsewhere (sequential offloading)"
        yield NotTaken(kind.name, PIPELINE, reason)
    else:
        yield from kind.consider(found)
