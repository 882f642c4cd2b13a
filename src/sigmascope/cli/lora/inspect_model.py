"""`sigmascope lora inspect --model`: the verdict on a LoRA and a model, in tables."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from sigmascope.cli.lora.op_tables import facts, number, percent, plain, table, title
from sigmascope.cli.progress import progress_bar

if TYPE_CHECKING:
    from sigmascope.lora.effect import BlockEffect, Effect
    from sigmascope.lora.verdict.lora_verdict import LoraVerdict
    from sigmascope.records.finding import Finding

_SEVERITY_STYLE = {"info": "cyan", "warning": "yellow", "error": "red", "critical": "bold red"}
_MOST = 5


@dataclass(frozen=True)
class OnModel:
    """A LoRA beside a model.

    Attributes:
        model: The checkpoint.
        verdict: Of both.
        effects: By module, where relative strength was asked for.
    """

    model: Path
    verdict: "LoraVerdict"
    effects: "Mapping[str, Effect] | None" = None

    @property
    def blocks(self) -> "Sequence[BlockEffect]":
        """Relative strength by block; none where it was not asked for."""
        from sigmascope.lora.effect import by_block

        return () if self.effects is None else by_block(self.effects)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        found: dict[str, Any] = {"path": str(self.model), "verdict": self.verdict.as_dict()}
        if self.effects is not None:
            found["relative_strength"] = {
                "blocks": [block.as_dict() for block in self.blocks],
                "modules": {name: effect.as_dict() for name, effect in self.effects.items()},
            }
        return found


def judge(lora: Path, model: Path, *, relative: bool) -> OnModel:
    """Judge a LoRA by a checkpoint; its weights are read only for relative strength."""
    from sigmascope.checkpoints import open_checkpoint
    from sigmascope.lora.verdict.judging import judge_lora
    from sigmascope.lora.verdict.relative_strength import relative_strengths

    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(model))
        verdict = judge_lora(lora, checkpoint)
        if not relative:
            return OnModel(model, verdict)
        progress = stack.enter_context(progress_bar("Reading the model"))
        return OnModel(model, verdict, relative_strengths(lora, verdict, checkpoint, progress=progress))


def print_on_model(console: Console, found: OnModel, *, verbose: bool) -> None:
    """Show what matches, what does not and why, and what to know before loading."""
    verdict = found.verdict
    console.print(title("On the model", found.model.name))
    console.print(facts(_verdict_facts(verdict)))
    if found.effects is not None:
        _print_relative(console, found.blocks)
    _print_unmatched(console, verdict, verbose=verbose)
    told = {f"lora_{reason}" for reason in verdict.reasons}
    _print_findings(console, [finding for finding in verdict.findings if finding.id not in told])


def _verdict_facts(verdict: "LoraVerdict") -> "list[tuple[str, RenderableType | None]]":
    from sigmascope.lora.verdict.file_family import title_of

    family = title_of(verdict.file_family)
    if verdict.file_family is not None:
        family += f" (by {verdict.family_evidence})"
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


def _print_relative(console: Console, blocks: "Sequence[BlockEffect]") -> None:
    made = table("Block", "Modules", "Strength", "‖W‖", "Relative")
    for block in blocks:
        made.add_row(
            plain(block.name),
            str(block.keys),
            number(block.delta_norm),
            number(block.weight_norm),
            percent(block.relative_change),
        )
    console.print(made)


def _print_unmatched(console: Console, verdict: "LoraVerdict", *, verbose: bool) -> None:
    from sigmascope.lora.verdict.verdict_findings import REASON_ADVICE, REASON_WORDS

    for reason, count in verdict.reasons.items():
        modules = [module for module in verdict.unmatched if module.reason == reason]
        console.print(
            Text(f"{count} modules {REASON_WORDS[reason]}.", style="bold red").append(
                f" {REASON_ADVICE[reason]}", style="not bold default"
            )
        )
        shown = modules if verbose else modules[:_MOST]
        details = {module.detail for module in modules}
        if len(details) == 1:
            console.print(_indented(2, details.pop() or "", "yellow"))
        for module in shown:
            console.print(_indented(2, module.name, ""))
            if len({one.detail for one in modules}) > 1:
                console.print(_indented(4, module.detail or "", "yellow"))
            if module.nearest and reason != "other_architecture":
                console.print(_indented(4, f"nearest: {', '.join(module.nearest)}", "cyan"))
        if len(modules) > len(shown):
            console.print(f"  and {len(modules) - len(shown)} more; --verbose or --json lists all")


def _indented(width: int, text: str, style: str) -> Padding:
    return Padding(plain(text, style=style), (0, 0, 0, width))


def _print_findings(console: Console, findings: "Sequence[Finding]") -> None:
    for finding in findings:
        style = _SEVERITY_STYLE[finding.severity]
        line = Text(f"{finding.severity}: ", style=style).append_text(plain(finding.message, limit=600))
        line.stylize("default", len(finding.severity) + 2)
        if finding.advice:
            line.append(f" {finding.advice}", style="default")
        console.print(line)
