"""`sigmascope lora inspect` and `lora diff`: what is in a LoRA file, and how two differ.

With `--model` a LoRA is compared with a checkpoint (`judge`); with `--picture` its strength is drawn by block.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sigmascope.cli.console import (
    Console,
    check_picture,
    counts,
    facts,
    findings,
    layer,
    listed,
    number,
    percent,
    plain,
    print_json,
    progress_bar,
    save_picture,
    span,
    table,
    title,
)
from sigmascope.cli.groups import importing
from sigmascope.cli.lora.together import show_together
from sigmascope.cli.options import AsJson, found_model
from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.svg import FAINT, Bar, Label, Line, Shape, mixed, strip
from sigmascope.units import counted, rough_percent

if TYPE_CHECKING:
    from sigmascope.lora.arrival import Arrival, Arrivals
    from sigmascope.lora.compare import LoraComparison, LoraSummary, ModuleDifference
    from sigmascope.lora.effect import BlockEffect, Effect
    from sigmascope.lora.file_verdict import LoraVerdict
    from sigmascope.lora.inspect import LoraInspection, ModuleStrength
    from sigmascope.lora.intruders import Intruders
    from sigmascope.records.run import Finding


app = typer.Typer(rich_markup_mode="rich")
EPILOG = (
    "Examples: sigmascope lora inspect my_lora.safetensors --model sdxl.safetensors --picture blocks.svg\n\n"
    "sigmascope lora inspect my_lora.safetensors --model flux_nvfp4.safetensors --arrives --strength 0.8\n\n"
    "sigmascope lora inspect style.safetensors character.safetensors --together"
)


_MOST_UNMATCHED = 5


# The picture: sizes in pixels, and colours.
_WIDTH: Final = 960
_LEFT: Final = 230
_RIGHT: Final = 480  # of the longest bar; the figures come behind it
_STRIP: Final = 630  # where a block's modules begin
_END: Final = 944
_TOP: Final = 104
_ROW: Final = 24
_LONGEST: Final = 32
_ACTS, _PARTLY, _NOTHING, _GRID = "#0277bd", "#e68a00", "#c62828", "#e0e0e0"
_HEAT: Final = ((0.0, "#e9f1f7"), (0.5, "#4f9fd0"), (1.0, "#08375c"))
_UNKNOWN: Final = "#bdbdbd"


@app.command("inspect", epilog=EPILOG)
def inspect(
    loras: Annotated[
        list[Path],
        typer.Argument(
            metavar="LORA",
            help="LoRA file of any format; several with --together.",
            show_default=False,
        ),
    ],
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Show how several LoRAs add up at strength 1: where they strengthen and where they cancel each other.",
        ),
    ] = False,
    full_spectrum: Annotated[
        bool,
        typer.Option(
            "--full_spectrum",
            help="Also compute spectra of ranks above 512, a second or more for each module.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every module, and with --json all singular values.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="A checkpoint, as file or folder: show which modules match it, and why others do not.",
            show_default=False,
            callback=found_model,
        ),
    ] = None,
    relative_strength: Annotated[
        bool,
        typer.Option(
            "--relative_strength",
            help="With --model: also show ‖ΔW‖/‖W‖, which reads the weights that change.",
        ),
    ] = False,
    arrives: Annotated[
        bool,
        typer.Option(
            "--arrives",
            help="With --model: also show how much of the LoRA arrives if it is merged and the sum rounded as the model "
            "is stored (fp8, int8, NVFP4, GGUF, …), and with how much noise. ComfyUI's formats are rounded as it does.",
        ),
    ] = False,
    intruders: Annotated[
        bool,
        typer.Option(
            "--intruders",
            help="With --model: also count the intruder dimensions, strong singular vectors that the weights did not have "
            "(arXiv 2410.21228). About 2 s for a weight of 3,072 × 3,072.",
        ),
    ] = False,
    strength: Annotated[
        float, typer.Option("--strength", help="With --arrives and --intruders: the LoRA's strength.")
    ] = 1.0,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", help="Draw the strength of each block in this .svg or .png file.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a LoRA holds: ranks, strength, spectra, damage, training data.

    Strength is ‖ΔW‖ at LoRA strength 1. It takes only the factors, not the model.
    The effective rank is the number of directions that a module really uses. If
    it is far below the rank, resizing the LoRA costs almost no quality.

    With --model the exit code is 1 if a module matches no weight of the model,
    holds NaN or Inf, or cannot be read. Only the model's header is read, however it is stored.

    Interference (--together) is 2·Σ<ΔWᵢ, ΔWⱼ> / Σ‖ΔWᵢ‖²: 0 for unrelated LoRAs,
    +100 % for two equal ones, -100 % where they cancel each other.
    """
    with importing():
        from sigmascope.lora.inspect import inspect_lora
        from sigmascope.lora.parallel import in_thread

    if together:
        if model or picture or full_spectrum or relative_strength or arrives or intruders or strength != 1.0:
            raise ConfigError(
                "--together goes with --verbose and --json alone.",
                hint="Inspect each LoRA alone for the rest.",
            )
        show_together(loras, verbose=verbose, as_json=as_json)
        return
    if len(loras) > 1:
        raise ConfigError(
            "Only one LoRA is inspected at a time.", hint="Add --together to see how they add up."
        )
    (lora,) = loras
    of_weights = {"relative_strength": relative_strength, "arrives": arrives, "intruders": intruders}
    for flag, asked in of_weights.items():
        if asked and model is None:
            raise ConfigError(f"--{flag} needs a model.", hint="Give the checkpoint with --model.")
    if strength != 1.0 and not (arrives or intruders):
        raise ConfigError("--strength is for --arrives and --intruders.", hint="Add --arrives.")
    if not math.isfinite(strength):
        raise ConfigError(f"--strength must be finite, got {strength:g}.", hint="Give the one that you use.")
    if picture is not None:
        inputs = (lora, model) if model is not None else (lora,)
        check_picture(picture, dict.fromkeys(inputs, "is an input"))
    on_model = (
        None
        if model is None
        else judge(
            lora,
            model,
            relative=relative_strength,
            arrives=arrives,
            intruders=intruders,
            strength=strength,
        )
    )
    verdict = None if on_model is None else on_model.verdict
    family = None if verdict is None or verdict.unmatched else verdict.model_family
    with progress_bar("Inspecting") as progress:
        report = in_thread(
            lambda: inspect_lora(lora, full_spectrum=full_spectrum, family=family, progress=progress)
        )
    if on_model is not None:
        on_model = replace(on_model, verdict=_with_one_advice(on_model.verdict, report))
    if picture is not None:
        save_inspection_picture(picture, report, on_model)
    if as_json:
        own = report.as_dict(spectra=verbose)
        print_json(own if on_model is None else own | {"model": on_model.as_dict()})
    else:
        console = Console()
        for sentence in _first_sentences(report, on_model):
            console.print(sentence)
        print_inspection(console, report, verbose=verbose)
        if on_model is not None:
            told = {finding.id for finding in report.findings}
            print_on_model(console, on_model, told, verbose=verbose)
        if picture is not None:
            console.print(title("Picture", picture))
    if on_model is not None and not on_model.verdict.fits:
        raise typer.Exit(1)


