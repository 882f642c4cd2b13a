"""Which processors and backends compute a denoiser's attention."""

from collections import Counter
from collections.abc import Iterable

from torch import nn

from sigmascope.probes.reading import attempt
from sigmascope.probes.walking import modules_in
from sigmascope.records.pipeline import AttentionFacts

DEFAULT_BACKEND = "default"


def attention_facts(denoisers: Iterable[nn.Module]) -> AttentionFacts:
    """Processors of the attention modules that have one, as diffusers' do. Never raises.

    Args:
        denoisers: The models to look through.
    """
    return attempt(lambda: _count(denoisers)).value or AttentionFacts()


def _count(denoisers: Iterable[nn.Module]) -> AttentionFacts:
    plain, joint, backends = Counter[str](), Counter[str](), Counter[str]()
    for denoiser in denoisers:
        for module in modules_in(denoiser):
            processor = getattr(module, "processor", None)
            if processor is None:
                continue
            name = type(processor).__name__
            plain[name] += 1
            joint[name] += isinstance(getattr(module, "add_q_proj", None), nn.Module)
            chosen = getattr(processor, "_attention_backend", None)
            backends[DEFAULT_BACKEND if chosen is None else str(getattr(chosen, "value", chosen))] += 1
    return AttentionFacts(
        dict(plain), {name: count for name, count in joint.items() if count}, dict(backends)
    )
