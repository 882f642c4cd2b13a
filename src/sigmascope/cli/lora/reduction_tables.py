"""What `resize` and `merge` print."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sigmascope.cli.lora.op_tables import (
    counts,
    facts,
    layer,
    listed,
    number,
    percent,
    plain,
    span,
    table,
    title,
)

if TYPE_CHECKING:
    from sigmascope.lora.merging.bake_report import BakeReport
    from sigmascope.lora.merging.baking import BakedTensor
    from sigmascope.lora.merging.merge_inputs import InputLora
    from sigmascope.lora.merging.reduced_module import ReducedModule
    from sigmascope.lora.merging.reduction_report import ReductionReport
    from sigmascope.records.finding import Finding

_SEVERITY_STYLE = {"info": "cyan", "warning": "yellow", "error": "red", "critical": "bold red"}
_LEFT_OUT = {"excluded": "excluded", "rank_0": "no rank", "no_change": "no change"}


def print_reduction(console: Console, what: str, report: "ReductionReport", *, verbose: bool) -> None:
    """Show what became of each block or module, the totals, and what is left out."""
    console.print(title(what, report.lora.name))
    console.print(_blocks(report))
    if verbose:
        console.print(_modules(report.modules))
    console.print(facts(_reduction_facts(report)))
    gone = [f"{module.name} ({_LEFT_OUT[module.left_out or 'rank_0']})" for module in report.left_out]
    listed(console, "Left out", gone)
    listed(console, "Written as they are", report.carried, style="cyan")
    if report.method == "linear":
        listed(console, "Formed and decomposed, being more than up and down", report.formed, style="cyan")
    console.print(_plain_findings(report.findings))
    _print_written(console, report.lora, report.file_bytes)


def print_bake(console: Console, report: "BakeReport", *, verbose: bool) -> None:
    """Show what was changed in the checkpoint, and what rounding took away."""
    console.print(title("LoRA merge", report.checkpoint.name))
    console.print(facts(_bake_facts(report)))
    shown = report.tensors if verbose else report.most_lost
    if shown:
        console.print(_tensors("Every changed tensor" if verbose else "Most lost to rounding", shown))
    for position, names in report.unmatched.items():
        listed(console, f"Not in the checkpoint, of {report.inputs[position].path.name}", names)
    for position, keys in report.unused_keys.items():
        listed(console, f"Keys of no module, of {report.inputs[position].path.name}", keys)
    skipped = [f"{name} ({reason})" for name, reason in report.skipped.items()]
    listed(console, "In the old file only", skipped, style="cyan")
    _print_written(console, report.checkpoint, report.file_bytes)


def _blocks(report: "ReductionReport") -> Table:
    made = table("Block", "Modules", "Old rank", "Rank", "Energy", "Error")
    for block in report.blocks:
        made.add_row(
            plain(block.name),
            f"{block.kept}/{block.modules}",
            span(block.old_ranks),
            span(block.ranks),
            percent(block.kept_energy),
            percent(block.relative_error),
        )
    return made


def _modules(modules: Sequence["ReducedModule"]) -> Table:
    made = table("Layer", "Old rank", "Rank", "Energy", "Error")
    for module in modules:
        made.add_row(
            layer(module.name),
            "-" if module.old_rank is None else str(module.old_rank),
            str(module.rank),
            percent(module.kept_energy),
            percent(module.relative_error),
        )
    return made


def _reduction_facts(report: "ReductionReport") -> list[tuple[str, RenderableType | None]]:
    from sigmascope.lora.ranking.sizes import format_size

    size = f"{format_size(report.bytes_before)} before, {format_size(report.file_bytes)} now"
    several = len(report.inputs) > 1
    return [
        ("LoRAs", _inputs(report.inputs) if several or report.inputs[0].weight != 1.0 else None),
        ("Method", plain(report.method) if several else None),
        ("Ranks asked for", plain(report.plan)),
        ("Ranks now", counts(report.ranks)),
        ("Energy kept", percent(report.kept_energy)),
        ("Error, overall", percent(report.relative_error)),
        ("Format", f"{report.format}, {report.dtype}"),
        ("Size", size),
        ("Time", f"{report.seconds:.1f} s"),
    ]


def _bake_facts(report: "BakeReport") -> list[tuple[str, RenderableType | None]]:
    return [
        ("Into", plain(report.into)),
        ("LoRAs", _inputs(report.inputs)),
        ("Method", plain(report.method) if len(report.inputs) > 1 else None),
        ("Tensors changed", f"{len(report.tensors)} ({report.copied} copied bit for bit)"),
        ("Strength ‖ΔW‖", number(report.change_norm)),
        ("Lost to rounding", percent(report.lost_share)),
        ("Time", f"{report.seconds:.1f} s"),
    ]


def _inputs(inputs: Sequence["InputLora"]) -> Group:
    return Group(*(Text(f"{one.weight:g} × ").append_text(plain(one.path)) for one in inputs))


def _tensors(heading: str, tensors: Sequence["BakedTensor"]) -> Table:
    made = table("Tensor", "Weight", "Change", "Lost")
    made.title, made.title_justify = heading, "left"
    for tensor in tensors:
        made.add_row(
            layer(tensor.name),
            number(tensor.weight_norm),
            number(tensor.change_norm),
            percent(tensor.lost_share),
        )
    return made


def _plain_findings(findings: Sequence["Finding"]) -> Group:
    return Group(
        *(
            Text.assemble(
                (f"{finding.severity}: ", _SEVERITY_STYLE[finding.severity]),
                plain(finding.message),
                f" {finding.advice}" if finding.advice else "",
            )
            for finding in findings
        )
    )


def _print_written(console: Console, file: object, file_bytes: int) -> None:
    from sigmascope.lora.ranking.sizes import format_size

    console.print(Text("Written: ").append_text(plain(file)).append(f" ({format_size(file_bytes)})"))
