"""Memory that runs out, as an error that says what to change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.pipeline.out_of_memory import is_out_of_memory

LESS_FOR_TRAINING: Final = (
    "Lower batch_size or image_size, set gradient_checkpointing: true or mixed_precision: bf16, or pixel_crop where "
    "there is a pixel loss; --dry_run estimates the memory."
)
LESS_FOR_INFERENCE: Final = "Choose a smaller --size or --resolution, --tile_size 512, or --torch_dtype bf16."


@contextmanager
def within_memory(what: str, hint: str) -> Iterator[None]:
    """Say it plainly when memory runs out in the block, on any device.

    Args:
        what: Is being done there.
        hint: What takes less.

    Raises:
        ConfigError: In place of what PyTorch, Pillow or Python say of it. Every other error is as it was.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SigmascopeError) or not is_out_of_memory(error):
            raise
        raise ConfigError(f"{what} does not fit into memory{_said(error)}.", hint=hint) from error


def _said(error: Exception) -> str:
    """The first sentence, which has the sizes; a `MemoryError` is without words."""
    lines = str(error).splitlines()
    sentence = lines[0].partition(". GPU ")[0].rstrip(".") if lines else ""
    return f" ({sentence})" if sentence else ""
