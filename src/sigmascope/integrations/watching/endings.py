"""When a denoising is over, which no pipeline says."""

from sigmascope.integrations.watching.activity import Activity


def is_final(activity: Activity) -> bool:
    """Whether a decoding follows the denoising, and is no preview inside of it.

    Pipelines that say how many steps they make are believed; of others every decoding is taken as the end.
    """
    denoising = activity.denoising
    steps = _steps_of_pipeline(activity)
    if denoising is None or steps is None or getattr(activity.pipeline, "interrupt", False):
        return True
    return denoising.stepped == 0 or denoising.stepped >= steps


def end_finished(activity: Activity) -> None:
    """Close the denoising if it has made all its steps: what comes now is not part of it.

    The steps are those that the pipeline says it makes, or else those of the schedule that was set last.
    """
    denoising = activity.denoising
    if denoising is None or not denoising.stepped:
        return
    steps = _steps_of_pipeline(activity) or activity.planned_steps
    if steps is not None and denoising.stepped >= steps:
        activity.end_denoising()


def _steps_of_pipeline(activity: Activity) -> int | None:
    steps = getattr(activity.pipeline, "num_timesteps", None)
    return steps if isinstance(steps, int) else None
