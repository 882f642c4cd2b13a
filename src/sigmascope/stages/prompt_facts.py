r"""What a prompt is, before any model sees it: its characters, words, emphasis and tokens.

Emphasis is `(red)`, `(red:1.3)`, nested, with `\(` for a literal parenthesis. The rule is ComfyUI's:
parentheses multiply the weight by 1.1, and a number after the last colon replaces the weight altogether.
Square brackets mean nothing. Parentheses without a partner follow ComfyUI too: a stray closing one turns the next
opening one into text. One that stays open takes in all that follows, as emphasis if that ends in a parenthesis, else as
text. Numbers that are not finite are not weights.

The tokenizers are the host's own: given, or found in its pipeline or CLIP. Nothing is downloaded, and a
tokenizer is left as it was found.

Words are told by Unicode's default word boundaries (UAX #29), from the standard library alone (`word_spans`).
A word is a run of letters and digits with the marks on them. An apostrophe or dot between letters, and a
comma or dot between digits, belong to the word ("don't", "3.5"); a hyphen does not. An ideograph or hiragana
sign is a word by itself, katakana runs are one. Two departures: scripts written without spaces that need a
dictionary (Thai, Lao, Khmer, Myanmar) count a run as one word instead of each letter, and a colon always
separates, because prompts use it for weights.
"""

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, NamedTuple

from sigmascope.probes.reading import Reading, attempt
from sigmascope.records.prompts import Privacy, PromptPrivacy, privacy_of, prompt_sha256
from sigmascope.stages.schema import PromptFacts, TokenFacts, as_dict

PRIVATE = "prompts are kept as {!r}"
_HARMLESS_FORMAT = frozenset("\u200c\u200d\ufe0e\ufe0f")
EMPHASIS = 1.1
CLIP_TOKENS = 77
_ESCAPED = re.compile(r"\\([()])")
_NO_LIMIT = {"token_limit": "the tokenizer has no limit"}
_STANDS_FOR_NO_LIMIT = 1_000_000
"""transformers writes 10³⁰ where a tokenizer names no limit."""

