"""`sigmascope compare-tensors`: do two files or folders of tensors agree, and if not, where and why.

`print_comparison` shows the result in the terminal, `save_token_picture` draws the errors by token.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import RenderableType
from rich.text import Text

from sigmascope.cli.console import (
    Console,
    check_picture,
    facts,
    listed,
    number,
    percent,
    plain,
    print_json,
    progress_bar,
    save_picture,
    say,
    table,
)
from sigmascope.cli.options import AsJson
from sigmascope.errors import CheckpointError, ConfigError, SigmascopeError
from sigmascope.svg import FAINT, Axis, Bar, Label, Line, Shape
from sigmascope.units import counted, rough_percent

if TYPE_CHECKING:
    from sigmascope.analysis.tensor_comparison import DumpComparison, RunComparison, TensorComparison
    from sigmascope.analysis.tensor_errors import Place, TensorErrors, TokenErrors

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope compare-tensors comfyui.safetensors diffusers.safetensors
--name positive.0.cond=prompt_embeds --picture tokens.svg

sigmascope compare-tensors runs/before_lora runs/after_lora --json
"""

BEYOND_TOLERANCE = 1
TROUBLE = 2
"""Exit code of every error, so that a script can tell it from a difference, as with `diff`."""

_VERDICT_STYLE = {"identical": "green", "rounding": "green", "close": "cyan", "different": "bold red"}
_MOST_DETAILS = 10
_MOST_TOKENS = 5

# The picture: sizes in pixels, and colours.
_WIDTH: Final = 960
_LEFT: Final = 90
_RIGHT: Final = 930
_TOP: Final = 72  # of the first panel
_PANEL: Final = 250
_BARS: Final = 150.0  # height of the bars' field in a panel
_MOST_PANELS: Final = 12
_LONGEST: Final = 150  # characters of a line of text
_CAPTION: Final = "A bar is a token: how far B is from A there. Red: farther than rounding explains. Look for single tall bars."
_GRID: Final = "#e0e0e0"
_WITHIN: Final = "#0277bd"
_BEYOND: Final = "#c62828"
_LIMIT: Final = "#e68a00"


