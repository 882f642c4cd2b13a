"""How many tokens a prompt is, and which of its words did not fit.

The tokenizers are the host's own: given, or found in its pipeline or CLIP. Nothing is downloaded, and a
tokenizer is left as it was found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sigmascope.stages.host_reading import read_host
from sigmascope.stages.text.encoders import CLIP_TOKENS
from sigmascope.stages.text.words import Span, word_spans

_NO_LIMIT = 1_000_000
"""transformers writes 10³⁰ where a tokenizer names no limit."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """What one tokenizer makes of a prompt.

    `tokens` are the prompt's own, without those that mark start, end or padding; `limit` is how many of
    them fit. `chunks` is how many runs of the encoder they are spread over, where nothing is cut.
    """

    name: str
    tokens: int
    truncated: int | None
    truncated_words: tuple[str, ...] = ()
    words_known: bool = True
    limit: int | None = None
    chunks: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


def count_tokens(
    prompts: str | Sequence[str], tokenizers: Mapping[str, Any], limit: int | None
) -> tuple[list[TokenCount], str | None]:
    """What each tokenizer makes of the prompts, and why there is nothing when there is nothing.

    Args:
        prompts: A text, or those of a batch, each of which has all of the limit to itself.
        tokenizers: By name; transformers' (any that can be called) or ComfyUI's.
        limit: The pipeline's own limit on the sequence, special tokens included; None: the tokenizer's. A
            CLIP, which has no more than 77 positions, keeps to those.
    """
    texts = [prompts] if isinstance(prompts, str) else prompts
    batch = [_count_one(text, tokenizers, limit) for text in texts]
    by_name: dict[str, list[TokenCount]] = {}
    for counts, _ in batch:
        for count in counts:
            by_name.setdefault(count.name, []).append(count)
    whole = [_joined(counts) for counts in by_name.values() if len(counts) == len(texts)]
    return whole, next((reason for _, reason in batch if reason is not None), None)


def _joined(counts: Sequence[TokenCount]) -> TokenCount:
    """The counts that one tokenizer gives for each prompt of a batch, as one."""
    cut = [count.truncated for count in counts if count.truncated is not None]
    chunks = [count.chunks for count in counts if count.chunks is not None]
    return replace(
        counts[0],
        tokens=sum(count.tokens for count in counts),
        truncated=sum(cut) if len(cut) == len(counts) else None,
        truncated_words=tuple(word for count in counts for word in count.truncated_words),
        words_known=all(count.words_known for count in counts),
        chunks=sum(chunks) if chunks else None,
        unavailable={name: reason for count in counts for name, reason in count.unavailable.items()},
    )


def _count_one(
    prompt: str, tokenizers: Mapping[str, Any], limit: int | None
) -> tuple[list[TokenCount], str | None]:
    counts: list[TokenCount] = []
    reason = None
    for name, tokenizer in tokenizers.items():
        reading = read_host(lambda tokenizer=tokenizer, name=name: _counts(name, tokenizer, prompt, limit))  # type: ignore[misc]
        if reading.value is None:
            reason = f"{type(tokenizer).__name__} failed: {reading.reason}"
        else:
            counts += reading.value
    return counts, reason


def _counts(name: str, tokenizer: Any, prompt: str, limit: int | None) -> list[TokenCount]:
    if hasattr(tokenizer, "tokenize_with_weights"):
        return _count_in_chunks(name, tokenizer, prompt)
    return [_count(name, tokenizer, prompt, limit)]


def _count(name: str, tokenizer: Any, prompt: str, limit: int | None) -> TokenCount:
    with _left_as_found(tokenizer):
        encoded, starts = _encode(tokenizer, prompt)
        total = len(encoded)
        longest = _longest(_limit_of(tokenizer), limit)
        if longest is None:
            reason = {"token_limit": "the tokenizer names no limit"}
            return TokenCount(name, total, 0, limit=None, unavailable=reason)
        room = max(0, longest - _special_tokens(tokenizer))
        cut = max(0, total - room)
        if not cut:
            return TokenCount(name, total, 0, limit=room)
        if getattr(tokenizer, "truncation_side", "right") == "left":
            reason = {"truncated_words": "the tokenizer cuts at the beginning"}
            return TokenCount(name, total, cut, words_known=False, limit=room, unavailable=reason)
        start = starts[room] if starts is not None else _fits(tokenizer, prompt, room)
    return TokenCount(name, total, cut, _words_from(prompt, start), limit=room)


def _encode(tokenizer: Any, prompt: str) -> tuple[Sequence[int], list[int] | None]:
    """Token ids of the bare prompt and, if the tokenizer tells, the character at which each begins."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(
            prompt, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
        )
        return encoded["input_ids"], [int(start) for start, _ in encoded["offset_mapping"]]
    return _ids(tokenizer, prompt), None