# The characters of UAX #29, by letters that `_WORD` is written in: what a category does not tell comes first.
_KINDS: Final = (
    ("q", re.compile("'")),
    ("Q", re.compile('"')),
    ("m", re.compile("[.‘’․﹒＇．]")),  # in the middle of letters and of numbers
    ("l", re.compile("[·՟״‧]")),  # of letters
    ("n", re.compile("[,;\u037e։،؍٬߸⁄︐︔﹐﹔，；]")),  # of numbers
    (
        "H",
        re.compile(
            "[\u05d0-\u05ea\u05ef-\u05f2\ufb1d\ufb1f-\ufb28\ufb2a-\ufb36\ufb38-\ufb3c\ufb3e\ufb40\ufb41\ufb43\ufb44\ufb46-\ufb4f]"
        ),
    ),
    (
        "K",
        re.compile(
            "[\u3031-\u3035\u309b\u309c\u30a0-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u32d0-\u3357\uff66-\uff9d]"
        ),
    ),
    (
        "I",
        re.compile(
            "[\u3006\u3007\u3021-\u3029\u3038-\u303a\u3041-\u3096\u309d-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
            "\U0001b001-\U0001b11f\U00020000-\U0003ffff]"
        ),
    ),
    ("N", re.compile("٫")),  # a decimal separator
    ("E", re.compile("\u202f")),  # a narrow space: 10 000 with it is one number
    (
        # no letters by their category: modifiers, geresh, letters in circles and squares
        "L",
        re.compile(
            "[\u02c2-\u02c5\u02d2-\u02d7\u02de\u02df\u02e5-\u02eb\u02ed\u02ef-\u02ff\u055a-\u055c\u055e\u058a\u05f3\u24b6-\u24e9"
            "\ua720\ua721\ua789\ua78a\uab5b\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189]"
        ),
    ),
)
_KIND_BY_CATEGORY: Final = {"Nd": "N", "Pc": "E", "Nl": "L"}
_WORD: Final = re.compile(
    "[LHNKEI](?:(?<=[LHNE])[LHN]|(?<=[KE])K|(?<=[LHNKE])E|(?<=[LH])[qml][LH]|(?<=N)[qmn]N|(?<=H)QH|(?<=H)q)*"
)
"""Letters (L, of Hebrew H), numbers (N), katakana (K) and connectors (E) in a row; an ideograph (I) stands alone."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """What one tokenizer makes of a prompt.

    `tokens` are the prompt's own, without those that mark start, end or padding; `limit` is how many of
    them fit. `truncated_words` are None where they are not known. `chunks` is how many runs of the encoder they are spread over, where nothing is cut.
    """

    name: str
    tokens: int
    truncated: int | None
    truncated_words: tuple[str, ...] | None = ()
    limit: int | None = None
    chunks: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


def prompt_facts(
    prompt: object, tokens: Sequence[TokenCount], reason: str | None, privacy: PromptPrivacy
) -> PromptFacts:
    """Characters, words, weights and tokens of one prompt."""
    text, texts = as_text(prompt), texts_of(prompt)
    if text is None:
        kind = type(prompt).__name__
        why = "no prompt was given" if prompt is None else f"the prompt is of type {kind}"
        return as_dict(PromptFacts, why=why, tokenizers={})
    kept = privacy_of(privacy)
    # The tokenizer that reads most of the prompt: what it cuts off, no encoder has seen.
    main = max(tokens, key=lambda count: count.limit if count.limit is not None else 1 << 62, default=None)
    private = PRIVATE.format(privacy)
    weights = [piece for line in texts for piece in weighted_pieces(line) if piece.weight != 1.0]
    return as_dict(
        PromptFacts,
        {} if main is None else _token_facts(main, kept),
        reason or "no tokenizer was found" if main is None else None,
        text_content=Reading(text if kept.keeps_text else None, private),
        text_sha256=Reading(prompt_sha256(text) if kept.keeps_hash else None, private),
        character_length=sum(map(len, texts)),
        word_count=sum(len(word_spans(line)) for line in texts),
        special_characters=sum(map(special_characters, texts)),
        whitespace_characters=sum(character.isspace() for line in texts for character in line),
        control_characters=sum(map(control_characters, texts)),
        prompt_weights=[{"text": w.text if kept.keeps_text else None, "weight": w.weight} for w in weights],
        tokenizers={count.name: _token_facts(count, kept) for count in tokens},
    )


def _token_facts(count: TokenCount, kept: Privacy) -> TokenFacts:
    words = None if count.truncated_words is None else list(count.truncated_words)
    return as_dict(
        TokenFacts,
        count,
        token_count=count.tokens,
        truncated_tokens=count.truncated,
        truncated_words=words if kept.keeps_text else Reading(None, PRIVATE.format(kept.name)),
        token_limit=count.limit,
    )


def as_text(prompt: object) -> str | None:
    """The prompt as one text; several prompts become its lines. None if it is not text."""
    texts = texts_of(prompt)
    return "\n".join(texts) if texts else None


def texts_of(prompt: object) -> list[str]:
    """The prompts of a batch; a single text is a batch of one. Empty if anything in it is not text."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list | tuple) and all(isinstance(line, str) for line in prompt):
        return list(prompt)
    return []


def special_characters(text: str) -> int:
    """Characters that are neither letter nor digit nor white space. Marks belong to what they stand on."""
    return sum(
        not (character.isalnum() or character.isspace() or is_attached(character)) for character in text
    )


def control_characters(text: str) -> int:
    """Invisible characters that rarely mean well: controls, direction marks, lone surrogates."""
    return sum(
        unicodedata.category(character) in ("Cc", "Cf", "Cs")
        and not (character in "\t\r\n" or character in _HARMLESS_FORMAT)
        for character in text
    )


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
    words = [count.truncated_words for count in counts if count.truncated_words is not None]
    chunks = [count.chunks for count in counts if count.chunks is not None]
    return replace(
        counts[0],
        tokens=sum(count.tokens for count in counts),
        truncated=sum(cut) if len(cut) == len(counts) else None,
        truncated_words=tuple(chain.from_iterable(words)) if len(words) == len(counts) else None,
        chunks=sum(chunks) if chunks else None,
        unavailable={name: reason for count in counts for name, reason in count.unavailable.items()},
    )