@dataclass(frozen=True)
class OnModel:
    """A LoRA beside a model.

    Attributes:
        model: The checkpoint.
        verdict: Whether the LoRA fits the model.
        effects: Effects by module, if relative strength was asked for.
        arrives: What arrives in its weights, if that was asked for.
        intruders: The intruder dimensions by weight, if they were asked for.
        strength: At which these two were measured.
    """

    model: Path
    verdict: "LoraVerdict"
    effects: "Mapping[str, Effect] | None" = None
    arrives: "Arrivals | None" = None
    intruders: "Mapping[str, Intruders] | None" = None
    strength: float = 1.0

    @property
    def at_strength_zero(self) -> "tuple[Finding, ...]":
        """That the LoRA does nothing at the strength asked for, if that is 0 and modules match."""
        from sigmascope.lora.verdict import at_strength_zero

        weights = sum(len(module.layers) for module in self.verdict.matched)
        return (at_strength_zero(weights),) if self.strength == 0.0 and weights else ()

    @property
    def blocks(self) -> "Sequence[BlockEffect]":
        """Relative strength by block; empty if it was not asked for."""
        from sigmascope.lora.effect import by_block

        return () if self.effects is None else by_block(self.effects)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        report: dict[str, Any] = {"path": str(self.model), "verdict": self.verdict.as_dict()}
        if self.at_strength_zero:
            report["findings"] = [asdict(finding) for finding in self.at_strength_zero]
        if self.effects is not None:
            report["relative_strength"] = {
                "blocks": [block.as_dict() for block in self.blocks],
                "modules": {name: effect.as_dict() for name, effect in self.effects.items()},
            }
        if self.arrives is not None:
            report["arrives"] = self.arrives.as_dict()
        if self.intruders is not None:
            report["intruder_dimensions"] = intruder_report(self.intruders)
        return report


