"""Know what your LoRA does and where your diffusion pipeline's time and memory go.

What the package offers, each name once. `__init__.py` reads this file and loads a name when it is first used, so
that `import sigmascope` stays light; type checkers and editors read it too.
"""
# ruff: noqa: I001 - in groups, by what a newcomer comes for; `as` is how a stub offers a name

__version__: str
__all__: list[str]

# Watch a pipeline, and read what was recorded
from .integrations.diffusers.watch import watch as watch
from .monitor.recorder import Recorder as Recorder, stage as stage, step as step
from .monitor.profile import profile_steps as profile_steps
from .records.run import Finding as Finding, Run as Run, Stage as Stage
from .records.serialization import load_run as load_run, save_run as save_run
from .records.merge import merge_runs as merge_runs
from .analysis.diagnostics import diagnose as diagnose
from .reports.console import print_run as print_run
from .reports.html import to_html as to_html, write_html as write_html
from .reports.markdown import to_markdown as to_markdown
from .reports.trace import write_trace as write_trace
from .monitor.publishing import export_runs as export_runs

# Hold generations to a target, compare them, and make them faster
from .monitor.performance import PerformanceMonitor as PerformanceMonitor
from .monitor.performance import create_mmdit_performance_monitor as create_mmdit_performance_monitor
from .monitor.performance import monitor_generation_performance as monitor_generation_performance
from .records.performance import PerformanceMetrics as PerformanceMetrics
from .pipeline.bench import BenchOptions as BenchOptions, run_benchmark as run_benchmark
from .analysis.run_comparison import check_regression as check_regression
from .pipeline.optimizer import (
    OptimizationConfig as OptimizationConfig,
    PipelineOptimizer as PipelineOptimizer,
)

# Make LoRAs
from .pipeline.lora_loading import convert_lora as convert_lora, extract_lora as extract_lora
from .pipeline.lora_loading import merge_lora_files as merge_lora_files, resize_lora as resize_lora
from .lora.layer_extraction import ExtractOptions as ExtractOptions
from .lora.merge import CombineOptions as CombineOptions, MergeMethod as MergeMethod
from .lora.resize import RankPlan as RankPlan
from .lora.ranks import FixedRank as FixedRank, MethodRank as MethodRank, RankRules as RankRules
from .lora.budget import Budget as Budget
from .lora.size_plan import LoraPlan as LoraPlan, plan_lora as plan_lora
from .lora.statistics import ModelStatistics as ModelStatistics, load_statistics as load_statistics
from .lora.statistics_collection import collect_statistics as collect_statistics
from .lora.fit import FitOptions as FitOptions, FittedLora as FittedLora
from .lora.fit import fit_lora as fit_lora, record_calls as record_calls
from .pipeline.pipeline_statistics import (
    fit_pipeline_lora as fit_pipeline_lora,
    pipeline_statistics as pipeline_statistics,
)

# Prove and read LoRAs
from .lora.validate import validate_lora as validate_lora
from .lora.inspect import inspect_lora as inspect_lora
from .lora.compare import compare_loras as compare_loras
from .lora.compatibility import judge_lora as judge_lora
from .lora.reader import load_lora as load_lora, open_lora as open_lora
from .pipeline.lora_loading import save_lora as save_lora
from .lora.file import LoraFile as LoraFile
from .lora.factors import LoraFactors as LoraFactors

# Apply LoRAs: on a live model, attached or merged; merged into a checkpoint; side by side as pictures
from .lora.apply import attach_lora as attach_lora
from .lora.live_merge import merge_into_model as merge_into_model
from .pipeline.lora_grid import LoraGrid as LoraGrid, lora_grid as lora_grid
from .lora.checkpoint_merge import merge_into_checkpoint as merge_into_checkpoint

# Latent Bridge Matching
from .lbm.model import build_lbm as build_lbm, load_lbm as load_lbm
from .lbm.infer import translate_image as translate_image
from .lbm.lbm_statistics import fit_lbm_lora as fit_lbm_lora, lbm_statistics as lbm_statistics
from .lbm.base import create_base as create_base
from .lbm.training.settings import load_train_settings as load_train_settings
from .lbm.training.train import train as train

# Latents, tensors and files of weights
from .pipeline.encode_decode import decode_latents as decode_latents, encode_latents as encode_latents
from .analysis.tensor_comparison import compare_tensors as compare_tensors
from .checkpoints.tensor_dumps import TensorDumps as TensorDumps
from .checkpoints.tensor_dumps import load_tensors as load_tensors, save_tensors as save_tensors
from .checkpoints.reader import open_checkpoint as open_checkpoint
from .checkpoints.safetensors import save_safetensors as save_safetensors

# The base of all errors that a user can act on
from .errors import SigmascopeError as SigmascopeError

# A workflow's stages by hand: one monitor for all, or a baseline before, an analysis after and a summary
from .monitor.workflow import ModelLoadingMonitor as ModelLoadingMonitor, WorkflowMonitor as WorkflowMonitor
from .stages.lora_application import (
    analyze_lora_application_results as analyze_lora_application_results,
    analyze_lora_patches as analyze_lora_patches,
    calculate_memory_change as calculate_memory_change,
    capture_lora_baseline as capture_lora_baseline,
    print_lora_analysis_summary as print_lora_analysis_summary,
    track_model_identity_changes as track_model_identity_changes,
    track_model_placement_changes as track_model_placement_changes,
    track_weight_modifications as track_weight_modifications,
)
from .stages.text_encoding import (
    TextEncodingThresholds as TextEncodingThresholds,
    analyze_text_encoding_results as analyze_text_encoding_results,
    capture_text_encoding_baseline as capture_text_encoding_baseline,
    print_text_encoding_analysis_summary as print_text_encoding_analysis_summary,
)
from .stages.latent_encoding import (
    _analyze_latent_output as _analyze_latent_output,
    _analyze_vae_encoding_performance as _analyze_vae_encoding_performance,
    _calculate_latent_generation_memory_change as _calculate_latent_generation_memory_change,
    analyze_latent_decoding_results as analyze_latent_decoding_results,
    analyze_latent_generation_results as analyze_latent_generation_results,
    capture_latent_decoding_baseline as capture_latent_decoding_baseline,
    capture_latent_generation_baseline as capture_latent_generation_baseline,
    print_encoding_event as print_encoding_event,
    print_latent_decoding_analysis_summary as print_latent_decoding_analysis_summary,
    print_latent_generation_analysis_summary as print_latent_generation_analysis_summary,
    print_latent_generation_start as print_latent_generation_start,
)
