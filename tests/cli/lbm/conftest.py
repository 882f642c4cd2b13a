"""The small training, for the command that begins it."""

from tests.lbm.training.conftest import small_files, small_run

__all__ = ["small_files", "small_run"]  # fixtures
