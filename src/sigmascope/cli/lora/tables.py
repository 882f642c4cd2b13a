"""Reports of `lora extract`, `validate`, `resize` and `merge` as tables for 80 columns or a plain log."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sigmascope.cli.console import counts, facts, layer, listed, number, percent, plain, span, table, title

if TYPE_CHECKING:
    from sigmascope.lora.bake import BakedTensor, BakeReport
    from sigmascope.lora.extraction_report import ExtractionReport
    from sigmascope.lora.merge_methods import InputLora
    from sigmascope.lora.resize import ReducedModule, ReductionReport
    from sigmascope.lora.validation_report import Band, BlockError, ModuleError, ValidationReport
    from sigmascope.records.run import Finding

_BAND_STYLE = {"excellent": "green", "good": "cyan", "poor": "yellow", "noise": "bold red"}
_SEVERITY_STYLE = {"info": "cyan", "warning": "yellow", "error": "red", "critical": "bold red"}
_MIB = 1024**2
_MOST_FAILURES = 10
_PADDING = (0, 1, 0, 0)  # narrow gaps: the longest layer name of a full-size model must fit a line
_LEFT_OUT_WORDS = {"excluded": "excluded", "rank_0": "no rank", "no_change": "no change"}


def print_extraction(console: Console, report: "ExtractionReport", *, verbose: bool) -> None:
    """Show what an extraction wrote: blocks, totals, what is left out, and how to go on."""
    console.print(_title("LoRA extraction", report.lora.name))
    console.print(_block_table(report.blocks, "In LoRA"))
    if verbose:
        console.print(_module_table("Every layer", report.errors))
    console.print(_facts(_extraction_facts(report)))
    console.print(_findings(report.findings))
    console.print(_plain_text("Written: ", report.lora, f" ({_size(report.file_bytes)})"))
    console.print(_plain_text("         ", report.sidecar))
    console.print(
        _plain_text("Next: sigmascope lora validate with the same two models and --lora_path ", report.lora)
    )


def _title(what: str, name: str) -> Text:
    return Text.assemble((f"{what}: ", "bold"), name)


def _block_table(blocks: Sequence["BlockError"], applied: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=_PADDING, pad_edge=False)
    table.add_column("Block", overflow="fold")
    for heading in (applied, "Rank", "Change", "Error", "Mean", "Worst"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("Band", no_wrap=True)
    for block in blocks:
        complete = block.applied == block.modules
        table.add_row(
            Text(block.name),
            Text(f"{block.applied}/{block.modules}", style="" if complete else "bold red"),
            _ranks(block.ranks),
            f"{block.delta_norm:.3g}",
            _percent(block.relative_error),
            _percent(block.average_error),
            _percent(block.largest_error),
            _band(block.band),
        )
    return table


def _ranks(ranks: tuple[int, int] | None) -> str:
    if ranks is None:
        return "-"
    return str(ranks[0]) if ranks[0] == ranks[1] else f"{ranks[0]}-{ranks[1]}"


def _percent(fraction: float | None) -> str:
    """Three digits in seven columns; a small error as 4e-05 %, not as a nought that it is not."""
    if fraction is None:
        return "-"
    percent = 100 * fraction
    if 0 < percent < 0.001:
        return f"{percent:.0e} %"
    return f"{percent:.3f} %" if 0 < percent < 1 else f"{percent:.3g} %"


def _band(band: "Band | None") -> Text:
    return Text(band or "-", style=_BAND_STYLE.get(band or "", ""))


def _module_table(title: str, modules: Sequence["ModuleError"]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=_PADDING, pad_edge=False, title=title, title_justify="left")
    table.add_column("Layer", overflow="fold")
    table.add_column("Rank", justify="right", no_wrap=True)
    table.add_column("Error", justify="right", no_wrap=True)
    for module in modules:
        error = _percent(module.relative_error) if module.status == "applied" else module.status
        rank = "-" if module.rank is None else str(module.rank)
        style = _BAND_STYLE.get(module.band or "", "")
        table.add_row(Text(module.name.removeprefix("denoiser.")), rank, Text(error, style=style))
    return table


def _facts(rows: Sequence[tuple[str, RenderableType]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    return table


def _extraction_facts(report: "ExtractionReport") -> list[tuple[str, RenderableType]]:
    reasons = [layer.reason for layer in report.left_out]
    left_out = ", ".join(
        f"{reasons.count(reason)} {reason.replace('_', ' ')}" for reason in sorted(set(reasons))
    )
    coverage = (
        f"{report.total_lora_modules} of {report.total_analyzed_layers} layers "
        f"({report.coverage_percentage:.1f} %)"
    )
    return [
        ("Layers in the LoRA", coverage),
        ("Left out", left_out or "none"),
        ("Error, overall", _percent(report.relative_error)),
        ("Error, average", _percent(report.average_error)),
        ("Precision", report.options.save_precision),
        ("Time", f"{report.seconds:.1f} s"),
    ]


def _findings(findings: Sequence["Finding"]) -> Group:
    return Group(
        *(
            Text.assemble(
                (f"{finding.severity}: ", _SEVERITY_STYLE[finding.severity]),
                finding.message,
                f" {finding.advice}" if finding.advice else "",
            )
            for finding in findings
        )
    )


def _plain_text(*parts: object) -> Text:
    """Plain text, folded by the terminal and not inside a file name; never read as markup."""
    return Text("".join(map(str, parts)), overflow="fold")


def _size(file_bytes: int) -> str:
    return f"{file_bytes / _MIB:.2f} MB" if file_bytes >= _MIB / 10 else f"{file_bytes / 1024:.1f} KB"


def print_validation(console: Console, report: "ValidationReport", *, verbose: bool) -> None:
    """Show how well a LoRA reproduces the tuned model: fidelity, what is applied, blocks, bands, the worst layers."""
    said_first = [finding for finding in report.findings if finding.id == "lora.other_model"]
    console.print(_title("LoRA validation", report.lora.name))
    console.print(_facts(_headline(report)))
    console.print(_findings(said_first))
    console.print(_block_table(report.blocks, "Applied"))
    console.print(_module_table("Every layer", report.modules) if verbose else _worst(report))
    console.print(_facts(_validation_facts(report)))
    if verbose or not said_first:
        console.print(_failures(report.failures))
    console.print(_findings([finding for finding in report.findings if finding not in said_first]))


def _headline(report: "ValidationReport") -> list[tuple[str, RenderableType]]:
    """Two figures: how near the tuned model is reached, and how much of the LoRA has a place at all."""
    fidelity = "-" if report.fidelity is None else f"{report.fidelity:.1f} %"
    applied = f"{report.success_rate:.1f} % ({report.applied} of {len(report.modules)} modules)"
    return [
        ("Fidelity", Text.assemble(fidelity, " of the change  ", _band(report.band))),
        ("Applied", Text(applied, style="green" if not report.failures else "bold red")),
    ]


def _worst(report: "ValidationReport") -> Table:
    return _module_table(f"Worst {len(report.worst)} layers", report.worst)


def _validation_facts(report: "ValidationReport") -> list[tuple[str, RenderableType]]:
    counts = Text("  ").join(
        Text(f"{band} {count}", style=_BAND_STYLE[band] if count else "dim")
        for band, count in report.bands.items()
    )
    overall = Text.assemble(_percent(report.relative_error), "  ", _band(report.band))
    return [
        ("Error, overall", overall),
        ("Error, average", _percent(report.average_error)),
        ("Layers by band", counts),
        ("Unchanged layers", f"{report.unchanged_layers} (need no module)"),
        ("Time", f"{report.seconds:.1f} s"),
    ]


def _failures(failures: Sequence["ModuleError"]) -> Group:
    lines = [
        _plain_text(
            f"{failure.status.replace('_', ' ')}: {failure.name}",
            f" ({failure.detail})" if failure.detail else "",
        )
        for failure in failures[:_MOST_FAILURES]
    ]
    if len(failures) > _MOST_FAILURES:
        lines.append(_plain_text(f"and {len(failures) - _MOST_FAILURES} more; --json lists all"))
    return Group(*lines)


def print_reduction(console: Console, what: str, report: "ReductionReport", *, verbose: bool) -> None:
    """Show what became of each block or module, the totals, and what is left out."""
    console.print(title(what, report.lora.name))
    console.print(_reduced_block_table(report))
    if verbose:
        console.print(_reduced_module_table(report.modules))
    console.print(facts(_reduction_facts(report)))
    gone = [f"{module.name} ({_LEFT_OUT_WORDS[module.left_out or 'rank_0']})" for module in report.left_out]
    listed(console, "Left out", gone)
    listed(console, "Written as they are", report.carried, style="cyan")
    if report.method == "linear":
        listed(console, "Formed and decomposed, being more than up and down", report.formed, style="cyan")
    console.print(_plain_findings(report.findings))
    _print_written(console, report.lora, report.file_bytes)


def _reduced_block_table(report: "ReductionReport") -> Table:
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


def _reduced_module_table(modules: Sequence["ReducedModule"]) -> Table:
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
    from sigmascope.units import format_size

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


def _inputs(inputs: Sequence["InputLora"]) -> Group:
    return Group(*(Text(f"{one.weight:g} × ").append_text(plain(one.path)) for one in inputs))


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
    from sigmascope.units import format_size

    console.print(Text("Written: ").append_text(plain(file)).append(f" ({format_size(file_bytes)})"))


def print_bake(console: Console, report: "BakeReport", *, verbose: bool) -> None:
    """Show what was changed in the checkpoint, and what rounding took away."""
    console.print(title("LoRA merge", report.checkpoint.name))
    console.print(facts(_bake_facts(report)))
    shown = report.tensors if verbose else report.most_lost
    if shown:
        console.print(
            _baked_tensor_table("Every changed tensor" if verbose else "Most lost to rounding", shown)
        )
    for position, names in report.unmatched.items():
        listed(console, f"Not in the checkpoint, of {report.inputs[position].path.name}", names)
    for position, keys in report.unused_keys.items():
        listed(console, f"Keys of no module, of {report.inputs[position].path.name}", keys)
    skipped = [f"{name} ({reason})" for name, reason in report.skipped.items()]
    listed(console, "In the old file only", skipped, style="cyan")
    _print_written(console, report.checkpoint, report.file_bytes)


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


def _baked_tensor_table(heading: str, tensors: Sequence["BakedTensor"]) -> Table:
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
