"""The words of a text by Unicode's default word boundaries (UAX #29), from the standard library alone.

A word is a run of letters and digits with the marks on them. An apostrophe or dot between letters, and a
comma or dot between digits, belong to the word ("don't", "3.5"); a hyphen does not. An ideograph or
hiragana sign is a word by itself, katakana runs are one. Two departures: scripts written without spaces
that need a dictionary (Thai, Lao, Khmer, Myanmar) count a run as one word instead of each letter, and a
colon always separates, because prompts use it for weights.
"""

import unicodedata
from functools import lru_cache
from typing import NamedTuple

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


class Span(NamedTuple):
    """Where a word is: `text[start:end]`, in code points."""

    start: int
    end: int


class _Sign(NamedTuple):
    """A character with the marks that follow it."""

    character: str
    kind: str
    start: int
    end: int


def word_spans(text: str) -> list[Span]:
    """The words of `text` in order, by the rules above."""
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


def is_attached(character: str) -> bool:
    """Whether it belongs to the character before it: combining marks, joiners, invisible format characters."""
    return unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf")


def _makes_a_word(sign: _Sign) -> bool:
    """Whether it is more than punctuation, which a decimal separator or a geresh alone is."""
    return sign.kind in "LNKI" and unicodedata.category(sign.character)[0] != "P"


@lru_cache(maxsize=4096)
def _extends(character: str) -> bool:
    """Whether UAX #29 takes it to the character before it (rule WB4)."""
    if character == _ZERO_WIDTH_SPACE:
        return False
    return is_attached(character) or _within(ord(character), (_SKIN_TONES,))


def _within(code: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _signs(text: str) -> list[_Sign]:
    signs: list[_Sign] = []
    for index, character in enumerate(text):
        if signs and _extends(character) and signs[-1].character not in "\r\n":
            signs[-1] = signs[-1]._replace(end=index + 1)
        else:
            signs.append(_Sign(character, _kind(character), index, index + 1))
    return signs


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
