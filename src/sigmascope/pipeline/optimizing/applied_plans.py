"""The plans that an optimizer applied and did not undo yet, pipeline by pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sigmascope.pipeline.optimizing.applied import AppliedChoice, undo_all
from sigmascope.pipeline.optimizing.config import OptimizationConfig
from sigmascope.pipeline.optimizing.plan import Choice, Plan

ApplyChoice = Callable[[Any, Choice], AppliedChoice]


@dataclass(frozen=True, slots=True, eq=False)
class AppliedPlan:
    """One plan in force.

    Attributes:
        pipeline: What it was applied to.
        plan: What was asked for.
        done: Its choices that were not in force before, in the order in which they were applied.
        config: What it was planned with; None: the plan was given.
    """

    pipeline: Any
    plan: Plan
    done: list[AppliedChoice]
    config: OptimizationConfig | None = None


class AppliedPlans:
    """Of one optimizer, the last applied last."""

    def __init__(self) -> None:
        self._plans: list[AppliedPlan] = []

    def apply(
        self, pipeline: Any, plan: Plan, apply_choice: ApplyChoice, config: OptimizationConfig | None
    ) -> None:
        """Apply the choices of a plan that are not in force; if one fails, undo those before it.

        Args:
            pipeline: What to apply them to.
            plan: Of this pipeline.
            apply_choice: Applies one.
            config: What it was planned with; None: the plan was given.
        """
        done: list[AppliedChoice] = []
        try:
            for choice in plan.choices:
                if not self.holds(pipeline, choice):
                    done.append(apply_choice(pipeline, choice))  # noqa: PERF401 - undone if a later one fails
        except BaseException:
            undo_all(done)
            raise
        if done or self.last(pipeline) is None:
            self.add(AppliedPlan(pipeline, plan, done, config))

    def add(self, applied: AppliedPlan) -> None:
        """Note a plan."""
        self._plans.append(applied)

    def remove(self, applied: AppliedPlan) -> None:
        """Forget a plan, once it is undone."""
        self._plans.remove(applied)

    def last(self, pipeline: Any = None) -> AppliedPlan | None:
        """The last applied, to this pipeline if one is given."""
        return next(
            (one for one in reversed(self._plans) if pipeline is None or one.pipeline is pipeline), None
        )

    def holds(self, pipeline: Any, choice: Choice) -> bool:
        """Whether the choice is in force on the parts that the pipeline has now."""
        return any(done.is_of(choice) for one in self._plans if one.pipeline is pipeline for done in one.done)

    def planned(self, pipeline: Any, config: OptimizationConfig) -> Plan | None:
        """The plan that was made with this configuration, if all of it is in force.

        A pipeline that is being optimized is not the one to plan for anew: it would seem smaller, or not to need it.
        """
        return next(
            (
                one.plan
                for one in reversed(self._plans)
                if one.pipeline is pipeline
                and one.config == config
                and all(self.holds(pipeline, choice) for choice in one.plan.choices)
            ),
            None,
        )