def intruder_report(intruders: "Mapping[str, Intruders]") -> dict[str, Any]:
    """Intruder dimensions as JSON values: of all weights, by block and by weight."""
    from sigmascope.lora.intruders import EXAMINED, THRESHOLD, by_block, together

    return {
        "examined_per_weight": EXAMINED,
        "threshold": THRESHOLD,
        **together(intruders.values()).as_dict(),
        "blocks": {block: counted.as_dict() for block, counted in by_block(intruders).items()},
        "weights": {key: counted.as_dict() for key, counted in intruders.items()},
    }


def judge(
    lora: Path,
    model: Path,
    *,
    relative: bool,
    arrives: bool = False,
    intruders: bool = False,
    strength: float = 1.0,
) -> OnModel:
    """Judge how a LoRA fits a checkpoint, whose weights are read only for relative strength, what arrives and intruders.

    Args:
        lora: The file.
        model: The checkpoint, stored in any way.
        relative: Whether to measure relative strength.
        arrives: Whether to measure what arrives.
        intruders: Whether to count intruder dimensions.
        strength: The LoRA's, for both.
    """
    from sigmascope.checkpoints import open_checkpoint
    from sigmascope.lora.arrival import arrivals
    from sigmascope.lora.compatibility import judge_lora
    from sigmascope.lora.file import require_model
    from sigmascope.lora.inspect import relative_strengths
    from sigmascope.lora.intruders import intruder_dimensions
    from sigmascope.lora.parallel import in_thread

    with open_checkpoint(model, keep_unread=True) as checkpoint:
        require_model(checkpoint)
        on_model = OnModel(model, in_thread(lambda: judge_lora(lora, checkpoint)), strength=strength)
        if relative:
            with progress_bar("Reading the model") as progress:
                verdict = on_model.verdict
                effects = in_thread(lambda: relative_strengths(lora, verdict, checkpoint, progress=progress))
            on_model = replace(on_model, effects=effects)
        if arrives and on_model.verdict.error is None:
            with progress_bar("Merging and rounding") as progress:
                arriving = in_thread(lambda: arrivals(lora, checkpoint, strength=strength, progress=progress))
            on_model = replace(on_model, arrives=arriving)
        if intruders and on_model.verdict.error is None:
            with progress_bar("Counting intruder dimensions") as progress:
                found = in_thread(
                    lambda: intruder_dimensions(lora, checkpoint, strength=strength, progress=progress)
                )
            on_model = replace(on_model, intruders=found)
        return on_model


def _with_one_advice(verdict: "LoraVerdict", report: "LoraInspection") -> "LoraVerdict":
    """The verdict on a model, without the advice of one host where the file's own says which conversion suits both."""
    from sigmascope.lora.verdict import VERDICTS

    if not any(finding.id in ("lora_hosts_differ", "lora_no_host") for finding in report.findings):
        return verdict
    of_a_host = {id for id, row in VERDICTS.items() if row.host is not None}
    findings = tuple(replace(one, advice=None) if one.id in of_a_host else one for one in verdict.findings)
    return replace(verdict, findings=findings)


def print_inspection(console: Console, report: "LoraInspection", *, verbose: bool) -> None:
    """Show totals, blocks, the strongest or all modules, faults, and what the header says."""
    console.print(title("LoRA", report.path.name))
    console.print(facts(_totals(report)))
    console.print(_blocks(report))
    shown = report.modules if verbose else [module for module in report.strongest if module.norm]
    if shown:  # of DoRA alone, no strength is known without the base; of zeros, none is the strongest
        console.print(_modules("Every module" if verbose else "Strongest modules", shown))
    listed(console, "Modules that cannot be read", list(report.broken), style="bold red")
    listed(console, "Modules with NaN or Inf", report.not_finite, style="bold red")
    listed(console, "Modules that do almost nothing", report.near_zero)
    idle = {*report.near_zero}
    dead = [
        f"{name}: {many} of its columns" for name, many in report.dead_columns.items() if name not in idle
    ]
    listed(console, "Modules with columns that change nothing", dead)
    waiting = [module.name for module in report.modules if module.problem == "needs_base"]
    listed(console, "Measured only beside their base model", waiting, style="cyan")
    listed(console, "Keys that belong to no module", report.unused_keys)
    console.print(facts(_header_facts(report)))
    console.print(_hosts(report))
    console.print(findings(report.findings))


