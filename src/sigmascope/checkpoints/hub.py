"""Models by their name on the Hugging Face hub (`org/model`, `org/model@revision`), found in its local cache.

A name looks like a relative path, so what is there under that path comes first.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sigmascope.checkpoints.checkpoint import is_existing, is_folder, near_path
from sigmascope.checkpoints.torch_files import PICKLE_SUFFIXES
from sigmascope.errors import CheckpointError
from sigmascope.installation import install_packages

WEIGHT_SUFFIXES: Final = (".safetensors", ".gguf", *PICKLE_SUFFIXES)
_A_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*(?:@\w[\w./-]*)?", re.ASCII)
_IN_THE_CACHE: Final = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]([^/\\]+)[/\\]?$")


def local_model(model: str | os.PathLike[str], files: Sequence[str] = (), *, download: bool = False) -> Path:
    """The path of a model: as given, or the snapshot of a hub's name in the local cache.

    Args:
        model: A path, or `org/model`, with `@` and a branch, tag or commit behind it if it is not `main`.
        files: Patterns of the files to download of it; all by default.
        download: Download what the cache lacks. Otherwise the error says how to.

    Returns:
        A path that is there, or the one given if it is not a name on the hub.

    Raises:
        CheckpointError: The cache has no such model, or no weights of it: says how to download them. Or
            huggingface_hub is not installed.
    """
    path, name = Path(model), os.fspath(model)
    if not is_hub_name(name) or is_existing(path):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise CheckpointError(
            path,
            "is not a file or folder, and to look for it in the hub's cache needs huggingface_hub, which is not installed.",
            hint=f"Check the path, or install it with: {install_packages('huggingface_hub')}",
        ) from error
    command = f"Check the path, or download it: {download_command(name, files)}"
    repository, revision = split_revision(name)
    try:
        wanted = {"allow_patterns": list(files) or None} if download else {"local_files_only": True}
        snapshot = Path(snapshot_download(repository, revision=revision, **wanted))
    except (
        OSError,
        ValueError,
    ) as error:  # what is no name to it, or a damaged note of a revision in the cache
        if download:
            message = f"is not a file or folder, and cannot be downloaded ({str(error).splitlines()[0]})."
            raise CheckpointError(path, message, hint=command) from error
        # From 1.22 on it refuses a model of which some files are not here, such as those of other variants.
        partial = getattr(error, "snapshot_path", None)
        if partial is None and (is_folder(path.parent) or near_path(path) is not None):
            return path  # a slip in a path more likely than a name
        if partial is None:
            message = f"is not a file or folder, and {not_cached(name)}"
            raise CheckpointError(path, message, hint=command) from error
        snapshot = Path(partial)
    if not any(file.suffix in WEIGHT_SUFFIXES and file.exists() for file in snapshot.rglob("*")):
        raise CheckpointError(path, "is in the hub's local cache without its weights.", hint=command)
    return snapshot


def is_hub_name(text: str) -> bool:
    """Whether it has the form `org/model` or `org/model@revision`; a file's name of weights has not."""
    return _A_NAME.fullmatch(text) is not None and not text.lower().endswith((*WEIGHT_SUFFIXES, ".json"))


def split_revision(name: str) -> tuple[str, str | None]:
    """`org/model` and the revision behind it, if there is one."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def download_command(name: str, files: Sequence[str] = ()) -> str:
    """The command that downloads a model, or some files of it."""
    repository, revision = split_revision(name)
    at_revision = ("--revision", revision) if revision else ()
    return " ".join(("hf download", repository, *files, *at_revision))


def not_cached(name: str) -> str:
    """That the cache has no model of this name, as the end of a sentence."""
    revision = split_revision(name)[1]
    return f"the hub's local cache has no such model{f' in the revision {revision}' if revision else ''}."


def rest_command(path: Path) -> str | None:
    """The command that downloads the rest of the model whose snapshot holds a path; None for any other path."""
    names = (hub_name(folder) for folder in (path, *path.parents))
    return next((download_command(name) for name in names if name), None)


def hub_name(path: Path) -> str | None:
    """The name of the model whose snapshot the folder is, with its commit unless that is `main`'s; else None."""
    match = _IN_THE_CACHE.search(str(path))
    if match is None:
        return None
    try:
        main = (path.parents[1] / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        main = ""
    return f"{match[1]}/{match[2]}" + ("" if main == match[3] else f"@{match[3]}")


def model_name(path: Path) -> str:
    """What to call a model: by its name on the hub, else by that of its file or folder."""
    return hub_name(path) or path.name
