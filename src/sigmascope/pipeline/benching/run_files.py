"""Where the runs of a benchmark lie: one file each, named for its case."""

from contextlib import suppress
from pathlib import Path

from sigmascope.errors import ConfigError, WriteError
from sigmascope.records.benchmark import BenchCase
from sigmascope.records.os_errors import reason_of
from sigmascope.records.run import Run


class RunFiles:
    """A folder that holds one benchmark's runs, and no other's: two of them in one would be taken for the same.

    Args:
        folder: Made when it is not there, with the folders above it.

    Raises:
        ConfigError: There are runs in it already.
        WriteError: It cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: dict[str, int] = {}
        self._made: list[Path] = []
        try:
            self._made = [one for one in (folder, *folder.parents) if not one.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            has_runs = any(folder.glob("*.json"))
        except OSError as error:
            raise WriteError(
                folder, f"cannot be made a folder ({reason_of(error)}).", hint="Choose another --output."
            ) from error
        if has_runs:
            raise ConfigError(f"--output: {folder} holds .json files already.", hint="Choose another folder.")

    def save(self, run: Run, case: BenchCase) -> Path:
        """Save a run as the next of its case.

        Raises:
            WriteError: It cannot be written.
        """
        number = self._saved.get(case.label, 0) + 1
        path = self.folder / f"{case.label}-{number:03d}.json"
        run.save(path)
        self._saved[case.label] = number
        return path

    def tidy(self) -> None:
        """Take away the folders that were made for nothing: no run was saved."""
        if self._saved:
            return
        with suppress(OSError):  # somebody else put something there, or took it away
            for made in self._made:
                made.rmdir()