def _totals(report: "LoraInspection") -> "list[tuple[str, RenderableType | None]]":
    from sigmascope.units import format_size

    kinds = dict(report.kinds)
    return [
        ("Format", plain(report.format)),
        ("Size", f"{format_size(report.file_bytes)}, {report.parameters:,} parameters"),
        ("Modules", counts(kinds)),
        ("Ranks", counts(report.ranks)),
        ("Scale alpha/rank", counts(report.scales)),
        ("Stored as", counts(report.dtypes)),
        ("Strength ‖ΔW‖", number(report.norm)),
    ]


def _blocks(report: "LoraInspection") -> Table:
    rows = (
        (
            plain(block.name),
            str(block.modules),
            span(block.ranks),
            number(block.effective_rank),
            number(block.norm),
            percent(block.share),
        )
        for block in report.blocks
    )
    return table("Block", "Modules", "Rank", "Effective", "Strength", "Share", rows=rows)


def _hosts(report: "LoraInspection") -> Table:
    """What each host makes of the denoiser's modules, and of the text encoders' where the file has any."""
    from sigmascope.lora.hosts import strengths_in_words

    columns = ["Modules taken", "Strength"]
    if any(host.encoders for host in report.hosts):
        columns += ["Text encoders", "Strength"]
    made = table("Host", *columns, "Not known", left=("Not known",))
    made.columns[-1].no_wrap = False  # a reason is a sentence, and would leave no room for the host's name
    for host in report.hosts:
        cells: list[str] = []
        reasons: list[str] = []
        for part in (host, host.encoders):
            if part is not None:
                taken = "unknown" if part.taken is None else f"{part.taken} of {part.modules}"
                taken = taken if part.modules or part.unavailable else "-"
                cells += [taken, strengths_in_words(part)]
                reasons += part.unavailable.values()
        made.add_row(plain(host.host), *cells, plain("; ".join(dict.fromkeys(reasons))))
    return made


def _modules(heading: str, modules: "Sequence[ModuleStrength]") -> Table:
    made = table("Module", "Rank", "Effective", "Stable", "Strength", title=heading)
    for module in modules:
        made.add_row(
            layer(module.name),
            "-" if module.rank is None else str(module.rank),
            number(module.effective_rank),
            number(module.stable_rank),
            number(module.norm) if module.problem is None else plain(module.problem, style="red"),
        )
    return made


def _header_facts(report: "LoraInspection") -> "list[tuple[str, RenderableType | None]]":
    """What the header says. Anybody may have written it, so it is shown as plain text."""
    training = report.training
    rows: list[tuple[str, RenderableType | None]] = [
        (name.capitalize(), plain(value)) for name, value in training.training.items()
    ]
    if training.trigger_phrase is not None:
        rows.append(("Trigger phrase", plain(training.trigger_phrase)))
    if training.tags:
        rows.append(("Frequent tags", plain(", ".join(f"{tag} ({count})" for tag, count in training.tags))))
    for heading, fields in (("Modelspec", training.modelspec), ("Made by Sigmascope", training.provenance)):
        rows += [(f"{heading} {plain(name).plain}"[:40], plain(value)) for name, value in fields.items()]
    if training.others:
        rows.append(("Other fields", plain(", ".join(training.others))))
    return rows


def print_on_model(console: Console, on_model: OnModel, told: Collection[str], *, verbose: bool) -> None:
    """Show what matches, what does not and why, and what to know before loading but for findings that are told."""
    verdict = on_model.verdict
    console.print(title("On the model", on_model.model.name))
    console.print(facts(_verdict_facts(verdict)))
    if on_model.effects is not None:
        _print_relative(console, on_model)
    if on_model.arrives is not None:
        _print_arrives(console, on_model.arrives)
    if on_model.intruders is not None:
        _print_intruders(console, on_model.intruders)
    _print_unmatched(console, verdict, verbose=verbose)
    console.print(findings(on_model.at_strength_zero))
    explained = {*told, *(f"lora_{reason}" for reason in verdict.reasons)}
    console.print(findings(finding for finding in verdict.findings if finding.id not in explained))


