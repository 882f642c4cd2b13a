"""What a text encoding must keep to. None: not checked."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextEncodingThresholds:
    """Limits that the validation holds a text encoding to; each of them is the caller's to set.

    Args:
        max_seconds: For the whole step.
        max_prompt_characters: For each of both prompts; those of a batch together.
        max_truncated_tokens: How many tokens of a prompt, or of all in a batch, may be cut off.
        max_ram_percent: Use of the machine's RAM after the step, 0-100.
        max_gpu_percent: Use of the device's memory after the step, by everybody, 0-100.
        max_rss_growth_mb: How much the process may have grown, in MiB.
        max_gpu_growth_mb: How much PyTorch's allocator may have grown on the device in use, in MiB.
        max_absolute_value: For every element of a conditioning.
        expected_width: Of the conditioning: what the denoiser's cross attention takes.
        expected_tokens: Length of the sequence.
        expected_device: Such as "cuda:0", or "cuda" for any of them.
        expected_dtype: Such as "bfloat16".
        allow_empty_prompt: Whether the positive prompt may be empty.
    """

    max_seconds: float | None = None
    max_prompt_characters: int | None = None
    max_truncated_tokens: int | None = 0
    max_ram_percent: float | None = 95.0
    max_gpu_percent: float | None = 95.0
    max_rss_growth_mb: float | None = None
    max_gpu_growth_mb: float | None = None
    max_absolute_value: float | None = None
    expected_width: int | None = None
    expected_tokens: int | None = None
    expected_device: str | None = None
    expected_dtype: str | None = None
    allow_empty_prompt: bool = True
