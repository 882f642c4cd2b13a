"""What the records of encodings and decodings show that nobody has analysed."""

from collections.abc import Iterator, Mapping

from sigmascope.records.finding import Finding
from sigmascope.records.latent_findings import findings_of_record
from sigmascope.records.latents import RECORD_FACT
from sigmascope.records.latents_plain import encoding_record
from sigmascope.records.run import Run, Stage


def find_vae_findings(run: Run) -> list[Finding]:
    """Stand-ins, fallbacks and failures of `encode_latents` and `decode_latents`.

    Where a stage holds an analysis, that has them already: see `find_stage_findings`.
    """
    return [finding for stage in run.stages for finding in _of_record(stage)]


def _of_record(stage: Stage) -> Iterator[Finding]:
    if stage.name in stage.facts:
        return
    plain = stage.facts.get(RECORD_FACT)
    if isinstance(plain, Mapping):
        yield from findings_of_record(encoding_record(plain))
    for child in stage.children:
        yield from _of_record(child)