def _verdict_facts(verdict: "LoraVerdict") -> "list[tuple[str, RenderableType | None]]":
    from sigmascope.lora.file_family import title_of

    family = title_of(verdict.file_family)
    if verdict.file_family is not None:
        guessed = f"; a guess: {verdict.family_doubt}" if verdict.family_doubt else ""
        family += f" (by {verdict.family_evidence}{guessed})"
    matched, count = len(verdict.matched), len(verdict.modules)
    parts = [
        f"{part.replace('_', ' ')} {counts['matched']} of {counts['modules']}"
        for part, counts in verdict.parts.items()
    ]
    style = "green" if verdict.fits else "yellow" if matched else "bold red"
    return [
        ("Made for", plain(family)),
        ("The model is", f"{title_of(verdict.model_family)}, in {verdict.model_naming} naming"),
        ("Modules that match", Text(f"{matched} of {count}", style=style)),
        ("By part", ", ".join(parts) if len(parts) > 1 else None),
        ("Error", plain(verdict.error, style="bold red") if verdict.error else None),
    ]


def _print_relative(console: Console, on_model: OnModel) -> None:
    rows = (
        (
            plain(block.name),
            str(block.keys),
            number(block.delta_norm),
            number(block.weight_norm),
            percent(block.relative_change),
        )
        for block in on_model.blocks
    )
    console.print(table("Block", "Modules", "Strength", "‖W‖", "Relative", rows=rows))
    unknown = {
        name: effect.unavailable["relative_change"]
        for name, effect in (on_model.effects or {}).items()
        if "relative_change" in effect.unavailable
    }
    _print_unknown(console, "Modules", unknown)


def _print_arrives(console: Console, arrives: "Arrivals") -> None:
    if not arrives.weights:
        return  # no module matches a matrix of the model, which the first sentence says
    rows = (
        (
            plain(block.name),
            f"{block.known} of {block.weights}",
            percent(block.share),
            percent(block.noise),
            plain(", ".join(block.stored) or "-"),
        )
        for block in arrives.blocks
    )
    heading = f"If it is merged at strength {arrives.strength:g}"
    console.print(table("Block", "Weights", "Arrives", "Noise", "Stored as", title=heading, rows=rows))
    if arrives.strength != 0.0:
        console.print(_ways(arrives.overall))
    _print_unknown(console, "Weights", arrives.unavailable)
    console.print(findings(arrives.findings[:1]))  # the first of two names both figures


def _print_intruders(console: Console, intruders: "Mapping[str, Intruders]") -> None:
    from sigmascope.lora.intruders import EXAMINED, by_block, together

    counts = {**by_block(intruders), "all": together(intruders.values())}
    rows = (
        (plain(block), str(one.count), f"{one.examined}", percent(one.share)) for block, one in counts.items()
    )
    heading = f"Intruder dimensions among the {EXAMINED} strongest directions of each weight"
    console.print(table("Block", "Intruders", "Of", "Their energy", title=heading, rows=rows))
    _print_unknown(
        console, "Weights", {key: one.unavailable for key, one in intruders.items() if one.unavailable}
    )


def _print_unknown(console: Console, of: str, unavailable: "Mapping[str, str]") -> None:
    """Name what has no figures, each reason once."""
    reasons = dict.fromkeys(unavailable.values())
    for reason in reasons:
        names = [name for name, why in unavailable.items() if why == reason]
        listed(console, f"Unknown, because {reason.rstrip('.')}. {of}", names, style="cyan")


_DECIDES: Final = frozenset(
    {
        "lora_matches_nothing",
        "lora_is_zero",
        "lora_alpha_zero",
        "lora_not_finite",
        "lora_damaged",
        "lora_strength_zero",
    }
)
"""Findings that answer whether the LoRA is of use."""


def _first_sentences(report: "LoraInspection", on_model: OnModel | None) -> Iterator[Text]:
    """The answer, which stands before the figures: what is wrong with all of it, what arrives, or how much of it matches.

    Without a model it may be that hosts load none of it; else there is none.
    """
    from sigmascope.lora.host_findings import loading_nothing

    known = (
        *(() if on_model is None else on_model.verdict.findings),
        *report.findings,
        *(() if on_model is None else on_model.at_strength_zero),
    )
    decisive = next((finding.message for finding in known if finding.id in _DECIDES), None)
    if decisive is not None:
        yield plain(decisive, style="bold red")
    if on_model is None:
        refusing = loading_nothing(report.hosts)
        if refusing and decisive is None:
            yield plain(f"{_load_none(refusing)}.", style="yellow")
    if on_model is None or on_model.verdict.error is not None:
        return
    arrives = None if on_model.arrives is None else _arrival_sentence(on_model.arrives)
    matches, is_taken = _match_sentence(report, on_model)
    if decisive is None and (arrives is None or not is_taken):
        yield matches
    if arrives is not None:
        yield arrives


