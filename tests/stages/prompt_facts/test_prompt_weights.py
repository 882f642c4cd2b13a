import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigmascope.stages.prompt_facts import weighted_pieces


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a (red:1.3) fox", [("a ", 1.0), ("red", 1.3), (" fox", 1.0)]),
        ("(red)", [("red", 1.1)]),
        ("((red))", [("red", 1.1 * 1.1)]),
        ("(a (b:1.2) c:1.5)", [("a ", 1.5), ("b", 1.2), (" c", 1.5)]),
        ("(a (b) c:1.5)", [("a ", 1.5), ("b", 1.5 * 1.1), (" c", 1.5)]),
        ("(red:-0.5)", [("red", -0.5)]),
        ("(red:.5)", [("red", 0.5)]),
        ("(time: 12:30 pm)", [("time: 12:30 pm", 1.1)]),
        (r"a \(plain\) text", [("a (plain) text", 1.0)]),
        ("(never closed:1.2", [("(never closed:1.2", 1.0)]),
        ("never opened:1.2)", [("never opened:1.2)", 1.0)]),
        ("a (b:1.2) (c", [("a ", 1.0), ("b", 1.2), (" (c", 1.0)]),
        ("(a (b:1.2)", [("a (b", 1.2)]),  # what stays open takes in all that follows
        ("(a (b:1.2) c", [("(a (b:1.2) c", 1.0)]),
        ("((a:1.5)", [("(a", 1.5)]),
        ("a) (b:1.2)", [("a) (b:1.2)", 1.0)]),  # what closes nothing makes the next that opens text
        ("a) (b) (c:1.2)", [("a) (b) (c:1.2)", 1.0)]),
        ("a) ((c:1.2)", [("a) (", 1.0), ("c", 1.2)]),
        ("(red:1e-1)", [("red", 0.1)]),
        ("(red: 1_0 )", [("red", 10.0)]),
        ("(red:inf)", [("red:inf", 1.1)]),
        (r"(a\):1.2)", [("a)", 1.2)]),
        ("(:1.2)", [(":1.2", 1.1)]),
        ("[red]", [("[red]", 1.0)]),
        ("()", []),
        ("", []),
    ],
)
def test_weights_by_the_rules_of_comfyui(prompt: str, expected: list[tuple[str, float]]) -> None:
    found = weighted_pieces(prompt)
    assert [piece.text for piece in found] == [text for text, _ in expected]
    assert [piece.weight for piece in found] == pytest.approx([weight for _, weight in expected])


def test_only_pieces_with_weight_are_emphasised() -> None:
    pieces = weighted_pieces("a (red:1.3) fox (x:1.0)")
    assert [piece.text for piece in pieces if piece.weight != 1.0] == ["red"]


def test_thousands_of_parentheses_do_no_harm() -> None:
    assert [piece.text for piece in weighted_pieces("(" * 5_000 + "x" + ")" * 5_000)] == ["x"]


@given(st.text(alphabet="ab():1.\\ ", max_size=40))
def test_no_text_is_lost_but_the_syntax(prompt: str) -> None:
    kept = "".join(piece.text for piece in weighted_pieces(prompt))
    assert kept.count("a") == prompt.count("a")
    assert kept.count("b") == prompt.count("b")
