"""`sigmascope lbm train`: train a LoRA, or every weight, of a Latent Bridge Matching model."""

from pathlib import Path
from typing import Annotated

import typer

from sigmascope.cli.lbm import options
from sigmascope.cli.lbm.train_run import TrainOptions, run_train

EPILOG = (
    "Example: sigmascope lbm train --path_config lora_relight.yaml --dry_run, then without --dry_run. "
    "Several GPUs: accelerate launch -m sigmascope lbm train --path_config lora_relight.yaml"
)

RUNNING, OUTPUT = "How to run", "What to show"


def train(
    path_config: Annotated[
        Path,
        typer.Option("--path_config", help="YAML of the training and the model.", show_default=False),
    ],
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no_resume",
            help="Go on from the newest checkpoint, or begin anew and move what is there aside.",
            rich_help_panel=RUNNING,
        ),
    ] = True,
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max_steps",
            min=1,
            help="Optimizer steps in all, in place of the YAML's.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    device: Annotated[
        str | None, options.device(RUNNING, "auto, cpu, cuda, cuda:1, mps or xpu; else the YAML's.")
    ] = None,
    allow_pipe: Annotated[
        bool,
        typer.Option(
            "--allow_pipe", help="Run the commands of shards named pipe:COMMAND.", rich_help_panel=RUNNING
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry_run",
            help="Check settings, base and data, and show what would be trained and the memory it takes.",
            rich_help_panel=RUNNING,
        ),
    ] = False,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no_live",
            help="A bar drawn over itself, or a line every log_interval steps; by default as stderr allows.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[bool, options.as_json(OUTPUT)] = False,
) -> None:
    """Train on pairs of pictures in WebDataset shards, and write LoRA files.

    Ctrl-C and SIGTERM save a checkpoint and end; the same command goes on from
    it. After a kill it goes on from the last checkpoint that was saved.
    """
    run_train(
        TrainOptions(
            path_config=path_config,
            resume=resume,
            max_steps=max_steps,
            device=device,
            allow_pipe=allow_pipe,
            dry_run=dry_run,
            live=live,
            as_json=as_json,
        )
    )
