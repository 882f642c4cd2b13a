"""The training loop: steps, and between them validation and checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sigmascope.lbm.batches import Batch
from sigmascope.lbm.data import DataPosition
from sigmascope.lbm.training.checkpoint_files import TrainingState
from sigmascope.lbm.training.checkpointing import CheckpointFolder, checkpoint_name
from sigmascope.lbm.training.distributed import Group, groups
from sigmascope.lbm.training.monitoring import TRAINING, Watch
from sigmascope.lbm.training.plan_length import epoch_limit
from sigmascope.lbm.training.session import Session
from sigmascope.lbm.training.session_state import state_of
from sigmascope.lbm.training.sharding import reshard
from sigmascope.lbm.training.stopping import StopReason, StopSignals, agreed_reason
from sigmascope.lbm.training.telling import Teller
from sigmascope.lbm.training.trackers import log_pictures
from sigmascope.lbm.training.validation import Validation, save_sheet, validate

SAVED_EARLY: Final = 10
"""An epoch's end is saved unless fewer than 1/10 of `save_interval` steps were made since the last checkpoint."""


@dataclass
class TrainingLoop:
    """Trains a session to its end, or to where it is stopped.

    Attributes:
        session: What is trained, and how far it is.
        folder: Of the checkpoints.
        samples: To validate with.
        watch: The record.
        stop: Asks for an early end.
        teller: Is told of every step.
        add_files: Puts more into the folder of each checkpoint, given what it holds.
        checkpoint: The last one of this training.
        validations: All that were made in this session.
    """

    session: Session
    folder: CheckpointFolder
    samples: Sequence[Batch]
    watch: Watch
    stop: StopSignals
    teller: Teller
    add_files: Callable[[TrainingState, Path], object] = lambda state, folder: None
    checkpoint: Path | None = None
    validations: list[Validation] = field(default_factory=list)
    _saved_step: int | None = None
    _validated_step: int | None = None

    def run(self) -> StopReason | None:
        """Train; afterwards the last step is in a checkpoint, and validated unless training was stopped early.

        Returns:
            What stopped it early; None when it came to its end.

        Raises:
            NonFiniteError: Loss or gradient is NaN or Inf.
            WriteError: A checkpoint cannot be written; those before are intact.
            DataError: The shards hold nothing to train on.
        """
        session = self.session
        self._saved_step = None if self.checkpoint is None else session.step
        with self.watch.recorder.stage(TRAINING) as stage:
            stage.module("denoiser", session.model.denoiser)
            try:
                reason = self._epochs()
                if reason is None or session.step > 0:
                    self._save()
                if reason is None and self._validated_step != session.step:
                    self._validate()  # after the checkpoint, which must not be lost where this fails
                return reason
            finally:
                for name, value in self.watch.spent.facts().items():
                    stage.fact(name, value)
                stage.fact("optimizer_steps", session.step)
                stage.fact("skipped_samples", session.data.skipped.count)

    def _epochs(self) -> StopReason | None:
        session = self.session
        last = epoch_limit(session.settings)
        if session.step == 0:
            self._validate()
        while not self._is_done() and (last is None or session.epoch < last):
            if reason := agreed_reason(self.stop, session.team) or self._epoch():
                return reason
            if self._is_done():
                return None
            session.epoch, session.position = session.epoch + 1, None
            made = session.step - (self._saved_step or 0)
            if made * SAVED_EARLY >= session.settings.save_interval:
                self._save()
        return None

    def _epoch(self) -> StopReason | None:
        """Train to the end of the data, of the steps, or until someone stops it."""
        session, settings = self.session, self.session.settings
        for group in self._groups():
            self._step(group)
            if session.step % settings.validate_every == 0:
                self._validate()
            reason = agreed_reason(self.stop, session.team)
            if reason or self._is_done():
                return reason
            if session.step % settings.save_interval == 0:
                self._save()
        return None

    def _groups(self) -> Iterator[Group[DataPosition]]:
        session = self.session
        stream = session.data.batches(session.epoch, session.position)
        rest = groups(stream, session.settings.gradient_accumulation_steps, session.team)
        while True:
            with self.watch.spent.on("data"):
                group = next(rest, None)
            if group is None:
                return
            yield group

    def _step(self, group: Group[DataPosition]) -> None:
        session = self.session
        last = None if self.checkpoint is None else self.checkpoint.name
        with self.watch.spent.on("step"), self.watch.recorder.step():
            result = session.stepper.make(group, session.step + 1, last)
            if session.average is not None and not result.skipped:
                session.average.update()
        session.step, session.position = session.step + 1, group.position
        self.watch.spent.steps += 1
        self.teller.step(result)

    def _is_done(self) -> bool:
        steps = self.session.settings.max_steps
        return steps is not None and self.session.step >= steps

    def _validate(self) -> None:
        """The main process makes the pictures, with the others where they hold a part of the model.

        Nobody's training is touched by it.
        """
        session = self.session
        if not self.samples:
            return
        self._validated_step = session.step
        main, sharded = session.accelerator.is_main_process, session.stepper.prepared.sharded
        with self.teller.pause(), session.team.together():
            if main or sharded:
                with self.watch.spent.on("validation"), self.watch.recorder.stage("validation"):
                    found = self._translated()
                    if main:
                        self._show(found)

    def _translated(self) -> Validation:
        session = self.session
        with session.average.in_place() if session.average is not None else nullcontext():
            found = validate(
                session.model,
                self.samples,
                session.step,
                session.settings.num_steps,
                conditioning=session.objective.conditioning,
                autocast=session.stepper.prepared.backend.autocast(),
            )
            reshard(session.model)
        return found

    def _show(self, found: Validation) -> None:
        accelerator, step = self.session.accelerator, self.session.step
        self.validations.append(found)
        sheet = save_sheet(found, self.folder.path)
        values = {f"validation/psnr_{count}": value for count, value in found.psnr.items()}
        accelerator.log(values, step=step)
        log_pictures(accelerator, "validation/pictures", found.sheet, step)
        self.teller.listeners.on_validation(found, sheet)

    def _save(self) -> None:
        """Write a checkpoint, unless this step is in one already."""
        session = self.session
        if self._saved_step == session.step:
            return
        main = session.accelerator.is_main_process
        with self.teller.pause():
            with self.watch.spent.on("saving"), self.watch.recorder.stage("checkpoint_saving"):
                state = state_of(session)
                with session.team.together():
                    if main:
                        self.folder.save(state, lambda folder: self.add_files(state, folder))
            self.checkpoint = self.folder.path / checkpoint_name(session.step)
            self._saved_step = session.step
            with session.team.together():
                if main:
                    self.watch.save(self.folder.path)
