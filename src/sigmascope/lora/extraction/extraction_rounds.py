"""All layers of an extraction: decomposed in parallel, in as many rounds as the choice of ranks takes.

With ranks or policies for single layers there is one round. A budget for the whole file compares layers, so it
may ask for more singular values of some of them once it has seen those of all.
"""

import math
from collections.abc import Mapping

import torch

from sigmascope.errors import ConfigError
from sigmascope.lora.extraction.decomposed import (
    DecomposedLayer,
    ErrorSoFar,
    lost_outside,
    tighter,
    true_error,
)
from sigmascope.lora.extraction.journal import Journal
from sigmascope.lora.extraction.layer_extraction import (
    LayerRecord,
    LeftOutReason,
    extract_layer,
    read_record,
    write_record,
)
from sigmascope.lora.extraction.layer_pool import run_layers
from sigmascope.lora.extraction.layer_stream import LayerReader
from sigmascope.lora.extraction.options import ExtractOptions
from sigmascope.lora.models.layer_names import in_coverage
from sigmascope.lora.models.pairs import CheckpointPair
from sigmascope.lora.ranking.budget import Budget
from sigmascope.lora.ranking.budget_refusals import refuse_storage
from sigmascope.lora.ranking.rank_rules import RankRules
from sigmascope.lora.ranking.storage_cost import StorageCost
from sigmascope.lora.ranks import RankPolicy
from sigmascope.progress import Progress


class Rounds:
    """Decomposes the layers of a pair into a journal; what the journal holds already is not done again.

    Args:
        pair: The checkpoints.
        options: What to keep.
        journal: Open.
        device: Where to compute.
        progress: Told after each layer, with the error so far.
    """

    def __init__(
        self,
        pair: CheckpointPair,
        options: ExtractOptions,
        journal: Journal,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._pair = pair
        self._options = options
        self._journal = journal
        self._reader = LayerReader(pair, device)
        self._progress = progress
        self._done = 0
        self._total = 0

    def run(self, storage: StorageCost) -> dict[str, DecomposedLayer]:
        """Decompose every layer and choose its rank, in the order of the pair's layers.

        Args:
            storage: What factors take in the file, for a budget.

        Raises:
            SigmascopeError: From reading, decomposing or storing a layer, or a budget that cannot be met.
        """
        if self._options.budget is None:
            rules = self._options.rank_rules
            wanted = {layer: rules.policy_for(layer, self._pair.shape(layer)) for layer in self._pair.layers}
            found = self._round(0, wanted)
            return {layer: DecomposedLayer(f"0:{layer}", one, one.rank) for layer, one in found.items()}
        return self._under_budget(self._options.budget, self._options.rank_rules, storage)

    def _under_budget(
        self, budget: Budget, rules: RankRules, storage: StorageCost
    ) -> dict[str, DecomposedLayer]:
        shapes = {layer: self._pair.shape(layer) for layer in self._pair.layers}
        guesses = budget.first_guess(shapes, storage)
        first: dict[str, RankPolicy | int | None] = {
            layer: None if rules.is_excluded(layer) else rules.override_for(layer) or guesses[layer]
            for layer in shapes
        }
        records = self._round(0, first)
        names = {layer: f"0:{layer}" for layer in records}
        pinned = {layer: records[layer].rank for layer in records if rules.override_for(layer)}
        lost = lost_outside(budget, records)
        number, allowed, error = 0, budget, 0.0
        while True:
            spectra = {layer: one.spectrum for layer, one in records.items() if one.reason is None} | lost
            fixed = {layer: rank for layer, rank in pinned.items() if layer in spectra}
            try:
                allocation = allowed.allocate(spectra, storage, fixed | dict.fromkeys(lost, 0))
            except ConfigError:
                if budget.max_error is None or allowed is budget:
                    raise
                refuse_storage(budget.max_error, error)
            if allocation.wanted:
                number += 1
                records |= self._round(number, allocation.wanted)
                names |= {layer: f"{number}:{layer}" for layer in allocation.wanted}
                continue
            chosen = {
                layer: DecomposedLayer(names[layer], one, min(allocation.ranks.get(layer, 0), one.rank))
                for layer, one in records.items()
            }
            error = true_error(chosen, budget)
            if budget.max_error is None or error <= budget.max_error:
                return chosen
            allowed = tighter(allowed, budget.max_error, error)

    def _round(self, number: int, wanted: Mapping[str, RankPolicy | int | None]) -> dict[str, LayerRecord]:
        """Work through some layers; None as policy: the layer is excluded."""
        found = {
            layer: read_record(self._journal, f"{number}:{layer}")
            for layer in wanted
            if f"{number}:{layer}" in self._journal
        }
        self._total += len(wanted)
        self._done += len(found)

        def work(layer: str) -> LayerRecord:
            policy = wanted[layer]
            record, factors = extract_layer(
                self._reader,
                layer,
                policy if policy is not None else 1,
                self._options.storage_dtype,
                left_out=self._left_out(layer, policy),
                min_diff=self._options.min_diff,
            )
            write_record(self._journal, f"{number}:{layer}", record, factors)
            return record

        sizes = {layer: math.prod(self._pair.shape(layer)) for layer in wanted if layer not in found}
        so_far = ErrorSoFar()
        for record in found.values():
            so_far.add(record)
        for layer, record in run_layers(sizes, work, workers=self._options.workers):
            found[layer] = record
            so_far.add(record)
            self._done += 1
            self._progress(self._done, self._total, f"{so_far} {layer}")
        return {layer: found[layer] for layer in wanted}

    def _left_out(self, layer: str, policy: RankPolicy | int | None) -> LeftOutReason | None:
        if policy is None:
            return "excluded"
        return None if in_coverage(layer, self._options.target_coverage) else "outside_coverage"