def _ids(tokenizer: Any, text: str) -> Sequence[int]:
    encoded = tokenizer(text, add_special_tokens=False)
    ids: Sequence[int] = encoded["input_ids"]
    return ids


def _longest(own: int | None, asked: int | None) -> int | None:
    """The limit that holds: `max_sequence_length` of FLUX and SD 3 is for T5, their CLIPs have 77 positions."""
    if asked is None or own is None:
        return own if asked is None else asked
    return min(own, asked) if own == CLIP_TOKENS else asked


def _limit_of(tokenizer: Any) -> int | None:
    limit = getattr(tokenizer, "model_max_length", None)
    return int(limit) if isinstance(limit, int | float) and 0 < limit < _NO_LIMIT else None


def _special_tokens(tokenizer: Any) -> int:
    count: Callable[[], int] | None = getattr(tokenizer, "num_special_tokens_to_add", None)
    return 0 if count is None else int(count())


def _fits(tokenizer: Any, prompt: str, room: int) -> int:
    """The end of the longest run of whole words that fits, for a tokenizer that tells no offsets."""
    ends = [span.end for span in word_spans(prompt)]
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_ids(tokenizer, prompt[: ends[middle - 1]])) <= room:
            low = middle
        else:
            high = middle - 1
    return ends[low - 1] if low else 0


def _words_from(prompt: str, start: int) -> tuple[str, ...]:
    """The words that are cut off, wholly or in part, when the text from `start` is."""
    spans: list[Span] = word_spans(prompt)
    return tuple(prompt[span.start : span.end] for span in spans if span.end > start)


@contextmanager
def _left_as_found(tokenizer: Any) -> Iterator[None]:
    """Give a fast tokenizer's backend the truncation and padding back that it had."""
    backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if not hasattr(backend, "enable_truncation"):
        yield
        return
    backend_: Any = backend
    truncation, padding = backend_.truncation, backend_.padding
    try:
        yield
    finally:
        if backend_.truncation != truncation:
            backend_.enable_truncation(**truncation) if truncation else backend_.no_truncation()
        if backend_.padding != padding:
            backend_.enable_padding(**padding) if padding else backend_.no_padding()


def _count_in_chunks(name: str, tokenizer: Any, prompt: str) -> list[TokenCount]:
    """ComfyUI's tokenizers: lists of (token, weight, word) per encoder; word 0 is start, end and padding.

    They cut nothing off: a long prompt goes through the encoder in several chunks. Those of language models
    put the prompt into a template, whose tokens an empty prompt has too.
    """
    empty = {encoder: tokens for encoder, tokens, _ in _word_tokens(name, tokenizer, "")}
    return [
        TokenCount(encoder, max(0, tokens - empty.get(encoder, 0)), 0, chunks=chunks)
        for encoder, tokens, chunks in _word_tokens(name, tokenizer, prompt)
    ]


def _word_tokens(name: str, tokenizer: Any, prompt: str) -> list[tuple[str, int, int]]:
    """For each encoder its name, how many tokens belong to words, and in how many chunks they are."""
    encoders = tokenizer.tokenize_with_weights(prompt, return_word_ids=True)
    if not isinstance(encoders, Mapping):
        encoders = {name: encoders}
    return [
        (str(encoder), sum(entry[2] != 0 for chunk in chunks for entry in chunk), len(chunks))
        for encoder, chunks in encoders.items()
    ]
