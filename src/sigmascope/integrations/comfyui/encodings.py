"""The instrument that keeps facts of what text encoders and VAEs made: conditionings, prompts, latents and pictures.

Shapes are read when a node is done. Tokens are counted at the prompt's end, by the node's own tokenizer. No values are read.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from sigmascope.integrations.comfyui.instruments import Instrument, weakly
from sigmascope.integrations.comfyui.needs import output_data
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.sampling import first_of
from sigmascope.integrations.comfyui.texts import is_prompt
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.reading import attempt
from sigmascope.probes.tensors import as_tensor
from sigmascope.stages.conditioning import (
    conditioning_facts,
    find_encoders,
    find_tokenizers,
    read_conditioning,
)
from sigmascope.stages.latent_facts import find_latent, vae_dict, vae_facts
from sigmascope.stages.prompt_facts import count_tokens, prompt_facts

TEXT_ENCODING: Final = "text_encoding"
"""The fact of a node's stage: its conditioning, and its prompts by input."""
VAE: Final = "vae"
"""The fact of a node's stage: the VAE, the latent's shape and the pictures'."""


class _Encoded(NamedTuple):
    node: NodeWatch
    clip: Callable[[], Any]
    texts: dict[str, str]


class _Made:
    """What a prompt's text encoders and VAEs made."""

    def __init__(self) -> None:
        self.encoded: list[_Encoded] = []
        self.coded: list[tuple[NodeWatch, Callable[[], Any]]] = []


class Encodings(Instrument):
    """Wraps `execution.get_output_data`."""

    name = "encodings"
    gives = "facts of conditionings, prompts, latents and pictures"
    needs = (output_data("obj", "input_data_all"),)

    def put_on(self) -> None:
        """See `Instrument`."""
        self.wraps.append(Wrap(self.needs[0], self, after=self._outputs))

    def _outputs(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        inputs = call.get("input_data_all")
        if not isinstance(inputs, Mapping) or inputs.keys().isdisjoint(("clip", "vae")):
            return
        prompt = self.session.prompt_of(call.get("prompt_id"))
        node = None if prompt is None else prompt.nodes.get(str(call.get("unique_id")))
        if prompt is None or node is None or error is not None or not isinstance(result, tuple):
            return
        made = prompt.until_the_end(self.name, _Made)
        first = {name: first_of(value) for name, value in inputs.items()}
        kinds = getattr(call.get("obj"), "RETURN_TYPES", ())
        outputs = {str(kind): first_of(values) for kind, values in zip(kinds, result[0] or (), strict=False)}
        clip, vae = weakly(first.get("clip")), weakly(first.get("vae"))
        if clip is not None and "CONDITIONING" in outputs:
            conditioning, reason = read_conditioning(outputs["CONDITIONING"])
            encoders = attempt(lambda: find_encoders(first.get("clip"))).value or ()
            facts = conditioning_facts(conditioning, encoders, False, reason)
            node.facts[TEXT_ENCODING] = {"conditioning": facts, "prompts": {}}
            texts = {name: value for name, value in first.items() if isinstance(value, str)}
            made.encoded.append(_Encoded(node, clip, texts))
        if vae is not None and not outputs.keys().isdisjoint({"LATENT", "IMAGE"}):
            node.facts[VAE] = {"tensors": dict(_shapes([*first.values(), *outputs.values()]))}
            made.coded.append((node, vae))

    def at_the_end(self, prompt: PromptRecording) -> None:
        """See `Instrument`."""
        made = prompt.until_the_end(self.name, _Made)
        for node, reference in made.coded:
            node.facts[VAE]["vae"] = vae_dict(vae_facts(reference()))
        for one in made.encoded:
            if (clip := one.clip()) is not None:
                tokenizers = attempt(partial(find_tokenizers, clip)).value or {}
                prompts = one.node.facts[TEXT_ENCODING]["prompts"]
                for name, text in one.texts.items():
                    if not is_prompt(one.node.class_type, name):
                        continue
                    counts, reason = count_tokens(text, tokenizers, None)
                    prompts[name] = prompt_facts(text, counts, reason, prompt.privacy)


def _shapes(values: list[Any]) -> Iterator[tuple[str, list[int]]]:
    """The latent's and the pictures' shapes: (batch, channels, …) and (batch, height, width, channels)."""
    for value in values:
        is_latent = isinstance(value, Mapping) and "samples" in value
        tensor = find_latent(value).tensor if is_latent else as_tensor(value)
        if tensor is not None and tensor.ndim >= 4:
            yield ("latent" if is_latent else "pictures"), list(tensor.shape)


INSTRUMENT = Encodings