def _count_one(
    prompt: str, tokenizers: Mapping[str, Any], limit: int | None
) -> tuple[list[TokenCount], str | None]:
    counts: list[TokenCount] = []
    reason = None
    for name, tokenizer in tokenizers.items():

        def read(name: str = name, tokenizer: Any = tokenizer) -> list[TokenCount]:
            if hasattr(tokenizer, "tokenize_with_weights"):
                return _count_in_chunks(name, tokenizer, prompt)
            return [_count_and_cut(name, tokenizer, prompt, limit)]

        reading = attempt(read)
        if reading.value is None:
            reason = f"{type(tokenizer).__name__} failed: {reading.reason}"
        else:
            counts += reading.value
    return counts, reason


def _count_in_chunks(name: str, tokenizer: Any, prompt: str) -> list[TokenCount]:
    """ComfyUI's tokenizers: lists of (token, weight, word) per encoder; word 0 is start, end and padding.

    They cut nothing off: a long prompt goes through the encoder in several chunks. Those of language models
    put the prompt into a template, whose tokens an empty prompt has too.
    """
    empty = {encoder: tokens for encoder, tokens, _ in _word_tokens(name, tokenizer, "")}
    return [
        TokenCount(encoder, max(0, tokens - empty.get(encoder, 0)), 0, chunks=chunks, unavailable=_NO_LIMIT)
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


def _count_and_cut(name: str, tokenizer: Any, prompt: str, limit: int | None) -> TokenCount:
    with _left_as_found(tokenizer):
        encoded, starts = _encode(tokenizer, prompt)
        total = len(encoded)
        longest = limit
        own = getattr(tokenizer, "model_max_length", None)
        if isinstance(own, int | float) and 0 < own < _STANDS_FOR_NO_LIMIT:
            # `max_sequence_length` of FLUX and SD 3 is for T5; their CLIPs have 77 positions.
            if limit is None:
                longest = int(own)
            elif int(own) == CLIP_TOKENS:
                longest = min(CLIP_TOKENS, limit)
        if longest is None:
            return TokenCount(name, total, 0, limit=None, unavailable=_NO_LIMIT)
        special = getattr(tokenizer, "num_special_tokens_to_add", None)
        room = max(0, longest - (0 if special is None else int(special())))
        cut = max(0, total - room)
        if not cut:
            return TokenCount(name, total, 0, limit=room)
        if getattr(tokenizer, "truncation_side", "right") == "left":
            reason = {"truncated_words": "the tokenizer truncates at the start"}
            return TokenCount(name, total, cut, None, limit=room, unavailable=reason)
        start = starts[room] if starts is not None else _end_of_what_fits(tokenizer, prompt, room)
    cut_words = (prompt[word.start : word.end] for word in word_spans(prompt) if word.end > start)
    return TokenCount(name, total, cut, tuple(cut_words), limit=room)


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


def _encode(tokenizer: Any, prompt: str) -> tuple[Sequence[int], list[int] | None]:
    """Token ids of the bare prompt and, if the tokenizer tells, the character at which each begins."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(
            prompt, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
        )
        return encoded["input_ids"], [int(start) for start, _ in encoded["offset_mapping"]]
    return _token_ids(tokenizer, prompt), None


def _token_ids(tokenizer: Any, text: str) -> Sequence[int]:
    encoded = tokenizer(text, add_special_tokens=False)
    ids: Sequence[int] = encoded["input_ids"]
    return ids


def _end_of_what_fits(tokenizer: Any, prompt: str, room: int) -> int:
    """The end of the longest run of whole words that fits, for a tokenizer that tells no offsets."""
    ends = [span.end for span in word_spans(prompt)]
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_token_ids(tokenizer, prompt[: ends[middle - 1]])) <= room:
            low = middle
        else:
            high = middle - 1
    return ends[low - 1] if low else 0


class Weighted(NamedTuple):
    """A piece of a prompt and how strongly it is meant to act."""

    text: str
    weight: float


def weighted_pieces(prompt: str) -> list[Weighted]:
    """The prompt cut where its weight changes, without the syntax. Unweighted text has weight 1.0."""
    partners = _partners(prompt)
    pieces: list[Weighted] = []
    todo = [(0, len(prompt), 1.0)]  # a stack: nesting may be deeper than Python recurses
    while todo:
        start, end, weight = todo.pop()
        opening = next((index for index in range(start, end) if index in partners), None)
        if opening is None:
            _add_piece(pieces, prompt[start:end], weight)
            continue
        _add_piece(pieces, prompt[start:opening], weight)
        closing = partners[opening]
        if closing >= end:  # it stays open
            closing = end - 1
            if closing == opening or not _is_parenthesis(prompt, closing, ")"):
                _add_piece(pieces, prompt[opening:end], weight)
                continue
        inner_end, inner_weight = _emphasis(prompt, opening, closing, weight)
        todo += [(closing + 1, end, weight), (opening + 1, inner_end, inner_weight)]
    return pieces


def _partners(prompt: str) -> dict[int, int]:
    """For each parenthesis that opens the index of the one that closes it; the prompt's length if none does."""
    partners: dict[int, int] = {}
    waiting: list[int] = []
    surplus = 0
    for index, character in _parentheses(prompt):
        if character == ")":
            if waiting:
                partners[waiting.pop()] = index
            else:
                surplus += 1
        elif surplus:
            surplus -= 1
        else:
            partners[index] = len(prompt)
            waiting.append(index)
    return partners


def _parentheses(prompt: str) -> Iterator[tuple[int, str]]:
    for index, character in enumerate(prompt):
        if character in "()" and _is_parenthesis(prompt, index, character):
            yield index, character


def _is_parenthesis(prompt: str, index: int, character: str) -> bool:
    """Whether this one is there, and not escaped."""
    return prompt[index] == character and (index == 0 or prompt[index - 1] != "\\")


def _add_piece(pieces: list[Weighted], text: str, weight: float) -> None:
    text = _ESCAPED.sub(r"\1", text)
    if not text:
        return
    if pieces and pieces[-1].weight == weight:
        text, weight = pieces.pop().text + text, weight
    pieces.append(Weighted(text, weight))


def _emphasis(prompt: str, opening: int, closing: int, weight: float) -> tuple[int, float]:
    """Where the text inside a pair of parentheses ends, and the weight it has."""
    colon = prompt.rfind(":", opening + 1, closing)
    if colon > opening + 1:
        with suppress(ValueError):
            number = float(prompt[colon + 1 : closing])
            if math.isfinite(number):
                return colon, number
    product = weight * EMPHASIS
    return closing, product if math.isfinite(product) else weight


class Span(NamedTuple):
    """Where a word is: `text[start:end]`, in code points."""

    start: int
    end: int


def word_spans(text: str) -> list[Span]:
    """The words of `text` in order, by the rules at the head of this module."""
    kinds: list[str] = []
    starts: list[int] = []
    for index, character in enumerate(text):
        follows_line_end = not starts or text[index - 1] in "\r\n"
        if _extends(character) and not follows_line_end:
            continue  # a mark is part of the character before it
        kinds.append(_kind(character))
        starts.append(index)
    ends = [*starts[1:], len(text)]
    words = (match.span() for match in _WORD.finditer("".join(kinds)))
    return [
        Span(starts[first], ends[last - 1])
        for first, last in words
        if any(
            kinds[place] in "LHNKI" and unicodedata.category(text[starts[place]])[0] != "P"
            for place in range(first, last)
        )
    ]


def _extends(character: str) -> bool:
    """Whether UAX #29 takes it to the character before it (rule WB4): marks, joiners but the zero-width space, skin tones."""
    is_skin_tone = "\U0001f3fb" <= character <= "\U0001f3ff"
    return is_skin_tone or (is_attached(character) and character != "\u200b")


def _kind(character: str) -> str:
    if character.isascii() and character.isalpha():
        return "L"
    for kind, characters in _KINDS:
        if characters.match(character):
            return kind
    category = unicodedata.category(character)
    return _KIND_BY_CATEGORY.get(category, "L" if category[0] == "L" else "o")


def is_attached(character: str) -> bool:
    """Whether it belongs to the character before it: combining marks, joiners, invisible format characters."""
    return unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf")