def _match_sentence(report: "LoraInspection", on_model: OnModel) -> tuple[Text, bool]:
    """How many modules match, or which hosts load none of them; and whether all do, and none refuses."""
    from sigmascope.checkpoints.hub import model_name
    from sigmascope.lora.file_verdict import match_sentence
    from sigmascope.lora.host_findings import loading_nothing

    verdict = on_model.verdict
    said = match_sentence(verdict, model_name(on_model.model))
    refusing = loading_nothing(report.hosts) if not verdict.unmatched else []
    is_unnamed = any(finding.id == "lora_part_unnamed" for finding in verdict.findings)
    if is_unnamed and not verdict.unmatched and report.hosts[0].taken is None:
        refusing.insert(0, report.hosts[0].host)
    if refusing:
        said = f"{said.removesuffix('.')}, but {_load_none(refusing)}."
    style = "bold red" if verdict.unmatched else "yellow" if refusing else "green"
    return plain(said, style=style), not (verdict.unmatched or refusing)


def _load_none(hosts: Sequence[str]) -> str:
    return f"{' and '.join(hosts)} load{'s' if len(hosts) == 1 else ''} none of this file"


def _arrival_sentence(arrives: "Arrivals") -> Text | None:
    from sigmascope.lora.arrival import arrival_sentence

    told = arrival_sentence(arrives)
    return None if told is None else Text(told[0], style="green" if told[1] else "bold red")


def _ways(whole: "Arrival") -> Table:
    """What arrives of all weights together, by each way to use the LoRA."""
    from sigmascope.lora.arrival import SAMPLED_ROWS, WAYS

    ways = {WAYS.get(whole.way or "", "merge it as above"): whole}
    sampled = {f"{WAYS[name]} *": other for name, other in whole.others.items()}
    rows = [
        (plain(f"{words[0].upper()}{words[1:]}"), percent(way.share), percent(way.noise))
        for words, way in (ways | sampled).items()
    ]
    rows.append((plain("Leave it unmerged"), "100 %", "0 %"))
    made = table("All weights", "Arrives", "Noise", rows=rows)
    made.caption = f"* from {SAMPLED_ROWS} rows of each weight" if sampled else None
    return made


def _print_unmatched(console: Console, verdict: "LoraVerdict", *, verbose: bool) -> None:
    from sigmascope.lora.verdict import MISMATCHES

    for reason, count in verdict.reasons.items():
        modules = [module for module in verdict.unmatched if module.reason == reason]
        console.print(
            Text(f"{counted(count, 'module')} {MISMATCHES[reason].words(count)}.", style="bold red").append(
                f" {MISMATCHES[reason].advice}", style="not bold default"
            )
        )
        shown = modules if verbose else modules[:_MOST_UNMATCHED]
        details = {module.detail for module in modules}
        if len(details) == 1:
            console.print(_indented(2, modules[0].detail or "", "yellow"))
        for module in shown:
            console.print(_indented(2, module.name, ""))
            if len(details) > 1:
                console.print(_indented(4, module.detail or "", "yellow"))
            if module.nearest and reason != "other_architecture":
                console.print(_indented(4, f"nearest: {', '.join(module.nearest)}", "cyan"))
        if len(modules) > len(shown):
            console.print(f"  and {len(modules) - len(shown)} more; --verbose or --json lists all")


def _indented(width: int, text: str, style: str) -> Padding:
    return Padding(plain(text, style=style), (0, 0, 0, width))


def save_inspection_picture(path: Path, report: "LoraInspection", on_model: "OnModel | None") -> None:
    """Draw strength by block, as SVG or PNG by the file's suffix.

    Raises:
        WriteError: The file cannot be written.
        ConfigError: A PNG is wanted and Pillow is not installed.
    """
    rows = rows_of(report, on_model)
    size = (_WIDTH, _TOP + _ROW * len(rows) + 24)
    shapes = [*_picture_heading(report, on_model), *_picture_bars(rows), *_picture_strips(report, on_model)]
    save_picture(path, size, shapes)


