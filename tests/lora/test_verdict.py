"""The table of verdicts."""

import re
from pathlib import Path

import sigmascope
from sigmascope.lora import verdict
from sigmascope.lora.verdict import VERDICTS

SOURCE = Path(sigmascope.__file__).parent


def test_words_of_the_table_stand_in_no_other_file() -> None:
    joined = re.compile(r'"\s*\n\s*f?"')
    others = {
        path.relative_to(SOURCE): joined.sub("", path.read_text("utf-8"))
        for path in SOURCE.rglob("*.py")
        if path != Path(verdict.__file__)
    }
    sentences = [words for row in VERDICTS.values() for words in (row.says, row.advice or "")]
    pieces = {piece.strip() for words in sentences for piece in re.split(r"\{\w+\}", words)}
    said = [
        (piece, path)
        for path, text in others.items()
        for piece in pieces
        if len(piece) > 24 and piece in text
    ]
    assert said == []
