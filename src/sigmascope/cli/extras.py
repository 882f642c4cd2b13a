"""Optional dependencies: a missing one is an error that says what to install."""

from collections.abc import Iterator
from contextlib import contextmanager

from sigmascope.cli.stdout import stdout_for_results
from sigmascope.errors import ConfigError

_LBM = ("diffusers", "transformers", "peft", "accelerate", "pydantic", "pydantic_core", "yaml", "PIL")
PACKAGES = {
    "lbm": _LBM,
    "train": (*_LBM, "webdataset", "tensorboard"),
    "ui": (*_LBM, "starlette", "uvicorn", "jinja2"),
}
"""What each extra brings, by the names that are imported."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Say which extra to install when an import of the block fails for want of it; the block holds imports only.

    What packages print when they are imported goes to stderr.

    Args:
        extra: A key of `PACKAGES`.

    Raises:
        ConfigError: A package of the extra is not installed. Any other missing module raises as it is.
    """
    try:
        with stdout_for_results():
            yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES[extra]:
            raise
        raise ConfigError(
            f"This command needs {package}, which is not installed.",
            hint=f'Install it with: pip install "sigmascope[{extra}]"',
        ) from error
