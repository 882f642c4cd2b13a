"""Tokens as the host's own tokenizers were seen to make them. They are not asked again.

A fast tokenizer refuses the host while somebody else, in another thread, uses it. It gives what it cut off beside what it
kept, however, and there that is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sigmascope.stages.prompt_facts import TokenCount

WORDS_UNKNOWN: Final = "the tokenizer was only watched, and not asked which words did not fit"
NOT_SEEN: Final = "no tokenizer was seen reading this prompt as it is; some pipelines put it into a template"
FULL: Final = "the prompt reaches the tokenizer's limit, and was never read without a limit"
_NO_LIMIT: Final = 1_000_000
"""A tokenizer's limit from here on says that it has none."""


class Reading(NamedTuple):
    """One text that a tokenizer read: how long it became, special tokens included, and its limit if it had one.

    `rest` is how many tokens it cut off, where it tells.
    """

    tokenizer: str
    text: str
    length: int
    special: int
    limit: int | None
    rest: int | None = None


def readings_of(
    name: str, tokenizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[Reading]:
    """What a call of a tokenizer says of each of its texts. Nothing for pairs, or where no mask is given."""
    text = args[0] if args else kwargs.get("text")
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return []
    lengths = list(_lengths(result["attention_mask"]))
    if len(lengths) != len(texts):
        return []
    rests = list(map(_rest, getattr(result, "encodings", None) or ()))
    if len(rests) != len(texts):
        rests = [None] * len(texts)
    limit = kwargs.get("max_length") or getattr(tokenizer, "model_max_length", None)
    is_cut = kwargs.get("truncation") not in (None, False, "do_not_truncate")
    is_limit = is_cut and isinstance(limit, int) and limit < _NO_LIMIT
    special = tokenizer.num_special_tokens_to_add() if kwargs.get("add_special_tokens", True) else 0
    return [
        Reading(name, text, length, special, limit if is_limit else None, rest)
        for text, length, rest in zip(texts, lengths, rests, strict=True)
    ]


def _rest(encoding: Any) -> int | None:
    """How many of a text's tokens a fast tokenizer cut off; None where it keeps no pieces, as older ones do."""
    pieces = getattr(encoding, "overflowing", None)
    return None if pieces is None else sum(piece.special_tokens_mask.count(0) for piece in pieces)


def _lengths(mask: Any) -> Iterator[int]:
    """The sums of the mask's rows; a mask that is one row is that of one text."""
    rows = mask.tolist() if hasattr(mask, "tolist") else mask
    for row in rows if rows and isinstance(rows[0], list) else [rows]:
        yield int(sum(row))


def counts_seen(readings: Sequence[Reading], texts: Sequence[str]) -> tuple[list[TokenCount], str | None]:
    """What each tokenizer made of the texts of a batch, and why there is nothing when there is nothing."""
    counts = []
    for name in dict.fromkeys(reading.tokenizer for reading in readings):
        of_texts = [
            [
                reading
                for reading in readings
                if reading.tokenizer == name and reading.text.strip() == text.strip()
            ]
            for text in texts
        ]
        if all(of_texts):
            counts.append(_token_count(name, of_texts))
    return counts, None if counts else NOT_SEEN


def _token_count(name: str, of_texts: Sequence[Sequence[Reading]]) -> TokenCount:
    whole = [
        max(reading.length + (reading.rest or 0) for reading in readings) - readings[0].special
        for readings in of_texts
    ]
    limit = next(
        (reading.limit - reading.special for reading in of_texts[0] if reading.limit is not None), None
    )
    cut = [_tokens_cut_off(readings) for readings in of_texts]
    known = [tokens for tokens in cut if tokens is not None]
    is_known = len(known) == len(cut)
    unavailable = {} if is_known and not sum(known) else {"truncated_words": WORDS_UNKNOWN}
    if not is_known:
        unavailable["truncated_tokens"] = FULL
    if limit is None:
        unavailable["token_limit"] = "no limit was given to the tokenizer"
    return TokenCount(
        name,
        sum(whole),
        sum(known) if is_known else None,
        () if is_known and not sum(known) else None,
        limit=limit,
        unavailable=unavailable,
    )


def _tokens_cut_off(readings: Sequence[Reading]) -> int | None:
    """How many tokens did not fit; None where only a full sequence was seen, which may have been longer."""
    kept = [reading for reading in readings if reading.limit is not None]
    if not kept:
        return 0
    rests = [reading.rest for reading in kept if reading.rest is not None]
    if rests:
        return max(rests)
    if len(kept) < len(readings):
        return max(0, max(reading.length for reading in readings) - min(reading.length for reading in kept))
    return 0 if all(reading.length < (reading.limit or 0) for reading in kept) else None
