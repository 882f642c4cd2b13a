"""`sigmascope bench`: how fast a pipeline is, and how much memory it takes, repeatably."""

from pathlib import Path
from typing import Annotated

import typer

from sigmascope.cli.bench_run import BenchRequest, run_bench

EPILOG = """Examples:

sigmascope bench pocket --repeat 20

sigmascope bench ./my-pipeline --steps 4,20 --resolution 512,1024x768 --batch 1,4

sigmascope bench owner/name --output before; sigmascope compare after --baseline before
"""


def bench(
    pipeline: Annotated[
        str,
        typer.Argument(
            help="A folder that diffusers wrote, a name on the hub, or pocket: the model that ships.",
            metavar="PIPELINE",
            show_default=False,
        ),
    ],
    steps: Annotated[
        str | None,
        typer.Option("--steps", help="Denoising steps; several by comma.", metavar="<n,…>"),
    ] = None,
    resolution: Annotated[
        str | None,
        typer.Option("--resolution", help="WIDTHxHEIGHT, or the side of a square.", metavar="<size,…>"),
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", help="Pictures that one generation makes.", metavar="<n,…>")
    ] = "1",
    repeat: Annotated[int, typer.Option("--repeat", help="Generations of each case that count.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", help="Generations before them that do not.")] = 1,
    frames: Annotated[int | None, typer.Option("--frames", help="Of a video.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="What the pipeline is asked for.")] = None,
    image: Annotated[
        Path | None, typer.Option("--image", help="Picture to start from, for pipelines that take one.")
    ] = None,
    call: Annotated[
        list[str] | None,
        typer.Option(
            "--call", help="Another argument of the call, such as guidance_scale=1.0; may be repeated."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the noise; the same for every repeat.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto (bf16 on an accelerator, else float32), float32, bf16, fp16.")
    ] = "auto",
    offload: Annotated[
        str, typer.Option("--offload", help="Keep weights in RAM until needed: none, model, sequential.")
    ] = "none",
    target: Annotated[
        float | None, typer.Option("--target", help="Seconds that a generation may take.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the runs; a new one by default.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Measure a pipeline: warm-up, repeats, percentiles, throughput and peak memory.

    Every combination of steps, resolution and batch is a case. Each repeat is
    saved as a run, which sigmascope check and sigmascope compare read. The exit
    code is 1 when a case could not be measured.
    """
    request = BenchRequest(
        pipeline=pipeline,
        steps=steps,
        resolution=resolution,
        batch=batch,
        repeat=repeat,
        warmup=warmup,
        frames=frames,
        prompt=prompt,
        image=image,
        call=tuple(call or ()),
        seed=seed,
        device=device,
        dtype=dtype,
        offload=offload,
        target=target,
        output=output,
        as_json=as_json,
    )
    if not run_bench(request):
        raise typer.Exit(1)
