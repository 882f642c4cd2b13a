"""`sigmascope lora`: make LoRAs, prove them, and work on them. Commands of one subject share a module."""

import typer

from sigmascope.cli.groups import OnDemand, commands_on_demand

app = typer.Typer(
    cls=commands_on_demand(
        {
            "extract": OnDemand(
                "sigmascope.cli.lora.extract", "Extract a LoRA from a fine-tuned model: base + LoRA ≈ tuned."
            ),
            "plan": OnDemand(
                "sigmascope.cli.lora.plan",
                "Show how the error of a LoRA depends on its size, before you extract it.",
            ),
            "statistics": OnDemand(
                "sigmascope.cli.lora.statistics",
                "Run a model on a few inputs and measure how its layers affect the picture, for extract --statistics.",
            ),
            "fit": OnDemand(
                "sigmascope.cli.lora.statistics",
                "Fit a LoRA to the tuned model's outputs: closer pictures from the same bytes.",
            ),
            "validate": OnDemand(
                "sigmascope.cli.lora.validate",
                "Measure how well base + LoRA reproduces the fine-tuned model.",
            ),
            "grid": OnDemand(
                "sigmascope.cli.lora.grid",
                "Paint prompts without a LoRA and with each LoRA at each scale, side by side.",
            ),
            "convert": OnDemand("sigmascope.cli.lora.merge", "Convert a LoRA to the format of another tool."),
            "resize": OnDemand(
                "sigmascope.cli.lora.merge", "Change a LoRA's rank, without the models it was made from."
            ),
            "merge": OnDemand(
                "sigmascope.cli.lora.merge", "Merge LoRAs into one LoRA, or into a checkpoint."
            ),
            "inspect": OnDemand(
                "sigmascope.cli.lora.inspect",
                "Show what a LoRA holds: ranks, strength, spectra, damage, training data.",
            ),
            "diff": OnDemand(
                "sigmascope.cli.lora.inspect",
                "Compare two LoRAs: the same change, a scaled version of it, or another.",
            ),
        },
        imports_torch=True,
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.callback()
def group() -> None:
    """Make LoRAs from fine-tuned models, prove them, and work on them."""
