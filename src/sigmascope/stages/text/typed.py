"""The dict structures of SPEC sections 1 and 4. MB are MiB, percentages 0-100, None is unknown.

Each dict that can lack something has `unavailable`: the reason for each of its keys that is None.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

from sigmascope.records.typed import MemoryImpactDict, PeakMemoryDict
from sigmascope.stages.typed import Check, MemoryNow, ModelStateDict


class WeightFacts(TypedDict):
    """A piece of a prompt with emphasis; `text` is None where prompts are private."""

    text: str | None
    weight: float


class TokenFacts(TypedDict):
    """What one tokenizer makes of a prompt."""

    token_count: int
    truncated_tokens: int | None
    truncated_words: list[str] | None
    token_limit: int | None
    chunks: int | None


class PromptFacts(TypedDict):
    """`text_processing` of one prompt. Tokens are those of the tokenizer that reads most of it."""

    text_content: str | None
    text_sha256: str | None
    character_length: int | None
    word_count: int | None
    special_characters: int | None
    whitespace_characters: int | None
    control_characters: int | None
    prompt_weights: list[WeightFacts] | None
    token_count: int | None
    truncated_tokens: int | None
    truncated_words: list[str] | None
    token_limit: int | None
    tokenizers: dict[str, TokenFacts]
    unavailable: dict[str, str]


class TextProcessing(TypedDict):
    """Facts of both prompts."""

    positive: PromptFacts
    negative: PromptFacts


class StatisticsDict(TypedDict):
    """Over the finite elements; counts are of the others."""

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    nan_count: int | None
    inf_count: int | None


class TensorDict(TypedDict):
    """One tensor."""

    shape: list[int]
    dtype: str
    device: str
    size_mb: float
    num_elements: int
    statistics: StatisticsDict
    unavailable: dict[str, str]


class EncoderDict(TypedDict):
    """Which text encoder made a conditioning, and how that is known.

    `evidence` is "class", "token_count", "width" or "none"; `conflict` says what other evidence claims.
    """

    family: str
    evidence: str
    reason: str
    candidates: list[str]
    width: int | None
    clip_variant: str
    clip_variant_by_width: str
    conflict: str | None


class EntryDict(TypedDict):
    """One entry of a conditioning list: regional, scheduled or combined prompts have several."""

    tensor: TensorDict | None
    pooled: TensorDict | None
    attention_mask: TensorDict | None
    others: dict[str, TensorDict]
    metadata: dict[str, Any]


class ConditioningDict(TypedDict):
    """One conditioning. The top level is its first tensor; `entries` has every one.

    `status` is "success", "missing" (None was given), "no_tensor" or "failed" (it could not be read).
    """

    status: str
    structure: str
    shape: list[int] | None
    dtype: str | None
    device: str | None
    size_mb: float | None
    num_elements: int | None
    sequence_length: int | None
    clip_variant: str | None
    encoder_family: str | None
    encoder: EncoderDict | None
    pooled: TensorDict | None
    attention_mask: TensorDict | None
    metadata: dict[str, Any]
    entries: list[EntryDict]
    total_size_mb: float | None
    statistics: StatisticsDict | None
    tensor_dump: str | None
    unavailable: dict[str, str]


class ModelStates(TypedDict):
    """`model_state`: both models after the encoding."""

    clip: ModelStateDict
    unet: ModelStateDict


class Performance(TypedDict):
    """Seconds. The times of single prompts are known only where they were measured apart."""

    total_execution_time: float | None
    positive_encoding_time: float | None
    negative_encoding_time: float | None
    time_per_character: float | None
    time_per_token: float | None
    unavailable: dict[str, str]


class Efficiency(TypedDict):
    """`memory_per_character_mb` is the size of the conditionings by the prompts' characters.

    `cleanup_effectiveness` (0 to 1) is the share of memory's growth to its peak that was given back.
    """

    characters_per_second: float | None
    tokens_per_second: float | None
    memory_per_character_mb: float | None
    gpu_utilization: float | None
    cleanup_effectiveness: float | None
    unavailable: dict[str, str]


class Compatibility(TypedDict):
    """Whether what was made fits what will use it."""

    clip_model: Check
    tensor_dimensions: Check
    device_placement: Check
    memory_threshold: Check


class Validation(TypedDict):
    """`success`: no check failed. `notes` are worth knowing and no failure."""

    success: bool
    input: Check
    output: Check
    performance: Check
    compatibility: Compatibility
    notes: list[str]


class TextEncodingBaseline(TypedDict):
    """What is known before the encoding. `references` keeps no model alive and is left out of analyses."""

    timestamp: str
    memory: MemoryNow
    clip: ModelStateDict
    unet: ModelStateDict
    tokenizers: dict[str, str]
    encoders: list[Mapping[str, Any]]
    references: Any


class TextEncodingAnalysis(TypedDict):
    """What `analyze_text_encoding_results` gives (SPEC sections 1 and 4)."""

    encoding_success: bool
    success: bool
    error: str | None
    exception_details: dict[str, str] | None
    elapsed_time: float | None
    positive_conditioning: ConditioningDict
    negative_conditioning: ConditioningDict
    text_processing: TextProcessing
    performance: Performance
    efficiency: Efficiency
    model_state: ModelStates
    memory_impact: MemoryImpactDict | None
    peak_memory: PeakMemoryDict | None
    baseline: Mapping[str, Any] | None
    current_memory: MemoryNow
    validation: Validation
    unavailable: dict[str, str]
