"""The files that a base is written to: all of them or none, with room on the disk, and none lost that was there."""

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sigmascope.errors import ConfigError, SigmascopeError, WriteError
from sigmascope.lbm.config import LbmConfig, load_config
from sigmascope.records.atomic import require_writable
from sigmascope.records.leftovers import temporary_name

_log = logging.getLogger(__name__)

SUFFIXES = (".safetensors", ".ckpt")
_BESIDES = 2 * 2**20
"""Room for headers and names, in bytes a file."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Where a base goes.

    Attributes:
        safetensors: None when only a `.ckpt` was asked for.
        ckpt: None when only a `.safetensors` was asked for.
        config: The YAML to write; None when one that says the same is there, or none was asked for.
    """

    safetensors: Path | None
    ckpt: Path | None
    config: Path | None

    @property
    def weights(self) -> tuple[Path, ...]:
        """The files of weights."""
        return tuple(path for path in (self.safetensors, self.ckpt) if path is not None)

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file that will be written."""
        return self.weights if self.config is None else (*self.weights, self.config)


def choose_targets(save_path: Path, config: LbmConfig, *, both: bool) -> Targets:
    """Choose the files and refuse those that cannot be written, before any work is done.

    Args:
        save_path: One of the files, by its ending.
        config: Of the LBM.
        both: Write the other format beside it too, and the config where no equal one is.

    Raises:
        ConfigError: The ending is neither, or a YAML that describes another model stands where later commands
            would find it; or links lead two of the files to one place.
        WriteError: A target cannot be written.
    """
    suffix = save_path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(
            f"{save_path}: a base is written as .safetensors or .ckpt.", hint="Choose one of these endings."
        )
    paths = {each: save_path.with_suffix(each) if each != suffix else save_path for each in SUFFIXES}
    targets = Targets(
        paths[".safetensors"] if both or suffix == ".safetensors" else None,
        paths[".ckpt"] if both or suffix == ".ckpt" else None,
        config_target(save_path, config) if both else None,
    )
    for path in targets.all:
        require_writable(path)
    _refuse_one_for_two(targets)
    return targets


def _refuse_one_for_two(targets: Targets) -> None:
    """Refuse links by which the second file would replace the first."""
    by_place: dict[Path, Path] = {}
    for path in targets.all:
        other = by_place.setdefault(path.resolve(), path)
        if other is not path:
            raise ConfigError(
                f"--save_path: {other} and {path} are links to the same file, {path.resolve()}.",
                hint="Remove one of the links, or write the base under another name.",
            )


def refuse_inputs(targets: Targets, inputs: Iterable[Path]) -> None:
    """Refuse to replace a file of the backbone by the base that is made from it.

    Raises:
        ConfigError: Names the file.
    """
    read = {path.resolve() for path in inputs}
    for path in targets.weights:
        if path.resolve() in read:
            raise ConfigError(
                f"--save_path: {path} would be replaced, and it belongs to the backbone.",
                hint="Write the base under another name.",
            )


def config_target(save_path: Path, config: LbmConfig) -> Path | None:
    """Where the config goes so that later commands find it, and no other model's is lost.

    Returns:
        `config.yaml` in the same folder; `<name>.yaml`, which goes before it, when that describes another model;
        None when an equal one is found there already.

    Raises:
        ConfigError: `<name>.yaml` is there and describes another model.
    """
    own, shared = save_path.with_suffix(".yaml"), save_path.parent / "config.yaml"
    if own.exists():
        if _says(own, config):
            return None
        raise ConfigError(
            f"{own}: describes another model than the one to be made, and later commands would read it.",
            hint="Choose another --save_path, or move that file away.",
        )
    if not shared.exists():
        return shared
    return None if _says(shared, config) else own


def require_space(targets: Targets, nbytes: int) -> None:
    """Refuse to begin what would fill the disk; files that are replaced stay until the new ones are whole.

    Args:
        targets: Where the base goes.
        nbytes: Bytes of all its tensors.

    Raises:
        WriteError: Says how much is needed and how much is free.
    """
    needed = len(targets.weights) * (nbytes + _BESIDES)
    free = shutil.disk_usage(targets.weights[0].resolve().parent).free
    if needed > free:
        raise WriteError(
            targets.weights[0],
            f"the disk is too full: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free.",
            hint="Free some space or choose another disk.",
        )


@contextmanager
def all_or_none(targets: Iterable[Path]) -> Iterator[None]:
    """Put every target back as it was when the block fails, even if some were replaced already.

    Each file appears whole or not at all by itself; this is for what goes wrong between the first and the last
    of them. What stood there is kept by a second link until then, so it costs no room.
    """
    before = {path.resolve(): _linked(path.resolve()) for path in targets}
    try:
        yield
    except BaseException:
        for path, link in before.items():
            _put_back(path, link)
        raise
    finally:
        for link in before.values():
            if isinstance(link, Path):
                link.unlink(missing_ok=True)


def _linked(path: Path) -> Path | bool:
    """A second link to what is at `path`; whether there is something if it cannot be linked."""
    if not path.exists():
        return False
    link = path.with_name(temporary_name(path))
    try:
        os.link(path, link)
    except OSError as error:  # a file system without hard links
        _log.debug("%s cannot be kept by a second link: %s", path, error)
        return True
    return link


def _put_back(path: Path, link: Path | bool) -> None:
    with suppress(OSError):  # the failure that led here is what the user must see
        if isinstance(link, Path):
            link.replace(path)
        elif not link:
            path.unlink(missing_ok=True)


def _says(path: Path, config: LbmConfig) -> bool:
    try:
        return load_config(path) == config
    except SigmascopeError:
        return False
