import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recording.md"


def test_the_examples_of_the_page_run_from_top_to_bottom() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
