"""Comparisons of tensors as tables for a terminal of 80 columns or a plain log."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from sigmascope.cli.lora.op_tables import facts, listed, number, percent, plain, table

if TYPE_CHECKING:
    from sigmascope.analysis.dump_results import DumpComparison, RunComparison
    from sigmascope.analysis.tensor_errors import Place, TensorErrors, TokenErrors
    from sigmascope.analysis.tensor_results import TensorComparison

_STYLE = {"identical": "green", "rounding": "green", "close": "cyan", "different": "bold red"}
_MOST_DETAILS = 10
_MOST_TOKENS = 5


def print_comparison(
    console: Console,
    comparison: "DumpComparison | RunComparison",
    paths: tuple[Path, Path],
    *,
    verbose: bool,
) -> None:
    """Show every tensor in a line, the reasons for those that differ, and what it comes to."""
    console.print(
        Text.assemble(("Tensors: ", "bold"), plain(paths[0].name), " against ", plain(paths[1].name))
    )
    rows = list(named_comparisons(comparison))
    if rows:
        console.print(_overview(rows))
    shown = [
        (name, each) for name, each in rows if verbose or each.verdict != "identical" or each.differences
    ]
    for name, each in shown if verbose else shown[:_MOST_DETAILS]:
        _print_details(console, name, each)
    if not verbose and len(shown) > _MOST_DETAILS:
        console.print(Text(f"and {len(shown) - _MOST_DETAILS} more; --verbose shows all"))
    for dump_name, dump in _dumps(comparison):
        where = f" in {plain(dump_name).plain}" if dump_name else ""
        listed(console, f"Only in A{where}", dump.only_a)
        listed(console, f"Only in B{where}", dump.only_b)
        for what, (a, b) in dump.context.items():
            console.print(
                Text.assemble(f"The {plain(what).plain} differs{where}: ", plain(a), " against ", plain(b))
            )
    if dict(_dumps(comparison)).keys() != {""}:
        listed(console, "Dumps only in A", comparison.only_a)
        listed(console, "Dumps only in B", comparison.only_b)
    console.print(_conclusion(comparison))


def named_comparisons(
    comparison: "DumpComparison | RunComparison",
) -> "Iterator[tuple[str, TensorComparison]]":
    """Every pair of tensors with the name to show: of a run `dump: tensor`."""
    for dump_name, dump in _dumps(comparison):
        for pair in dump.pairs:
            same = pair.name_a == pair.name_b
            name = pair.name_a if same else f"{pair.name_a}={pair.name_b}"
            yield (f"{dump_name}: {name}" if dump_name else name), pair.comparison


def _dumps(comparison: "DumpComparison | RunComparison") -> "Iterator[tuple[str, DumpComparison]]":
    from sigmascope.analysis.dump_results import RunComparison

    if isinstance(comparison, RunComparison):
        yield from comparison.dumps.items()
    else:
        yield "", comparison


def _overview(rows: "list[tuple[str, TensorComparison]]") -> RenderableType:
    made = table("Tensor", "Verdict", "Error", "Cosine", "Max diff", "Outside", "Token", left=("Verdict",))
    for name, each in rows:
        verdict = Text(each.verdict, style=_STYLE[each.verdict])
        errors = each.errors
        if errors is None:
            made.add_row(plain(name), verdict, "-", "-", "-", "-", "-")
            continue
        made.add_row(
            plain(name),
            verdict,
            percent(errors.relative_l2),
            _cosine(errors.cosine),
            number(errors.max_abs),
            percent(errors.share_outside),
            "-" if each.first_token is None else str(each.first_token),
        )
    return made


def _print_details(console: Console, name: str, each: "TensorComparison") -> None:
    console.print(plain(name, style="bold"))
    rows: list[tuple[str, RenderableType | None]] = [("  Verdict", plain(each.reason))]
    rows += [
        (f"  {what.capitalize()}", plain(f"{a} against {b}")) for what, (a, b) in each.differences.items()
    ]
    if each.errors is not None and each.errors.unequal:
        rows += _error_rows(each.errors)
        if each.errors.tokens is not None and len(each.errors.tokens) > 1:
            rows.append(("  Worst tokens", plain(_worst_tokens(each.errors.tokens))))
    console.print(facts(rows))


def _error_rows(errors: "TensorErrors") -> list[tuple[str, RenderableType | None]]:
    counts = [
        f"{count:,} {kind} in {side}"
        for kind, side, count in (
            ("NaN", "A", errors.nan_a),
            ("NaN", "B", errors.nan_b),
            ("Inf", "A", errors.inf_a),
            ("Inf", "B", errors.inf_b),
        )
        if count
    ]
    return [
        ("  Differ", plain(f"{errors.unequal:,} of {errors.elements:,} elements")),
        ("  First", _place(errors.first_difference)),
        ("  Outside", plain(f"{errors.outside:,} beyond rtol {errors.rtol:.3g}, atol {errors.atol:.3g}")),
        ("  First outside", _place(errors.first_outside)),
        ("  Largest", _place(errors.max_abs_at)),
        ("  Not finite", plain(", ".join(counts)) if counts else None),
    ]


def _place(place: "Place | None") -> Text | None:
    return None if place is None else plain(f"{place.a:.6g} against {place.b:.6g} at {place.index}")


def _worst_tokens(tokens: "TokenErrors") -> str:
    order = sorted(range(len(tokens)), key=lambda token: tokens.relative_l2[token], reverse=True)
    shown = [
        f"{token} ({percent(tokens.relative_l2[token])})"
        for token in order[:_MOST_TOKENS]
        if tokens.unequal[token]
    ]
    return ", ".join(shown) or "-"


def _conclusion(comparison: "DumpComparison | RunComparison") -> Text:
    words = Text.assemble(("Verdict: ", "bold"), (comparison.verdict, _STYLE[comparison.verdict]))
    if comparison.agrees and not comparison.same_layout:
        words.append(", but in another layout; --any_layout lets that pass")
    return words


def _cosine(value: float | None) -> str:
    """Six digits; 1 only where it is that."""
    if value is None:
        return "-"
    return "1" if value == 1.0 else f"{value:.6f}" if value < 0.9999995 else f"1-{1 - value:.0e}"
