"""Latent encoding and decoding on a `WorkflowMonitor`: the stages' functions, with what the monitor knows filled in."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from sigmascope.monitor.latent_steps import LatentSteps, or_error, or_memory, or_seconds
from sigmascope.monitor.seen_attempts import attempts_in, record_in
from sigmascope.records.latents import EncodingRecord, Layout
from sigmascope.stages import latent_decoding, latent_encoding


class LatentMethods(LatentSteps):
    """The functions of `sigmascope.stages.latent_encoding` and `latent_decoding` as methods. None of them raises."""

    def capture_latent_generation_baseline(self, vae_model: object, video_data: object) -> dict[str, Any]:
        """See `sigmascope.capture_latent_generation_baseline`."""
        return self._latents(
            "baseline",
            lambda: latent_encoding.capture_latent_generation_baseline(
                vae_model, video_data, statistics=self.statistics, accelerator=self.accelerator
            ),
        )

    def capture_latent_decoding_baseline(
        self,
        vae_model: object,
        latent: object,
        *,
        video_length: object = None,
        video_height: object = None,
        video_width: object = None,
    ) -> dict[str, Any]:
        """See `sigmascope.capture_latent_decoding_baseline`."""
        return self._latents(
            "baseline",
            lambda: latent_decoding.capture_latent_decoding_baseline(
                vae_model,
                latent,
                video_length=video_length,
                video_height=video_height,
                video_width=video_width,
                statistics=self.statistics,
                accelerator=self.accelerator,
            ),
        )

    def analyze_latent_generation_results(
        self,
        baseline: Mapping[str, Any] | None,
        init_latent: object,
        elapsed_time: object = None,
        strategy_used: object = None,
        immediate_gpu_changes: object = None,
        video_length: object = None,
        video_height: object = None,
        video_width: object = None,
        *,
        record: EncodingRecord | None = None,
        error: BaseException | str | None = None,
        latent_layout: Layout | None = None,
    ) -> dict[str, Any]:
        """See `sigmascope.analyze_latent_generation_results`.

        Time, peaks, strategies and the memory right after come from the step; the analysis goes to it.
        """
        stage, seen = self._step("encoding")
        return self._analysed(
            stage,
            "encoding",
            init_latent,
            lambda: latent_encoding.analyze_latent_generation_results(
                baseline,
                init_latent,
                or_seconds(elapsed_time, seen),
                strategy_used,
                or_memory(immediate_gpu_changes, seen),
                video_length,
                video_height,
                video_width,
                record=record or record_in(seen),
                attempts=attempts_in(seen, "encoding"),
                peak_memory=None if seen is None else seen.peak,
                error=or_error(error, seen),
                latent_layout=latent_layout,
                statistics=self.statistics,
            ),
        )

    def analyze_latent_decoding_results(
        self,
        baseline: Mapping[str, Any] | None,
        decoded: object,
        elapsed_time: object = None,
        strategy_used: object = None,
        immediate_gpu_changes: object = None,
        *,
        record: EncodingRecord | None = None,
        error: BaseException | str | None = None,
    ) -> dict[str, Any]:
        """See `sigmascope.analyze_latent_decoding_results`; the step adds what it does to an encoding."""
        stage, seen = self._step("decoding")
        return self._analysed(
            stage,
            "decoding",
            decoded,
            lambda: latent_decoding.analyze_latent_decoding_results(
                baseline,
                decoded,
                or_seconds(elapsed_time, seen),
                strategy_used,
                or_memory(immediate_gpu_changes, seen),
                record=record or record_in(seen),
                attempts=attempts_in(seen, "decoding"),
                peak_memory=None if seen is None else seen.peak,
                error=or_error(error, seen),
                statistics=self.statistics,
            ),
        )

    def _analyze_latent_output(
        self, init_latent: object, video_length: object, video_height: object, video_width: object
    ) -> dict[str, Any]:
        return self._latents(
            "status",
            lambda: latent_encoding._analyze_latent_output(
                init_latent, video_length, video_height, video_width, statistics=self.statistics
            ),
        )

    def _analyze_vae_encoding_performance(
        self,
        elapsed_time: object,
        strategy_used: object,
        video_length: object,
        video_height: object,
        video_width: object,
    ) -> dict[str, Any]:
        return self._latents(
            "performance",
            lambda: latent_encoding._analyze_vae_encoding_performance(
                elapsed_time, strategy_used, video_length, video_height, video_width
            ),
        )

    def _calculate_latent_generation_memory_change(
        self, baseline: Mapping[str, Any] | None, current_ram: object, current_gpu: object
    ) -> dict[str, Any]:
        return self._latents(
            "memory",
            lambda: latent_encoding._calculate_latent_generation_memory_change(
                baseline, current_ram, current_gpu
            ),
        )

    def print_latent_generation_analysis_summary(
        self, analysis: Mapping[str, Any], console: Console | None = None
    ) -> None:
        """See `sigmascope.print_latent_generation_analysis_summary`."""
        show = latent_encoding.print_latent_generation_analysis_summary
        self.guard.read("summaries", lambda: show(analysis, console))

    def print_latent_decoding_analysis_summary(
        self, analysis: Mapping[str, Any], console: Console | None = None
    ) -> None:
        """See `sigmascope.print_latent_decoding_analysis_summary`."""
        show = latent_decoding.print_latent_decoding_analysis_summary
        self.guard.read("summaries", lambda: show(analysis, console))