@dataclass(frozen=True)
class BlockRow:
    """One bar.

    Attributes:
        name: Of the block.
        norm: ‖ΔW‖ at strength 1; None if it depends on the model's weights.
        share: Share of the LoRA's ‖ΔW‖².
        modules: Number of modules.
        matched: How many of them match; None without a model.
        relative: ‖ΔW‖ / ‖W‖; None if it was not measured.
    """

    name: str
    norm: float | None
    share: float | None
    modules: int
    matched: int | None = None
    relative: float | None = None

    @property
    def figures(self) -> str:
        """The tooltip."""
        parts = ["not measured without the model"]
        if self.norm is not None and self.share is not None:
            parts = [f"{self.norm:.3g}", f"{100 * self.share:.1f} %"]
        if self.relative is not None:
            parts.append(f"{rough_percent(self.relative, 3)} of the weights")
        lost = self.modules - (self.modules if self.matched is None else self.matched)
        if lost:
            parts.append(f"{lost} of {self.modules} do not match")
        return ", ".join(parts)

    @property
    def short(self) -> str:
        """The figures after the bar; Pillow's own font has no sign for a norm."""
        if self.norm is None or self.share is None:
            return "not measured"
        if self.matched is not None and self.matched < self.modules:
            return f"{self.matched} of {self.modules} match"
        relative = "" if self.relative is None else f", {rough_percent(self.relative)} of W"
        return f"{self.norm:.3g}, {100 * self.share:.1f} %{relative}"

    @property
    def colour(self) -> str:
        """Blue if all modules match the model, red if none does, amber between."""
        if self.matched is None or self.matched == self.modules:
            return _ACTS
        return _PARTLY if self.matched else _NOTHING


def rows_of(report: "LoraInspection", on_model: "OnModel | None") -> list[BlockRow]:
    """The bars, in the order in which a latent passes the blocks."""
    relative = {} if on_model is None else {block.name: block.relative_change for block in on_model.blocks}
    matched = None
    if on_model is not None:
        names = {module.name for module in on_model.verdict.matched}
        matched = Counter(module.block for module in report.modules if module.name in names)
    return [
        BlockRow(
            block.name,
            block.norm,
            block.share,
            block.modules,
            None if matched is None else matched[block.name],
            relative.get(block.name),
        )
        for block in report.blocks
    ]


def _picture_heading(report: "LoraInspection", on_model: "OnModel | None") -> Iterator[Shape]:
    from sigmascope.checkpoints.hub import model_name

    yield Label(16, 30, f"LoRA: {report.path.name}", size=18)
    strongest = max(report.blocks, key=lambda block: block.norm or 0.0, default=None)
    parts = [f"{counted(len(report.modules), 'module')} in {report.format} format."]
    if strongest is not None and strongest.norm and strongest.share is not None:
        parts.append(f"{strongest.name} is strongest: {100 * strongest.share:.0f} % of the LoRA.")
    if on_model is not None:
        verdict = on_model.verdict
        parts[0] = (
            f"{len(verdict.matched)} of {counted(len(verdict.modules), 'module')} {'matches' if len(verdict.matched) == 1 else 'match'} {model_name(on_model.model)}."
        )
        parts += ["Red matches nothing."] if verdict.unmatched else []
    yield Label(16, 54, " ".join(parts), size=13, colour=FAINT)
    yield Label(_LEFT, _TOP - 14, "Strength of a block, and its share")
    yield Label(_STRIP, _TOP - 14, "Its modules: the darker, the stronger")


def _picture_bars(rows: Sequence[BlockRow]) -> Iterator[Shape]:
    largest = max((row.norm or 0.0 for row in rows), default=0.0) or 1.0
    yield Line((_LEFT, _TOP - 4), (_LEFT, _TOP + _ROW * len(rows)), _GRID)
    for index, row in enumerate(rows):
        y = _TOP + _ROW * index
        length = max(1.0, (_RIGHT - _LEFT) * (row.norm or 0.0) / largest)
        yield Label(_LEFT - 8, y + 15, _shortened(row.name), anchor="end")
        yield Bar(
            _LEFT,
            y + 3,
            length,
            _ROW - 7,
            row.colour,
            f"{row.name}: {counted(row.modules, 'module')}, {row.figures}",
        )
        yield Label(_LEFT + length + 6, y + 15, row.short)


def _picture_strips(report: "LoraInspection", on_model: "OnModel | None") -> Iterator[Shape]:
    """A cell for each module of a block, red if it matches nothing in the model."""
    largest = max((module.norm or 0.0 for module in report.modules), default=0.0) or 1.0
    matched = None if on_model is None else {module.name for module in on_model.verdict.matched}
    for index, block in enumerate(report.blocks):
        cells = []
        for module in report.modules:
            if module.block == block.name:
                known = _UNKNOWN if module.norm is None else mixed(module.norm / largest, _HEAT)
                colour = _NOTHING if matched is not None and module.name not in matched else known
                cells.append((colour, f"module {module.name}: {number(module.norm)}"))
        yield from strip(_STRIP, _TOP + _ROW * index + 3, (_END - _STRIP, _ROW - 7), cells)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


