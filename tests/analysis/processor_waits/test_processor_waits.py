"""A run that waited for a processor says so first, and what held it back."""

from dataclasses import replace

import pytest
from tests.analysis.run_sets import run

from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.records.run import HostFacts, Run


def waiting(
    *,
    waited: float | None,
    throttled: float | None = 0.0,
    stopped: float | None = None,
    of_stage: float = 0.0,
    **facts: float,
) -> Run:
    """A run of 27.3 s that worked for 2.4 s."""
    made = run([6.7] * 4, other=0.5)

    def use(seconds: float | None) -> dict[str, object]:
        return {
            "own_seconds": 2.4,
            "waited_seconds": seconds,
            "throttled_seconds": throttled,
            "stopped_seconds": stopped,
        }

    first = replace(made.stages[0], facts={"processor": use(of_stage)})
    facts_of_run = {"processor": use(waited), **facts}
    made = replace(
        made, stages=(first, *made.stages[1:]), facts=facts_of_run, host=HostFacts(cpu_count_logical=2)
    )
    return replace(made, findings=diagnose(made))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            waiting(waited=24.8, others_cpu_share=0.92),
            "The run waited for a processor for 91 % of 27.30 s: other programs, which used 92 % of the processors. ",
        ),
        (waiting(waited=24.8), "The run waited for a processor for 91 % of 27.30 s: other programs. "),
        (
            waiting(waited=12.0, others_cpu_share=0.01),
            "The run waited for a processor for 44 % of 27.30 s: its own threads held each other back, no other program did. ",
        ),
        (
            waiting(waited=1.0, throttled=18.0, others_cpu_share=0.9),
            "The run waited for a processor for 70 % of 27.30 s: the quota of its control group held it back for 18.00 s. ",
        ),
        (
            waiting(waited=4.0, of_stage=9.0, others_cpu_share=0.4),
            "denoising waited for a processor for 34 % of 26.80 s: other programs, which used 40 % of the processors. ",
        ),
        (
            waiting(waited=0.1, stopped=24.0, others_cpu_share=0.9),
            "The run stood still for 88 % of 27.30 s: the process was stopped for 24.00 s (Ctrl-Z, SIGSTOP, a debugger, a paused "
            "container). ",
        ),
        (
            waiting(waited=12.0, others_cpu_share=0.5, children_cpu_seconds=21.0),
            "The run waited for a processor for 44 % of 27.30 s: its own child processes, which used 38 % of the processors. ",
        ),
        (
            waiting(waited=12.0, others_cpu_share=0.9, children_cpu_seconds=4.0),
            "The run waited for a processor for 44 % of 27.30 s: other programs, which used 90 % of the processors. ",
        ),
    ],
    ids=[
        "others",
        "nobody knows who",
        "its own threads",
        "a quota",
        "a stage",
        "a stop",
        "its children",
        "more others",
    ],
)
def test_the_first_sentence_says_who_held_the_processor(made: Run, says: str) -> None:
    assert headline(made).startswith(f"{says}98 % of 27.30 s went into denoising")


def test_stages_tell_for_a_run_that_has_no_figures_of_its_own() -> None:
    """As a recorder of one's own code makes it, without a watch around."""
    made = waiting(waited=0.0, of_stage=20.0, others_cpu_share=0.5)
    made = replace(made, facts={"others_cpu_share": 0.5})
    said = headline(replace(made, findings=diagnose(made)))
    assert said.startswith(
        "The run waited for a processor for 73 % of 27.30 s: other programs, which used 50 % of the processors. "
    )


@pytest.mark.parametrize("waited", [None, 0.0, 6.0])
def test_a_run_that_hardly_waited_says_nothing(waited: float | None) -> None:
    assert headline(waiting(waited=waited, throttled=None)).startswith("98 % of 27.30 s went into denoising")
