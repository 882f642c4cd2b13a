"""What `sigmascope.watch` costs a step of a pipeline: its hook on the denoiser and its tap on the scheduler.

    python benchmarks/watch_overhead.py [--steps 1000] [--repeats 25] [--only_stacks]

Seven small real pipelines each make one image or video, whose first step is then made again and again with the same
arguments while its denoiser and scheduler do nothing, so that the difference is the watch's own. CPU time of the
thread; bare, watched and hooked steps in turn, the least of all repeats of each: the others lost time to other
programs. Nothing is subtracted but the bare step. Beside it stands what no watch with hooks can go below: PyTorch's own
time for a module with one hook that does nothing. `step_memory=False` leaves out the process's resident bytes at the end
of each step.

Beside them stand loops of one's own, which call the same denoiser for a timestep after another, the first left out: under `watch()`, as
`sigmascope watch script.py` has it, and under `watch(unet, vae)`, where nobody hears the scheduler.

Last what `stacks=True` costs where it looks, and where a thread of ours takes the most from the host's: a loop of Python
alone in a stage without steps, 30 calls deep. CPU time of the process, that thread's included, for the same loop with and
without, in turn, both beside the thread that reads memory; the least of all repeats, their ratio, and the share that
the record itself states.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

import sigmascope
from sigmascope.integrations.diffusers.own_loops import OWN_LOOP
from sigmascope.records.performance import host_stacks

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.families import FAMILIES

from watch_bench.families import FamilyStep


def hooked(step: FamilyStep, steps: int) -> float:
    """CPU microseconds of a step while the denoiser has a hook that does nothing."""
    handle = step.denoiser.register_forward_pre_hook(_nothing, with_kwargs=True)
    try:
        return step.made(steps)
    finally:
        handle.remove()


def _nothing(_module: nn.Module, _args: object, _kwargs: object) -> None:
    pass


def watched(step: FamilyStep, steps: int, *, step_memory: bool = True) -> float:
    """The same while the pipeline is watched.

    Raises:
        RuntimeError: The watch has not seen each step.
    """
    with sigmascope.watch(step.pipeline, step_memory=step_memory) as run:
        step.made(1)  # opens the stage, which is done once
        cost = step.made(steps)
    seen, made = run.stage("denoising"), steps + 1
    if len(seen.steps) != made or sum(seen.facts["denoiser_calls"].values()) != made * step.calls:
        raise RuntimeError(f"{made} steps were made, and {len(seen.steps)} seen")
    return cost


def measured(step: FamilyStep, steps: int, repeats: int) -> list[float]:
    """CPU microseconds of a step that is bare, hooked, watched, and watched without its memory: the least of each."""
    ways: list[Callable[[], float]] = [
        lambda: step.made(steps),
        lambda: hooked(step, steps),
        lambda: watched(step, steps),
        lambda: watched(step, steps, step_memory=False),
    ]
    with step.without_work():
        rounds = [[way() for way in ways] for _ in range(repeats)]
    return [min(of_way) for of_way in zip(*rounds, strict=True)]


def watched_loop(step: FamilyStep, steps: int, *, is_named: bool) -> float:
    """The same of a loop of one's own.

    Args:
        step: What is called in it.
        steps: How many.
        is_named: Whether the watch is given denoiser and VAE, and the loop has no scheduler.

    Raises:
        RuntimeError: The watch has not seen each step.
    """
    named = (step.denoiser, step.pipeline.vae) if is_named else ()
    with sigmascope.watch(*named) as run, torch.no_grad():
        cost = step.looped(steps, has_scheduler=not is_named)
    seen = run.stage("denoising")
    if len(seen.steps) != steps or run.stage("generation").facts["pipeline"]["class_name"] != OWN_LOOP:
        raise RuntimeError(f"{steps} steps of a loop were made, and {len(seen.steps)} seen")
    return cost


def measured_loops(step: FamilyStep, steps: int, repeats: int) -> list[float]:
    """CPU microseconds that `watch()` and `watch(unet, vae)` add to a step of a loop: the least of each."""
    ways: list[Callable[[], float]] = [
        lambda: step.looped(steps),
        lambda: watched_loop(step, steps, is_named=False),
        lambda: step.looped(steps, has_scheduler=False),
        lambda: watched_loop(step, steps, is_named=True),
    ]
    with step.without_work():
        rounds = [[way() for way in ways] for _ in range(repeats)]
    bare, everywhere, without_scheduler, named = (min(of_way) for of_way in zip(*rounds, strict=True))
    return [everywhere - bare, named - without_scheduler]


_LOOP: int = 20_000_000
_DEPTH: int = 30


def looped(depth: int = _DEPTH) -> int:
    """Work of Python alone, so many calls deep: half a second."""
    if depth:
        return looped(depth - 1)
    total = 0
    for number in range(_LOOP):
        total += number
    return total


def loop_seconds(*, stacks: bool) -> tuple[float, float]:
    """CPU seconds of the process for the loop in a watched stage, and the share that the record says the looks cost.

    Raises:
        RuntimeError: The loop was not seen.
    """
    with sigmascope.watch(nn.Identity(), stacks=stacks) as watching, sigmascope.stage("loop"):
        began = time.process_time()
        looped()
        seconds = time.process_time() - began
    seen = host_stacks(watching.record())
    if stacks and (seen is None or not any(place.function == "looped" for place in seen.places)):
        raise RuntimeError("the loop was not seen")
    return seconds, 0.0 if seen is None else seen.cost_share


def print_stacks(repeats: int) -> None:
    """Measure and print what looking at stacks costs."""
    without, with_stacks, shares = [], [], []
    for _ in range(repeats):
        without.append(loop_seconds(stacks=False)[0])
        seconds, share = loop_seconds(stacks=True)
        with_stacks.append(seconds)
        shares.append(share)
    print(
        f"stacks=True: {min(with_stacks):.4f} CPU s for {min(without):.4f}, × {min(with_stacks) / min(without):.4f}; "
        f"the record says {100 * median(shares):.2f} %\n"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--only_stacks", action="store_true", help="Measure stacks=True alone.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print_stacks(given.repeats)
    if given.only_stacks:
        return
    print(
        f"{'µs of a step':12} calls   bare  empty hook  watch  × empty hook  step_memory=False  own loop  of named parts"
    )
    for family in given.families:
        step = FamilyStep(family)
        bare, hook, watch, without_memory = measured(step, given.steps, given.repeats)
        own_loop, of_named_parts = measured_loops(step, given.steps, given.repeats)
        print(
            f"{family:12} {step.calls:5} {bare:6.2f} {hook - bare:11.2f} {watch - bare:6.2f} "
            f"{(watch - bare) / (hook - bare):13.2f} {without_memory - bare:18.2f}"
            f"{own_loop:10.2f}{of_named_parts:16.2f}"
        )


if __name__ == "__main__":
    main()
