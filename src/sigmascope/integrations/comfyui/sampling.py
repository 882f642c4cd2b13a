"""What a sampling node was told: sampler, scheduler, steps, cfg, seed, denoise and the latent's size.

Read from the values that ComfyUI hands to the node, so that it is known of linked ones too. No tensor's values are read.
"""

from collections.abc import Mapping
from typing import Any, Final

from sigmascope.probes.reading import attempt
from sigmascope.probes.tensors import as_tensor, leaves_of
from sigmascope.records.run import CallFacts

SAMPLING: Final = "sampling"
"""The fact of a node's stage that holds this."""
LATENTS: Final = ("latent_image", "samples", "latent")
"""The inputs of samplers for what they denoise."""
_NOT_SET: Final = "the node has no such setting"


def is_sampler(inputs: Mapping[str, Any]) -> bool:
    """Whether a node with these inputs denoises a latent."""
    return not inputs.keys().isdisjoint(LATENTS) and not inputs.keys().isdisjoint(
        {"sampler_name", "sigmas", "sampler"}
    )


def first_of(value: Any) -> Any:
    """ComfyUI hands over lists, one entry for each item of a batch of inputs: the first."""
    return value[0] if isinstance(value, list) and value else None


def sampling_facts(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The facts, as JSON values; None: with the reason in `unavailable`.

    Args:
        inputs: By name, as ComfyUI hands them over.
    """
    first = {name: first_of(value) for name, value in inputs.items()}
    sigmas = as_tensor(first.get("sigmas"))
    latent = next((first[name] for name in LATENTS if name in first), None)
    samples = next(leaves_of(latent.get("samples")), None) if isinstance(latent, Mapping) else None
    sampler_function = _attribute(first.get("sampler"), "sampler_function")
    given: dict[str, Any] = {
        "sampler": first.get("sampler_name", _sampler_name(sampler_function)),
        "scheduler": first.get("scheduler"),
        "steps": max(0, sigmas.shape[-1] - 1) if sigmas is not None and sigmas.ndim else first.get("steps"),
        "cfg": first.get("cfg", _attribute(first.get("guider"), "cfg")),
        "seed": first.get("seed", first.get("noise_seed", _attribute(first.get("noise"), "seed"))),
        "denoise": first.get("denoise"),
    }
    facts: dict[str, Any] = {
        name: value if isinstance(value, str | int | float) else None for name, value in given.items()
    }
    facts["latent"] = None if samples is None else attempt(lambda: list(samples.tensor.shape)).value
    start, end = first.get("start_at_step"), first.get("end_at_step")
    if isinstance(start, int) or isinstance(end, int):
        facts["from_step"], facts["to_step"] = start, end
    facts["unavailable"] = {
        name: _NOT_SET if given.get(name) is None else f"the node is given a {type(given[name]).__name__}"
        for name, value in facts.items()
        if value is None
    }
    return facts


def _attribute(thing: object, name: str) -> Any:
    return attempt(lambda: getattr(thing, name, None)).value


def _sampler_name(function: object) -> str | None:
    name = getattr(function, "__name__", None)
    return name.removeprefix("sample_") if isinstance(name, str) else None


def call_facts(sampling: Mapping[str, Any]) -> CallFacts:
    """The same as every record has it, for what reads a generation."""
    latent = sampling.get("latent") or [None]
    steps, cfg, seed = sampling.get("steps"), sampling.get("cfg"), sampling.get("seed")
    return CallFacts(
        num_inference_steps=steps if isinstance(steps, int) else None,
        guidance_scale=attempt(lambda: float(cfg)).value if isinstance(cfg, int | float) else None,
        batch_size=latent[0],
        seed=seed if isinstance(seed, int) else None,
    )