DIFF_EPILOG = "Example: sigmascope lora diff trained.safetensors converted.safetensors"


_TROUBLE = 2
_VERDICT_STYLE = {"same": "green", "scaled": "yellow", "different": "bold red"}


@app.command("diff", epilog=DIFF_EPILOG)
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="LoRA file of any format.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The LoRA to compare it with.", show_default=False)],
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            help="Modules whose relative difference is at most this count as the same.",
            min=0.0,
        ),
    ] = 0.01,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every module.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two LoRAs: the same change, a scaled version of it, or another.

    What counts is the change that each LoRA makes, whatever its format, rank,
    alpha and precision, which are listed too. The exit code is 0 if they are
    the same within the tolerance, 1 if scaled or different, 2 for an error.
    """
    from sigmascope.lora.compare import compare_loras
    from sigmascope.lora.parallel import in_thread

    try:
        with progress_bar("Comparing") as progress:
            report = in_thread(lambda: compare_loras(a, b, tolerance=tolerance, progress=progress))
    except SigmascopeError as error:
        error.exit_code = _TROUBLE  # 1 says that they differ
        raise
    if as_json:
        print_json(report.as_dict())
    else:
        print_comparison(Console(), report, verbose=verbose)
    if report.verdict != "same":
        raise typer.Exit(1)


def print_comparison(console: Console, report: "LoraComparison", *, verbose: bool) -> None:
    """Show both files, the verdict, modules that only one has, and all modules or those that differ most."""
    console.print(title("LoRA A", report.a.path))
    console.print(title("LoRA B", report.b.path))
    console.print(_sides(report.a, report.b))
    console.print(facts(_measures(report)))
    listed(console, "Only in A", report.only_a)
    listed(console, "Only in B", report.only_b)
    listed(console, "Known only beside a base model, so not compared", report.not_measured)
    shapes = [
        f"{module.name}: {module.a.shape} and {module.b.shape}"
        for module in report.modules
        if module.presence == "other_shape" and module.a is not None and module.b is not None
    ]
    listed(console, "For weights of different shape", shapes)
    shown = report.modules if verbose else report.most_different
    if shown and (verbose or report.verdict != "same"):
        console.print(_difference_table("Every module" if verbose else "Most different modules", shown))
    fields = [f"{field.name}: {_shown(field.a)} | {_shown(field.b)}" for field in report.metadata]
    listed(console, "Header fields that differ (A | B)", fields, style="cyan")


def _sides(a: "LoraSummary", b: "LoraSummary") -> Table:
    rows = (
        ("Format", plain(a.format), plain(b.format)),
        ("Modules", str(a.modules), str(b.modules)),
        ("Parameters", f"{a.parameters:,}", f"{b.parameters:,}"),
        ("Ranks", counts(a.ranks, most=2), counts(b.ranks, most=2)),
        ("Stored as", counts(a.dtypes, most=2), counts(b.dtypes, most=2)),
        ("Strength ‖ΔW‖", number(a.norm), number(b.norm)),
    )
    return table("", "A", "B", left=("A", "B"), rows=rows)


def _measures(report: "LoraComparison") -> "list[tuple[str, RenderableType | None]]":
    words = {
        "same": f"the same change (within {percent(report.tolerance)} in every module)",
        "scaled": f"a scaled version: B = {number(report.factor)} · A",
        "different": "different",
    }
    verdict = report.verdict
    return [
        ("Verdict", Text(words[verdict], style=_VERDICT_STYLE[verdict])),
        ("Cosine of the changes", number(report.cosine)),
        ("Difference ‖A-B‖/‖A‖", percent(report.relative_difference)),
    ]


def _difference_table(heading: str, modules: "Sequence[ModuleDifference]") -> Table:
    made = table("Module", "Ranks", "Differ", "Cosine", "Columns", "Rows", title=heading)
    for module in modules:
        made.add_row(
            layer(module.name),
            _ranks(module),
            percent(module.relative_difference)
            if module.presence == "both"
            else module.presence.replace("_", " "),
            number(module.cosine),
            number(module.column_overlap),
            number(module.row_overlap),
        )
    return made


def _ranks(module: "ModuleDifference") -> str:
    ranks = [
        str(side.rank) if side is not None and side.rank is not None else "-" for side in (module.a, module.b)
    ]
    return ranks[0] if ranks[0] == ranks[1] else " / ".join(ranks)


def _shown(value: str | None) -> str:
    return "-" if value is None else plain(value, limit=60).plain
