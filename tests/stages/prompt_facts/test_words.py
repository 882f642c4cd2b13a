"""Words against the `regex` module's Unicode word boundaries, which are another's."""

import pytest
import regex  # type: ignore[import-untyped]

from sigmascope.stages.prompt_facts import word_spans

TEXTS = [
    "a red fox, 4k!",
    "don't stop",
    "l’été 3.5 1,000 a.b",
    "猫が好きです",
    "東京タワー",
    "カタカナ ひらがな ﾊﾝｶｸ",
    "한국어 단어",
    "שלום עולם",
    "مرحبا بالعالم ٣٫١٤ ٤٬٠٠٠",
    "می\u200cخواهم",
    "e\u0301te\u0301 naïve café—dash",
    "नमस्ते दुनिया",
    "👨\u200d👩\u200d👧 family 🇩🇪flag 1️⃣ key",
    "snake_case_name __x high-quality",
    "(red:1.3) m² ½ cup",
    "\x1b[31mred",
    "𝔘nicode 𠮷野家 々人〇",
    "a.1 1.a 1st x1.5y",
    "zero\u200bwidth soft\u00adhyphen word\u2060joiner",
    "10\u202f000 kg",
    'צה"ל "שלום" ג׳ירפה רח\' 5"',
    "Ⓐⓑ 🅰b 1\u066b5 \u066b",
    "a👍🏽 b🏽c",
    "",
]


def by_regex(text: str) -> list[str]:
    pieces = regex.split(r"(?w)\b", text, flags=regex.V1)
    return [piece for piece in pieces if regex.search(r"\p{Alphabetic}|\p{Nd}", piece)]


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_unicode(text: str) -> None:
    assert [text[span.start : span.end] for span in word_spans(text)] == by_regex(text)


def test_a_run_of_thai_is_one_word() -> None:
    assert len(word_spans("สวัสดี ครับ")) == 2


def test_a_colon_separates() -> None:
    assert len(word_spans("red:fox")) == 2
