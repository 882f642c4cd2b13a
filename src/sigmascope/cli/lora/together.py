"""`sigmascope lora inspect A B … --together`: how several LoRAs add up."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sigmascope.cli.console import (
    Console,
    facts,
    layer,
    listed,
    number,
    plain,
    print_json,
    progress_bar,
    table,
    title,
)
from sigmascope.units import UNKNOWN, percent_change

if TYPE_CHECKING:
    from sigmascope.lora.together import LorasTogether

_MOST_SHOWN = 10


def show_together(loras: Sequence[Path], *, verbose: bool, as_json: bool) -> None:
    """Measure LoRAs together, and print what they come to."""
    from sigmascope.lora.parallel import in_thread
    from sigmascope.lora.together import inspect_together

    with progress_bar("Adding up") as progress:
        report = in_thread(lambda: inspect_together(loras, progress=progress))
    if as_json:
        print_json(report.as_dict())
    else:
        _print(Console(), report, verbose=verbose)


def _print(console: Console, report: "LorasTogether", *, verbose: bool) -> None:
    total, shared = report.total, report.shared
    console.print(title("Together", ", ".join(path.name for path in report.paths)))
    rows = [
        (plain(path.name).plain, number(norm)) for path, norm in zip(report.paths, total.norms, strict=True)
    ]
    rows += [
        ("Sum ‖Σ ΔW‖", number(total.sum_norm)),
        ("If they were unrelated", number(total.unrelated_norm)),
        ("Interference", _interference(total.interference)),
        ("Modules that two or more change", f"{len(shared)} of {len(report.modules)}"),
    ]
    console.print(facts(rows))
    if not shared:
        console.print(
            "No module is changed by two of these LoRAs. Of different families, no model takes both."
        )
    shown = shared if verbose else shared[:_MOST_SHOWN]
    if shown:
        cells = (
            (
                layer(module.name),
                " + ".join(map(number, module.norms)),
                number(module.sum_norm),
                number(module.unrelated_norm),
                _interference(module.interference),
            )
            for module in shown
        )
        console.print(table("Module", "Strengths", "Sum", "Unrelated", "Interference", rows=cells))
    unknown = [f"{module.name}: {module.unavailable}" for module in report.modules if module.unavailable]
    listed(console, "Not added up", unknown)


def _interference(share: float | None) -> str:
    return UNKNOWN if share is None else percent_change(share)
