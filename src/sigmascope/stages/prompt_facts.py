r"""What a prompt is, before any model sees it: its characters, words, emphasis and tokens.

Emphasis is `(red)`, `(red:1.3)`, nested, with `\(` for a literal parenthesis. The rule is ComfyUI's:
parentheses multiply the weight by 1.1, and a number after the last colon replaces the weight altogether.
Square brackets mean nothing. So it is for parentheses without a partner: one that closes nothing makes the
next that opens text, and one that stays open takes in all that follows, as emphasis if that ends in a
parenthesis and as text if not. Numbers that are not finite are no weights.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from sigmascope.probes.reading import read_host
from sigmascope.records.prompts import PromptPrivacy, prompt_sha256
from sigmascope.stages.baseline import unknown
from sigmascope.stages.schema import PromptFacts, TokenFacts
from sigmascope.stages.text_encoders import CLIP_TOKENS

PRIVATE = "prompts are kept as {!r}"
_HARMLESS_FORMAT = frozenset("\u200c\u200d\ufe0e\ufe0f")
EMPHASIS = 1.1
_ESCAPED = re.compile(r"\\([()])")
_NO_LIMIT = 1_000_000
"""transformers writes 10³⁰ where a tokenizer names no limit."""

# What UAX #29 knows of single characters, as far as words need it.
_MIDDLE_OF_ANY = frozenset(".'‘’․﹒＇．")
_MIDDLE_OF_LETTERS = frozenset("·՟״‧")
_MIDDLE_OF_NUMBERS = frozenset(",;\u037e։،؍٬߸⁄︐︔﹐﹔，；")
_LONE = (
    (0x3006, 0x3007),
    (0x3021, 0x3029),
    (0x3038, 0x303A),
    (0x3041, 0x3096),
    (0x309D, 0x309F),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x1B001, 0x1B11F),
    (0x20000, 0x3FFFF),
)
_KATAKANA = (
    (0x3031, 0x3035),
    (0x309B, 0x309C),
    (0x30A0, 0x30FA),
    (0x30FC, 0x30FF),
    (0x31F0, 0x31FF),
    (0x32D0, 0x3357),
    (0xFF66, 0xFF9D),
)
_LETTERS_BY_USE = (
    (0x02C2, 0x02C5),
    (0x02D2, 0x02D7),
    (0x02DE, 0x02DF),
    (0x02E5, 0x02EB),
    (0x02ED, 0x02ED),
    (0x02EF, 0x02FF),
    (0x055A, 0x055C),
    (0x055E, 0x055E),
    (0x058A, 0x058A),
    (0x05F3, 0x05F3),
    (0x24B6, 0x24E9),
    (0xA720, 0xA721),
    (0xA789, 0xA78A),
    (0xAB5B, 0xAB5B),
    (0x1F130, 0x1F149),
    (0x1F150, 0x1F169),
    (0x1F170, 0x1F189),
)
"""Signs that are no letters by their category: modifiers, geresh, letters in circles and squares."""
_SKIN_TONES = (0x1F3FB, 0x1F3FF)
_HEBREW = ((0x05D0, 0x05EA), (0x05EF, 0x05F2), (0xFB1D, 0xFB1D), (0xFB1F, 0xFB28), (0xFB2A, 0xFB4F))
_ZERO_WIDTH_SPACE = "\u200b"
_NARROW_SPACE = "\u202f"  # 10 000 with it is one number
_DECIMAL_SEPARATOR = "٫"  # a digit to UAX #29
LETTER, NUMBER, KATAKANA, LONE, LINK, MIDDLE, OTHER = "LNKIEMO"
_JOINED = frozenset(
    (*(a + b for a in "LN" for b in "LN"), "KK", *(a + LINK for a in "LNKE"), *(LINK + b for b in "LNK"))
)


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


def prompt_facts(
    prompt: object, tokens: Sequence[TokenCount], reason: str | None, privacy: PromptPrivacy
) -> PromptFacts:
    """Characters, words, weights and tokens of one prompt.

    Args:
        prompt: A text, or several that were encoded together (their facts are those of all of them).
        tokens: What each tokenizer makes of it.
        reason: Why there are none, when there are none.
        privacy: Whether the text, its SHA-256 or nothing is kept. Whatever quotes the prompt follows it.
    """
    text, texts = as_text(prompt), texts_of(prompt)
    if text is None:
        kind = type(prompt).__name__
        why = "no prompt was given" if prompt is None else f"the prompt is of type {kind}"
        return unknown(PromptFacts, why, tokenizers={})
    full = privacy == "full"
    main = _main_tokenizer(tokens)
    unavailable = {} if full else dict.fromkeys(("text_content", "truncated_words"), PRIVATE.format(privacy))
    if privacy == "none":
        unavailable["text_sha256"] = PRIVATE.format(privacy)
    if main is None:
        names = ("token_count", "truncated_tokens", "truncated_words", "token_limit")
        unavailable |= dict.fromkeys(names, reason or "no tokenizer was found")
    else:
        unavailable |= main.unavailable
    weights = [weighted for line in texts for weighted in emphasised(line)]
    return {
        "text_content": text if full else None,
        "text_sha256": None if privacy == "none" else prompt_sha256(text),
        "character_length": sum(map(len, texts)),
        "word_count": sum(len(word_spans(line)) for line in texts),
        "special_characters": sum(map(special_characters, texts)),
        "whitespace_characters": sum(character.isspace() for line in texts for character in line),
        "control_characters": sum(map(control_characters, texts)),
        "prompt_weights": [{"text": w.text if full else None, "weight": w.weight} for w in weights],
        "token_count": None if main is None else main.tokens,
        "truncated_tokens": None if main is None else main.truncated,
        "truncated_words": list(main.truncated_words) if main and full and main.words_known else None,
        "token_limit": None if main is None else main.limit,
        "tokenizers": {count.name: _token_facts(count, full) for count in tokens},
        "unavailable": unavailable,
    }


def _main_tokenizer(tokens: Sequence[TokenCount]) -> TokenCount | None:
    """The tokenizer that reads most of the prompt: what it cuts off, no encoder has seen."""
    return max(tokens, key=lambda count: count.limit if count.limit is not None else 1 << 62, default=None)


def _token_facts(count: TokenCount, full: bool) -> TokenFacts:
    return {
        "token_count": count.tokens,
        "truncated_tokens": count.truncated,
        "truncated_words": list(count.truncated_words) if full and count.words_known else None,
        "token_limit": count.limit,
        "chunks": count.chunks,
    }


def as_text(prompt: object) -> str | None:
    """The prompt as one text; several become its lines. None if it is no text."""
    texts = texts_of(prompt)
    return "\n".join(texts) if texts else None


def texts_of(prompt: object) -> list[str]:
    """The prompts of a batch; one is a batch of itself. None at all if something is no text."""
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
    return [_count_and_cut(name, tokenizer, prompt, limit)]


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


def _count_and_cut(name: str, tokenizer: Any, prompt: str, limit: int | None) -> TokenCount:
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
        start = starts[room] if starts is not None else _end_of_what_fits(tokenizer, prompt, room)
    return TokenCount(name, total, cut, _words_from(prompt, start), limit=room)


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


def _words_from(prompt: str, start: int) -> tuple[str, ...]:
    """The words that are cut off, wholly or in part, when the text from `start` is."""
    spans: list[Span] = word_spans(prompt)
    return tuple(prompt[span.start : span.end] for span in spans if span.end > start)


class Weighted(NamedTuple):
    """A piece of a prompt and how strongly it is meant to act."""

    text: str
    weight: float


def emphasised(prompt: str) -> list[Weighted]:
    """The pieces of the prompt whose weight is not 1.0."""
    return [piece for piece in weighted_pieces(prompt) if piece.weight != 1.0]


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
    signs = _signs(text)
    spans: list[Span] = []
    first = 0
    for index in range(1, len(signs) + 1):
        if index < len(signs) and _belong_together(signs, index):
            continue
        if any(map(_makes_a_word, signs[first:index])):
            spans.append(Span(signs[first].start, signs[index - 1].end))
        first = index
    return spans


class _Sign(NamedTuple):
    """A character with the marks that follow it."""

    character: str
    kind: str
    start: int
    end: int


def _signs(text: str) -> list[_Sign]:
    signs: list[_Sign] = []
    for index, character in enumerate(text):
        if signs and _extends(character) and signs[-1].character not in "\r\n":
            signs[-1] = signs[-1]._replace(end=index + 1)
        else:
            signs.append(_Sign(character, _kind(character), index, index + 1))
    return signs


@lru_cache(maxsize=4096)
def _extends(character: str) -> bool:
    """Whether UAX #29 takes it to the character before it (rule WB4)."""
    if character == _ZERO_WIDTH_SPACE:
        return False
    return is_attached(character) or _within(ord(character), (_SKIN_TONES,))


