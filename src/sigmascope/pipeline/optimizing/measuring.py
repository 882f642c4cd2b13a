"""Choices put to the test one after another, each on top of those that paid."""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from sigmascope.analysis.compare_runs import FigureComparison, compare_values
from sigmascope.errors import ConfigError, OptimizationError
from sigmascope.pipeline.optimizing.applied import AppliedChoice
from sigmascope.pipeline.optimizing.applied_plans import ApplyChoice
from sigmascope.pipeline.optimizing.images import compare_images
from sigmascope.pipeline.optimizing.judging import Demands, judge
from sigmascope.pipeline.optimizing.measurement import ChoiceResult, Measurement, SetUp
from sigmascope.pipeline.optimizing.plan import Choice, NotTaken, Plan
from sigmascope.pipeline.optimizing.subject import look_at
from sigmascope.pipeline.optimizing.trial_runs import STAGE, Call, Count, Seen, Trials, as_function
from sigmascope.progress import Progress, no_progress

_SURE: Final = 0.8
"""Ratios above this are measured a second time, in turn, before they count."""


def measure_plan(
    pipeline: Any,
    call: Call,
    plan: Plan,
    apply: ApplyChoice,
    *,
    repeats: int,
    warmup: int,
    seed: int,
    demands: Demands,
    progress: Progress = no_progress,
) -> tuple[Measurement, list[AppliedChoice]]:
    """Measure a plan; see `PipelineOptimizer.measure`. If it is broken off, everything is undone.

    Args:
        pipeline: A diffusers pipeline.
        call: What to time.
        plan: What to try.
        apply: Applies a choice.
        repeats: Timed runs of each set-up.
        warmup: Runs before these.
        seed: Of the generator.
        demands: What a choice must bring.
        progress: Told of each run.

    Returns:
        The measurement, and the choices that paid, which are in force.

    Raises:
        ConfigError: No repeats, a negative number of warm-up runs, or a pipeline without a denoiser.
    """
    if repeats < 1 or warmup < 0:
        raise ConfigError(f"repeats is {repeats} and warmup {warmup}.", hint="Give at least 1 and 0.")
    denoiser = next(iter(look_at(pipeline).of_role("denoiser").values()), None)
    if denoiser is None:
        raise ConfigError(
            f"{type(pipeline).__name__} has no denoiser that is known.", hint="Give a diffusers pipeline."
        )
    count = Count(progress, (repeats + warmup) * (1 + len(plan.choices)))
    trials = Trials(pipeline, as_function(call, seed), denoiser, repeats, warmup, count)
    course = _Course(trials, apply, demands)
    try:
        return course.run(plan), course.stack
    except BaseException:
        course.undo_all()
        raise


@dataclass(slots=True)
class _Course:
    """One measurement as it goes. `stack` holds what paid so far, in force."""

    trials: Trials
    apply: ApplyChoice
    demands: Demands
    stack: list[AppliedChoice] = field(default_factory=list)

    def run(self, plan: Plan) -> Measurement:
        first = before = self.trials.run("as found")
        results: list[ChoiceResult] = []
        for choice in plan.choices:
            if results and not results[-1].kept:
                before = self.trials.run_again(before, "again")  # the machine may be faster or slower by now
                first = before if not self.stack else first
            result, after = self._try(choice, before, first)
            results.append(result)
            before = after if result.kept else before
        return _measurement(plan, results, first, before)

    def _try(self, choice: Choice, before: Seen, first: Seen) -> tuple[ChoiceResult, Seen]:
        """Apply a choice, measure, and undo it unless it pays."""
        try:
            self.stack.append(self.apply(self.trials.pipeline, choice))
        except OptimizationError as failure:
            after = Seen(SetUp(error=failure.message))
            return ChoiceResult(choice, False, failure.message, before.set_up, after.set_up), after
        after = self.trials.run(choice.name)
        compared = compare_times(after.set_up, before.set_up)
        image = compare_images(after.image, first.image)
        demands = self.demands if first.set_up.error is None else replace(self.demands, min_psnr=None)
        verdict = judge(choice, before.set_up, after.set_up, compared, image, demands)
        if verdict.pays and _is_small(compared):
            before, after = self._there_and_back(choice, before, after)
            compared = compare_times(after.set_up, before.set_up)
            verdict = judge(choice, before.set_up, after.set_up, compared, image, demands)
        if not verdict.pays:
            self.stack[-1].undo()
            self.stack.pop()
        step = compare_images(after.image, before.image)
        return (
            ChoiceResult(
                choice, verdict.pays, verdict.words, before.set_up, after.set_up, compared, image, step
            ),
            after,
        )

    def _there_and_back(self, choice: Choice, before: Seen, after: Seen) -> tuple[Seen, Seen]:
        """Undo a choice, measure, apply it again and measure: a machine that became faster meanwhile shows so."""
        self.stack[-1].undo()
        self.stack.pop()
        before = self.trials.run_again(before, "again")
        self.stack.append(self.apply(self.trials.pipeline, choice))
        return before, self.trials.run_again(after, choice.name)

    def undo_all(self) -> None:
        while self.stack:
            self.stack[-1].undo()
            self.stack.pop()


def _is_small(time: FigureComparison | None) -> bool:
    return time is not None and time.ratio is not None and time.ratio > _SURE


def compare_times(new: SetUp, old: SetUp) -> FigureComparison | None:
    """The ratio of medians with its interval; None if one of them did not run.

    Args:
        new: With a choice.
        old: Without it.
    """
    if not new.seconds or not old.seconds:
        return None
    return compare_values(STAGE, "seconds", new.seconds, old.seconds)


def _measurement(plan: Plan, results: list[ChoiceResult], first: Seen, last: Seen) -> Measurement:
    dropped = (result for result in results if not result.kept)
    left = tuple(NotTaken(one.choice.kind, one.choice.component, one.verdict) for one in dropped)
    paid = tuple(result.choice for result in results if result.kept)
    reduced = Plan(
        plan.pipeline, plan.architecture, plan.hardware, paid, (*plan.not_taken, *left), plan.memory
    )
    last = last if paid else first
    return Measurement(
        reduced,
        tuple(results),
        first.set_up,
        last.set_up,
        compare_times(last.set_up, first.set_up),
        compare_images(last.image, first.image),
        first.repeatable,
    )
