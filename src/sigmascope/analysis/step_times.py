"""The clock that a stage's steps are judged by."""

from sigmascope.records.run import Stage


def step_seconds(stage: Stage) -> tuple[float, ...]:
    """Of a stage's steps, by the accelerator's clock where it measured them all, else by the host's."""
    on_device = [seconds for seconds in stage.steps.gpu_seconds if seconds is not None]
    return tuple(on_device) if len(on_device) == len(stage.steps) else stage.steps.seconds