def is_attached(character: str) -> bool:
    """Whether it belongs to the character before it: combining marks, joiners, invisible format characters."""
    return unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf")


def _within(code: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= code <= high for low, high in ranges)


@lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    code = ord(character)
    if character in _MIDDLE_OF_ANY or character in _MIDDLE_OF_LETTERS or character in _MIDDLE_OF_NUMBERS:
        return MIDDLE
    if code < 0x80 and character.isalpha():
        return LETTER
    if _within(code, _KATAKANA):
        return KATAKANA
    if _within(code, _LONE):
        return LONE
    category = unicodedata.category(character)
    if category == "Nd" or character == _DECIMAL_SEPARATOR:
        return NUMBER
    if category == "Pc" or character == _NARROW_SPACE:
        return LINK
    if _within(code, _LETTERS_BY_USE):
        return LETTER
    return LETTER if category[0] == "L" or category == "Nl" else OTHER


def _belong_together(signs: list[_Sign], index: int) -> bool:
    """Whether there is no boundary between the signs `index - 1` and `index`."""
    before, after = signs[index - 1], signs[index]
    if before.kind + after.kind in _JOINED:
        return True
    if after.character == "'" and _within(ord(before.character), _HEBREW):
        return True
    if after.character == '"' or before.character == '"':
        return _is_hebrew_quote(signs, index if after.character == '"' else index - 1)
    if after.kind == MIDDLE:
        return index + 1 < len(signs) and _is_inside(before, after, signs[index + 1])
    if before.kind == MIDDLE:
        return index > 1 and _is_inside(signs[index - 2], before, after)
    return False


def _is_hebrew_quote(signs: list[_Sign], place: int) -> bool:
    """Whether the quotation mark there stands between Hebrew letters, as in acronyms (rules WB7b and WB7c)."""
    beside = signs[max(0, place - 1) : place] + signs[place + 1 : place + 2]
    return len(beside) == 2 and all(_within(ord(sign.character), _HEBREW) for sign in beside)


def _is_inside(before: _Sign, middle: _Sign, after: _Sign) -> bool:
    kinds, character = before.kind + after.kind, middle.character
    if kinds == LETTER + LETTER:
        return character in _MIDDLE_OF_ANY or character in _MIDDLE_OF_LETTERS
    return kinds == NUMBER + NUMBER and (character in _MIDDLE_OF_ANY or character in _MIDDLE_OF_NUMBERS)


def _makes_a_word(sign: _Sign) -> bool:
    """Whether it is more than punctuation, which a decimal separator or a geresh alone is."""
    return sign.kind in "LNKI" and unicodedata.category(sign.character)[0] != "P"
