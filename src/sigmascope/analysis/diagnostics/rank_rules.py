"""What the ranks of a merged run say of each other."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Final

from sigmascope import units
from sigmascope.analysis.run_figures import step_name, timed_on_device
from sigmascope.analysis.step_times import known, step_seconds
from sigmascope.records.finding import Finding
from sigmascope.records.run import Run

_SLOWER_BY: Final = 1.1
_FEWEST_STEPS_OF_A_RANK: Final = 3


def slow_ranks(ranks: Mapping[str, Run]) -> Iterator[Finding]:
    """A rank whose steps take longer than those of the others: where they wait for each other, it sets the pace.

    Args:
        ranks: The run of each rank, by name.
    """
    on_device = timed_on_device(*([run] for run in ranks.values()))  # all of them, or none
    of_stage: dict[str, dict[str, list[float]]] = {}
    for rank, run in ranks.items():
        for stage in run.walk():
            timed = step_seconds(stage, on_device=step_name(stage) in on_device)
            seconds = known(timed[1:])  # it compiles in the first
            if len(stage.steps) >= _FEWEST_STEPS_OF_A_RANK and seconds:
                of_stage.setdefault(stage.name, {}).setdefault(rank, []).extend(seconds)
    for stage_name, of_rank in of_stage.items():
        steps = {rank: median(all_of_it) for rank, all_of_it in of_rank.items()}
        slowest = max(steps, key=lambda rank: steps[rank])
        others = [one for rank, one in steps.items() if rank != slowest]
        if not others or steps[slowest] < _SLOWER_BY * median(others):
            continue
        factor = steps[slowest] / median(others)
        yield Finding(
            id="ranks.slow_rank",
            severity="warning",
            message=f"A step of {slowest} takes {units.seconds(steps[slowest])}, {factor:.2f} times that of the other "
            f"ranks ({units.seconds(median(others))}).",
            evidence={"rank": slowest, "step_seconds": steps[slowest], "others_seconds": median(others)},
            advice="Compare the device's clocks, heat and link with the others' (nvidia-smi -q -d PERFORMANCE, nvidia-smi "
            "topo -m), and whether it was given more work.",
            stage=stage_name,
        )  # fmt: skip


def about_rank(finding: Finding, rank: str) -> Finding:
    """The finding, with the rank that it is about."""
    return replace(finding, evidence={**finding.evidence, "rank": rank})