@app.command("compare-tensors", epilog=EPILOG)
def compare_tensors(
    a: Annotated[
        Path, typer.Argument(help="The reference: a dump, or a folder of them.", show_default=False)
    ],
    b: Annotated[Path, typer.Argument(help="The dump or folder to compare with it.", show_default=False)],
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name", help="Tensor to compare, or A's name=B's name. May be repeated.", show_default="all"
        ),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(
            "--rtol", help="Allowed difference, relative to the value.", show_default="by dtype", min=0
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option("--atol", help="Allowed absolute difference.", show_default="by dtype", min=0),
    ] = None,
    token_axis: Annotated[
        int | None,
        typer.Option("--token_axis", help="Axis of the tokens.", show_default="1 of 3 axes, 0 of 2"),
    ] = None,
    any_layout: Annotated[
        bool,
        typer.Option("--any_layout", help="Tensors that agree once transposed, padded, … agree."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the errors by token into this .svg or .png.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show details of every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare dumped tensors: where do two pipelines begin to differ, and is it rounding?

    Verdicts: identical, rounding (the dtypes explain it), close (a lower
    precision inside would), different. The exit code is 0 up to close, 1 for
    different values or another layout, 2 for an error.
    """
    try:
        check_picture(picture, dict.fromkeys((a, b), "is an input"))
        comparison = _compare(a, b, _name_pairs(name), (rtol, atol, token_axis))
        if picture is not None:
            save_token_picture(picture, comparison, f"{a.name} against {b.name}")
    except SigmascopeError as error:
        error.exit_code = TROUBLE
        raise
    if as_json:
        print_json({"path_a": str(a), "path_b": str(b), **comparison.as_dict()})
    else:
        print_comparison(Console(), comparison, (a, b), verbose=verbose)
        if picture is not None:
            say(f"Picture: {picture}")
    if not (comparison.agrees and (any_layout or comparison.same_layout)):
        raise typer.Exit(BEYOND_TOLERANCE)


def _compare(
    a: Path, b: Path, names: dict[str, str], asked: tuple[float | None, float | None, int | None]
) -> "DumpComparison | RunComparison":
    from sigmascope.analysis.tensor_comparison import Options, compare_dumps, compare_runs
    from sigmascope.checkpoints.checkpoint import is_folder
    from sigmascope.checkpoints.tensor_dumps import TensorDumps, open_tensors

    options = Options(*asked)
    folders = [is_folder(path) for path in (a, b)]
    if folders[0] != folders[1]:
        folder, file = (a, b) if folders[0] else (b, a)
        raise ConfigError(
            f"{folder} is a folder, but {file} is not.", hint="Give two files, or two folders of dumps."
        )
    with progress_bar("Comparing") as progress:
        if all(folders):
            runs = [TensorDumps(path) for path in (a, b)]
            for run in runs:
                if not run.index:
                    raise CheckpointError(
                        run.folder, "holds no dump.", hint="Name the folder of a run's dumps."
                    )
            return compare_runs(runs[0], runs[1], options, names=names, progress=progress)
        with ExitStack() as stack:
            dumps = [stack.enter_context(open_tensors(path)) for path in (a, b)]
            return compare_dumps(dumps[0], dumps[1], options, names=names, progress=progress)


def _name_pairs(asked: list[str] | None) -> dict[str, str]:
    """A's name to B's.

    Raises:
        ConfigError: A side is empty, or a name of A's comes twice.
    """
    names: dict[str, str] = {}
    for text in asked or ():
        first, equals, second = text.partition("=")
        second = second if equals else first
        if not first or not second:
            raise ConfigError(
                f"--name {text!r} lacks a name.", hint="Write --name NAME or --name A_NAME=B_NAME."
            )
        if first in names:
            raise ConfigError(f"--name {first} is given twice.", hint="Give each name of A once.")
        names[first] = second
    return names


def print_comparison(
    console: Console,
    comparison: "DumpComparison | RunComparison",
    paths: tuple[Path, Path],
    *,
    verbose: bool,
) -> None:
    """Show every tensor in a line, the reasons for those that differ, and the overall verdict."""
    console.print(
        Text.assemble(("Tensors: ", "bold"), plain(paths[0].name), " against ", plain(paths[1].name))
    )
    rows = list(named_comparisons(comparison))
    if rows:
        console.print(_overview(rows))
    shown = [
        (name, tensor)
        for name, tensor in rows
        if verbose or tensor.verdict != "identical" or tensor.differences
    ]
    for name, tensor in shown if verbose else shown[:_MOST_DETAILS]:
        _print_details(console, name, tensor)
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
    from sigmascope.analysis.tensor_comparison import RunComparison

    if isinstance(comparison, RunComparison):
        yield from comparison.dumps.items()
    else:
        yield "", comparison


def _overview(rows: "list[tuple[str, TensorComparison]]") -> RenderableType:
    made = table("Tensor", "Verdict", "Error", "Cosine", "Max diff", "Outside", "Token", left=("Verdict",))
    for name, tensor in rows:
        verdict = Text(tensor.verdict, style=_VERDICT_STYLE[tensor.verdict])
        errors = tensor.errors
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
            "-" if tensor.first_token is None else str(tensor.first_token),
        )
    return made


def _cosine(value: float | None) -> str:
    """Six digits; 1 only if it is exactly 1."""
    if value is None:
        return "-"
    return "1" if value == 1.0 else f"{value:.6f}" if value < 0.9999995 else f"1-{1 - value:.0e}"


def _print_details(console: Console, name: str, tensor: "TensorComparison") -> None:
    console.print(plain(name, style="bold"))
    rows: list[tuple[str, RenderableType | None]] = [("  Verdict", plain(tensor.reason))]
    rows += [
        (f"  {what.capitalize()}", plain(f"{a} against {b}")) for what, (a, b) in tensor.differences.items()
    ]
    if tensor.errors is not None and tensor.errors.unequal:
        rows += _error_rows(tensor.errors)
        if tensor.errors.tokens is not None and len(tensor.errors.tokens) > 1:
            rows.append(("  Worst tokens", plain(_worst_tokens(tensor.errors.tokens))))
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
    words = Text.assemble(("Verdict: ", "bold"), (comparison.verdict, _VERDICT_STYLE[comparison.verdict]))
    if comparison.agrees and not comparison.same_layout:
        words.append(", but in another layout; --any_layout lets that pass")
    return words


def save_token_picture(path: Path, comparison: "DumpComparison | RunComparison", heading: str) -> None:
    """Draw the relative error of each token, for the first 12 tensors that have tokens and differ.

    Args:
        path: An `.svg` or `.png` file, replaced if it is there.
        comparison: What to draw.
        heading: The first line.

    Raises:
        WriteError: The file cannot be written.
    """
    panels = [
        (name, tensor, tensor.errors.tokens)
        for name, tensor in named_comparisons(comparison)
        if tensor.errors is not None and tensor.errors.tokens is not None and tensor.errors.unequal
    ]
    shapes: list[Shape] = [
        Label(16, 30, _cut(f"Error by token: {heading}")[:100], size=18),
        Label(16, 52, _CAPTION, size=13, colour=FAINT),
    ]
    if not panels:
        shapes.append(Label(16, _TOP, "No tensor with tokens differs."))
    for index, (name, tensor, tokens) in enumerate(panels[:_MOST_PANELS]):
        shapes += _panel(_TOP + _PANEL * index, name, tensor, tokens)
    height = _TOP + _PANEL * max(1, min(len(panels), _MOST_PANELS))
    if len(panels) > _MOST_PANELS:
        shapes.append(Label(16, height + 10, f"and {counted(len(panels) - _MOST_PANELS, 'tensor')} more"))
        height += 24
    save_picture(path, (_WIDTH, height), shapes)


def _cut(text: str) -> str:
    clean = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return clean if len(clean) <= _LONGEST else f"{clean[: _LONGEST - 1]}…"


def _panel(top: int, name: str, tensor: "TensorComparison", tokens: "TokenErrors") -> Iterator[Shape]:
    limit = tensor.tolerance.computed
    axis = Axis.of(tokens.relative_l2, top + 52, top + 52 + _BARS)
    yield Label(16, top + 14, _cut(f"{name}: {tensor.verdict}"), size=15)
    explained = f" Rounding explains {rough_percent(limit)}." if limit else ""
    scale = " The axis is logarithmic." if axis.is_logarithmic else ""
    yield Label(16, top + 34, _cut(f"{tensor.reason}{explained}{scale}"))
    yield from axis.lines(_LEFT, _RIGHT, _GRID)
    step = (_RIGHT - _LEFT) / len(tokens)
    for token, error in enumerate(tokens.relative_l2):
        if not tokens.unequal[token]:
            continue
        beyond = error > limit or tensor.first_token == token
        tall = max(axis.foot - axis.place(error), 2.0)
        tip = f"token {token}: {rough_percent(error, 3)}, largest difference {tokens.max_abs[token]:.3g}"
        width = step * 0.8 if step > 3 else step
        colour = _BEYOND if beyond else _WITHIN
        yield Bar(_LEFT + step * token, axis.foot - tall, width, tall, colour, tip)
    y = axis.place(limit)
    if axis.top < y < axis.foot - 4:
        yield Line((_LEFT, y), (_RIGHT, y), _LIMIT)
    yield from _ticks(axis.foot, len(tokens), step)


def _ticks(foot: int | float, tokens: int, step: float) -> Iterator[Shape]:
    """Numbers of some tokens under the bars."""
    apart = next((interval for interval in _round_steps() if interval * step >= 36), tokens)
    for token in range(0, tokens, max(1, apart)):
        yield Label(_LEFT + step * (token + 0.5), foot + 16, str(token), anchor="middle")


def _round_steps() -> Iterator[int]:
    yield from islice((factor * 10**power for power in range(8) for factor in (1, 2, 5)), 24)
