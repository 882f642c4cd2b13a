"""Rules on what computes the attention."""

from collections.abc import Iterator
from typing import Final

from sigmascope.analysis.diagnostics.case import Case
from sigmascope.records.finding import Finding

_ONE_TENSOR: Final = frozenset(
    {
        "AttnProcessor",
        "AttnProcessor2_0",
        "AttnProcessorNPU",
        "XFormersAttnProcessor",
        "SlicedAttnProcessor",
        "XLAFlashAttnProcessor2_0",
        "FusedAttnProcessor2_0",
        "IPAdapterAttnProcessor",
        "IPAdapterAttnProcessor2_0",
    }
)
"""diffusers' processors that return the image's tensor alone."""

_EAGER: Final = frozenset({"AttnProcessor", "SlicedAttnProcessor", "IPAdapterAttnProcessor"})
"""Those that build the whole attention matrix instead of calling scaled_dot_product_attention."""


def plain_processor_in_joint_blocks(case: Case) -> Iterator[Finding]:
    """AttnProcessor2_0 and its like return one tensor where an MMDiT's block unpacks two."""
    if case.pipeline is None:
        return
    wrong = {
        name: count for name, count in case.pipeline.attention.joint_processors.items() if name in _ONE_TENSOR
    }
    if not wrong:
        return
    names = ", ".join(sorted(wrong))
    yield Finding(
        id="attention.plain_processor_in_joint_blocks",
        severity="error",
        message=f"{sum(wrong.values())} joint attention blocks have {names}, which returns one tensor where the block "
        "unpacks two (image and text): the call fails, or the text is lost.",
        evidence={"blocks": sum(wrong.values()), "processors": names},
        advice="Put the model's own processor back: reload the transformer, or set_attn_processor(FluxAttnProcessor(), "
        "JointAttnProcessor2_0() or QwenDoubleStreamAttnProcessor2_0()). They use PyTorch's fast attention already.",
    )


def eager_attention(case: Case) -> Iterator[Finding]:
    """Attention that builds the whole matrix costs memory and time that fused attention does not."""
    if case.pipeline is None:
        return
    eager = {name: count for name, count in case.pipeline.attention.processors.items() if name in _EAGER}
    if not eager:
        return
    count, names = sum(eager.values()), ", ".join(sorted(eager))
    yield Finding(
        id="attention.eager",
        severity="warning",
        message=f"{count} attention modules run {names}, which builds the whole attention matrix: memory grows with the "
        "square of the number of tokens.",
        evidence={"modules": count, "processors": names},
        advice="pipe.unet.set_attn_processor(AttnProcessor2_0()), or disable_attention_slicing(): PyTorch's "
        "scaled_dot_product_attention gives the same result.",
    )


ATTENTION_RULES = (plain_processor_in_joint_blocks, eager_attention)
