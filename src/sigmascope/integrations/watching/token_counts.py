"""How many tokens prompts became, as the host's own tokenizers were seen to make them.

They are not asked again: a fast tokenizer refuses the host while somebody else, in another thread, uses it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sigmascope.stages.text.tokens import TokenCount

WORDS_UNKNOWN: Final = "the tokenizer was watched and not asked which words did not fit"
NOT_SEEN: Final = "no tokenizer was seen to read this prompt as it is; pipelines put some into a template"
FULL: Final = "the tokenizer's limit is reached, and it was not seen to read the prompt without one"
_NO_LIMIT: Final = 1_000_000


class Reading(NamedTuple):
    """One text that a tokenizer read: how long it became, special tokens included, and its limit if it had one."""

    tokenizer: str
    text: str
    length: int
    special: int
    limit: int | None


def readings_of(
    name: str, tokenizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[Reading]:
    """What a call of a tokenizer says of each of its texts. Nothing for pairs, or where no mask is given.

    Args:
        name: The pipeline's component.
        tokenizer: Itself.
        args: The call's.
        kwargs: Those by name.
        result: What it gave.
    """
    given = args[0] if args else kwargs.get("text")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return []
    lengths = list(_lengths(result["attention_mask"]))
    if len(lengths) != len(texts):
        return []
    limit = kwargs.get("max_length") or getattr(tokenizer, "model_max_length", None)
    is_cut = kwargs.get("truncation") not in (None, False, "do_not_truncate")
    is_limit = is_cut and isinstance(limit, int) and limit < _NO_LIMIT
    special = tokenizer.num_special_tokens_to_add() if kwargs.get("add_special_tokens", True) else 0
    return [
        Reading(name, text, length, special, limit if is_limit else None)
        for text, length in zip(texts, lengths, strict=True)
    ]


def counts_seen(readings: Sequence[Reading], texts: Sequence[str]) -> tuple[list[TokenCount], str | None]:
    """What each tokenizer made of the texts of a batch, and why there is nothing when there is nothing.

    Args:
        readings: All that were seen in the encoding.
        texts: A prompt's.
    """
    counts = []
    for name in dict.fromkeys(reading.tokenizer for reading in readings):
        found = [
            [
                reading
                for reading in readings
                if reading.tokenizer == name and reading.text.strip() == text.strip()
            ]
            for text in texts
        ]
        if all(found):
            counts.append(_count(name, found))
    return counts, None if counts else NOT_SEEN


def _count(name: str, found: Sequence[Sequence[Reading]]) -> TokenCount:
    whole = [max(one.length for one in readings) - readings[0].special for readings in found]
    limit = next((one.limit - one.special for one in found[0] if one.limit is not None), None)
    cut = [_cut(readings) for readings in found]
    known = [one for one in cut if one is not None]
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
        words_known=is_known and not sum(known),
        limit=limit,
        unavailable=unavailable,
    )


def _cut(readings: Sequence[Reading]) -> int | None:
    """How many tokens did not fit; None where only a full sequence was seen, which may have been longer."""
    kept = [one for one in readings if one.limit is not None]
    if not kept:
        return 0
    if len(kept) < len(readings):
        return max(0, max(one.length for one in readings) - min(one.length for one in kept))
    return 0 if all(one.length < (one.limit or 0) for one in kept) else None


def _lengths(mask: Any) -> Iterator[int]:
    """The sums of the mask's rows; a mask that is one row is that of one text."""
    rows = mask.tolist() if hasattr(mask, "tolist") else mask
    for row in rows if rows and isinstance(rows[0], list) else [rows]:
        yield int(sum(row))
