"""How a training starts: with its base, and from its newest checkpoint."""

from accelerate import Accelerator

from sigmascope.errors import ConfigError
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.accelerating import is_sharded
from sigmascope.lbm.training.identity import require_same
from sigmascope.lbm.training.loop import TrainingLoop
from sigmascope.lbm.training.memory_estimate import weight_dtype
from sigmascope.lbm.training.session import Session
from sigmascope.lbm.training.session_state import restore
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.watched import load_watched
from sigmascope.progress import Progress


def load_base(settings: TrainSettings, accelerator: Accelerator, progress: Progress) -> LbmModel:
    """The base, in the precision of training: what is trained itself stays float32.

    Where FSDP spreads the denoiser, no device need have room for all of it.
    """
    sharded = is_sharded(accelerator)
    model = load_watched(
        settings.base_model_path,
        settings.lbm,
        dtype=weight_dtype(settings),
        device="cpu" if sharded else accelerator.device,
        progress=progress,
    )
    if sharded:
        model.vae.to(accelerator.device)
    return model


def go_on(loop: TrainingLoop) -> int | None:
    """Bring the session to where the newest good checkpoint left off."""
    found = loop.folder.newest()
    if found is None:
        return None
    checkpoint, state = found
    require_same(state.identity, loop.session.identity, checkpoint)
    restore(loop.session, state, checkpoint)
    loop.checkpoint = checkpoint
    return state.step


def require_same_start(session: Session) -> None:
    """Refuse a start at different steps: processes on another machine do not see the same checkpoints."""
    steps = [row[0] for row in session.team.gather([session.step])]
    if len(set(steps)) > 1:
        raise ConfigError(
            f"save_ckpt_path: processes found checkpoints of different steps ({', '.join(map(str, steps))}).",
            hint="Choose a folder that all processes share.",
        )
