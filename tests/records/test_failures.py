"""What fails in PyTorch and diffusers is told in our own words, with their numbers and none of their text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel
from tests.families import make_pipeline
from tests.monitor.fragments import FRAGMENTS, QuotingError, host_calling
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextModel

from sigmascope.files import short_paths
from sigmascope.monitor import Recorder
from sigmascope.probes.reading import keeping_words
from sigmascope.records.failures import cause_in_words, raised_in, trace_without_words
from sigmascope.records.prompts import without_words
from sigmascope.records.run import ExceptionDetails, Run, Stage
from sigmascope.records.serialization import run_to_json

HALF, DOUBLE = torch.float16, torch.float64
SECRET = "Kestrel Vorpal gliding marshes"


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def message_of(fail: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fail()
    return str(caught.value)


IN_TORCH: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (lambda: nn.Linear(4, 4)(zeros(2, 4, dtype=HALF)), ("float16", "float32")),
    (lambda: zeros(2, 4) @ zeros(4, 2, dtype=HALF), ("float32", "float16")),
    (lambda: torch.bmm(zeros(1, 2, 4), zeros(1, 4, 2, dtype=HALF)), ("float32", "float16")),
    (lambda: nn.Linear(4, 6)(zeros(2, 5)), ("2×5", "4×6")),
    (lambda: nn.Conv2d(4, 4, 3)(zeros(2, 4, 8, 8, dtype=HALF)), ("float16", "float32")),
    (lambda: nn.Conv2d(4, 6, 3)(zeros(2, 9, 8, 8)), ("2×9×8×8", "6×4×3×3", "9 channels")),
    (lambda: nn.Conv2d(4, 4, 3)(zeros(2, 4, 1, 1)), ("1×1", "3×3")),
    (lambda: zeros(2, 16, 3) + zeros(2, 48, 3), ("16", "48", "dimension 1")),
    (lambda: torch.cat([zeros(2, 4, 64), zeros(2, 4, 63)], 1), ("64", "63", "dimension 1")),
    (lambda: zeros(10).view(3, 4), ("10 elements", "3×4")),
    (lambda: zeros(2, 3).expand(3, 3), ("3", "2", "dimension 0")),
    (lambda: nn.Embedding(4, 3)(torch.tensor([9])), ("outside of the embedding",)),
    (lambda: zeros(10)[11], ("index 11", "10")),
    (lambda: nn.Linear(4, 4, device="meta").to("cpu"), ("meta device",)),
    (lambda: nn.Linear(4, 4)(zeros(2, 4, device="meta")), ("cpu", "meta")),
    (
        lambda: functional.scaled_dot_product_attention(
            zeros(1, 1, 2, 4), zeros(1, 1, 2, 4, dtype=HALF), zeros(1, 1, 2, 4)
        ),
        ("queries of float32", "keys of float16", "values of float32"),
    ),
    (lambda: functional.layer_norm(zeros(2, 77, 768), [320]), ("320", "2×77×768")),
    (lambda: nn.GroupNorm(4, 8)(zeros(2, 4, 8, 8)), ("8", "2×4×8×8")),
    (lambda: zeros(2, 4, dtype=torch.int8).softmax(0), ("int8",)),
    (lambda: nn.Linear(4, 4).load_state_dict({"weight": zeros(4, 5), "bias": zeros(4)}), ("4×5", "4×4")),
    (lambda: nn.Embedding(4, 3)(zeros(1)), ("float32", "whole numbers")),
    (lambda: torch.empty(2**44), ("out of memory", "65536 GB asked for")),
]


@pytest.mark.parametrize(("fail", "parts"), IN_TORCH)
def test_pytorch_s_own_message(fail: Callable[[], object], parts: tuple[str, ...]) -> None:
    told = cause_in_words(message_of(fail))
    assert told is not None
    assert [part for part in parts if part not in told] == []


@pytest.mark.parametrize(
    ("message", "told"),
    [  # of other versions and devices than are here, as people reported them
        # https://github.com/Acly/krita-ai-diffusion/issues/1115
        ("expected mat1 and mat2 to have the same dtype, but got: float != struct c10::Half",
         "a matrix of float32 is multiplied with one of float16"),
        # https://github.com/ToTheBeginning/PuLID/issues/162
        ("expected mat1 and mat2 to have the same dtype, but got: float!= c10::Half",
         "a matrix of float32 is multiplied with one of float16"),
        # https://github.com/huggingface/diffusers/issues/5897
        ("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
         "(when checking argument for argument mat2 in method wrapper_CUDA_mm)", "tensors are on cuda:0 and cpu"),
        # https://github.com/DecartAI/Lucy-Edit-ComfyUI/issues/12
        ("The size of tensor a (16) must match the size of tensor b (48) at non-singleton dimension 1",
         "sizes differ: 16 and 48 in dimension 1"),
        ("Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same",
         "the input is float32, the weights are float16"),
        ("`num_inference_steps`: 1000000000000000000000000000000 cannot be larger than `self.config.train_timesteps`: 1000",
         "1000000000000000000000000000000 steps are more than the 1000 that the model was trained with"),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
         "out of memory, or no kernel for this input"),
        ("Allocation on device ", "out of memory"),  # CUDA's asynchronous allocator, as ComfyUI shows it
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which 512.00 MiB "
         "is free.", "out of memory, 2.5 GB asked for, 512 MB free"),
    ],
)  # fmt: skip
def test_messages_that_were_reported(message: str, told: str) -> None:
    assert cause_in_words(message) == told
    assert cause_in_words(told) == told  # of a record that was private from the beginning


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        ({"height": 30, "width": 44}, ("30", "44", "8")),
        ({"prompt_embeds": zeros(1, 77, 16)}, ("both given",)),
        (
            {"prompt": None, "negative_prompt": None, "prompt_embeds": zeros(1, 77, 16), "negative_prompt_embeds": zeros(1, 9, 16)},
            ("1×77×16", "1×9×16"),
        ),
        ({"prompt": [SECRET] * 3, "negative_prompt": [SECRET] * 2}, ("2 negative prompts", "3 prompts")),
        ({"generator": [torch.Generator()] * 2}, ("2 generators", "batch of 1")),
        ({"latents": zeros(1, 3, 4, 4)}, ()),
        ({"timesteps": [9, 5], "sigmas": [1.0, 0.5]}, ("timesteps and sigmas were both given",)),
        ({"prompt": 7}, ("neither text nor a list",)),
    ],
)  # fmt: skip
def test_diffusers_own_message_quotes_no_prompt(call: dict[str, Any], parts: tuple[str, ...]) -> None:
    pipeline = make_pipeline("sd15")
    message = message_of(lambda: pipeline(**{"prompt": SECRET, "num_inference_steps": 1, **call}))
    told = cause_in_words(message)
    assert told is not None, message
    assert [part for part in parts if part not in told] == []
    assert not {*SECRET.split()} & {*told.split()}


def returns(value: object) -> dict[str, Any]:
    return {"callback_on_step_end": lambda pipeline, step, timestep, tensors: value}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (returns(None), "there is None in place of a dict: a callback_on_step_end must return one"),
        (returns(5), "there is something else in place of a dict: a callback_on_step_end must return one"),
        ({"callback_on_step_end": lambda pipeline: {}}, "a function that takes 1 arguments got 4"),
        ({"callback_on_step_end_tensor_inputs": [SECRET]},
         "callback_on_step_end_tensor_inputs names a tensor that this pipeline does not hand out"),
    ],
    ids=["None", "a number", "one argument", "tensors"],
)  # fmt: skip
def test_a_callback_that_is_not_as_diffusers_wants_it(call: dict[str, Any], told: str) -> None:
    pipeline = make_pipeline("sd15")
    message = message_of(lambda: pipeline("a", num_inference_steps=1, height=32, width=32, **call))
    assert (cause_in_words(message), cause_in_words(told)) == (told, told)


NOWHERE = "there is no such file or folder, and it is not a name on the hub"
NOT_HERE = "the model is no folder here and not in the hub's local cache, and the hub was not reached"


@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument")  # diffusers passes it
@pytest.mark.parametrize(
    ("name", "missing", "told"),
    [
        ("/kestrel/vorpal", None, (NOWHERE,) * 4),
        ("kestrel/vorpal", None, (NOT_HERE, "the model has no config.json", NOT_HERE)),
        (".", "model_index.json", ("the folder has no model_index.json, so it is not a pipeline",)),
        (".", "unet/config.json", ("the model has no config.json",)),
        (".", "unet/diffusion_pytorch_model.safetensors", ("the model has no file of weights",)),
        (".", "text_encoder/model.safetensors", ("the model has no file of weights",)),
    ],
)
def test_a_model_that_is_not_there(
    name: str,
    missing: str | None,
    told: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """diffusers and transformers say it in ten ways, with the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    if missing is not None:
        make_pipeline("sd15").save_pretrained(tmp_path)
        (tmp_path / missing).unlink()
    loaders = (
        DiffusionPipeline.from_pretrained,
        UNet2DConditionModel.from_pretrained,
        CLIPTextModel.from_pretrained,
        lambda name, **_: StableDiffusionPipeline.from_single_file(f"{name}.safetensors"),
    )
    for load, expected in zip(loaders, told, strict=False):
        message = message_of(lambda load=load: load(name, local_files_only=True))  # type: ignore[misc]
        assert cause_in_words(message) == expected, message
        assert cause_in_words(expected) == expected


@pytest.mark.parametrize(
    ("message", "told"),
    [  # of other versions, and of a hub that answers
        # https://github.com/TencentARC/PhotoMaker/issues/118
        ("PhotoMakerStableDiffusionXLPipeline.__call__() got an unexpected keyword argument 'callback_on_step_end'",
         "a function got an argument that it does not take"),
        # https://github.com/Yujun-Shi/DragDiffusion/issues/66
        ("Error no file named pytorch_model.bin, tf_model.h5, model.ckpt.index or flax_model.msgpack found in directory "
         "local_pretrained_models/stable-diffusion-v1-5.", "the model has no file of weights"),
        # https://github.com/JyChen9811/FaithDiff/issues/17
        ("Error no file named diffusion_pytorch_model.fp16.bin found in directory DiffusionSR_weights/FaithDiff/"
         "sdxl-vae-fp16-fix", "the model has no file of weights"),
        # https://github.com/huggingface/diffusers/issues/9314
        ("runwayml/stable-diffusion-v1-5 does not appear to have a file named config.json.", "the model has no config.json"),
        ("kestrel/vorpal is not a local folder and is not a valid model identifier listed on "
         "'https://huggingface.co/models'", "there is no such folder, and no such public model on the hub"),
        ("Cannot access gated repo for url https://huggingface.co/kestrel", "the model on the hub needs permission"),
        ("You are trying to load the model files of the `variant=vorpal`, but no such modeling files are available.",
         "the model has no files of this variant"),
    ],
)  # fmt: skip
def test_what_else_is_missing(message: str, told: str) -> None:
    assert cause_in_words(message) == cause_in_words(told) == told


def test_an_adapter_that_is_not_there() -> None:
    message = message_of(lambda: make_pipeline("sd15").set_adapters([SECRET]))
    assert cause_in_words(message) == "the pipeline has no adapter of this name"


@pytest.mark.parametrize(
    "message",
    [SECRET, f"Expected {SECRET}", f"not implemented for '{SECRET}'", f"shape '[{SECRET}]' is invalid"],
)
def test_no_word_of_a_message_passes(message: str) -> None:
    assert cause_in_words(message) is None
    assert cause_in_words(f"{message}: out of memory") == "out of memory"
    assert (
        cause_in_words(f"expected scalar type {SECRET.split()[0]} but found Half")
        == "expected another dtype, found float16"
    )


TRACE = f'''Traceback (most recent call last):
  File "generate.py", line 3, in encode
    pipe("{SECRET}")
         ^^^^^^^
  File "torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float
  File "{SECRET}", line 1, in x

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "generate.py", line 9, in <module>
    draw("{SECRET}")
ValueError: {SECRET}
{SECRET}: of two lines
'''


def test_the_whole_chain_of_places_stays_and_no_words() -> None:
    first, last = raised = raised_in(
        ExceptionDetails("ValueError", f"{SECRET}\n{SECRET}: of two lines", TRACE)
    )
    assert first.frames == ("generate.py:3 in encode", "torch/nn/modules/linear.py:134 in forward")
    assert first.cause == "a matrix of float64 is multiplied with one of float32"
    assert (last.kind, last.cause, last.frames) == ("ValueError", None, ("generate.py:9 in <module>",))
    kept = trace_without_words(raised)
    assert not [word for word in SECRET.split() if word in kept]
    assert raised_in(ExceptionDetails("ValueError", "", kept)) == raised


def test_a_private_report_of_a_run_says_why_and_where() -> None:
    message = TRACE.splitlines()[6].partition(": ")[2]
    details = ExceptionDetails("RuntimeError", message, TRACE.partition("\n\n")[0])
    stage = Stage("denoising", 0.0, 1.0, False, f"RuntimeError: {message}", exception_details=details)
    (private,) = without_words(Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0, stages=(stage,))).stages
    assert private.error == (
        "RuntimeError: a matrix of float64 is multiplied with one of float32 (torch/nn/modules/linear.py:134 in forward)"
    )
    assert private.exception_details is not None
    assert "generate.py" in private.exception_details.traceback
    assert SECRET not in private.exception_details.traceback


@pytest.mark.parametrize("fragment", FRAGMENTS.values(), ids=FRAGMENTS)
def test_a_host_that_quotes_its_prompt_everywhere(fragment: str) -> None:
    """Message, notes, causes, keys and lines of source."""
    recorder = Recorder(sample_hz=None)
    with pytest.raises(QuotingError), recorder.stage("node"):
        host_calling(fragment)()
    assert fragment in run_to_json(recorder.run())
    private = run_to_json(without_words(recorder.run()))
    assert fragment not in private
    assert "in encode" in private
    assert "in raise_quoting" in private


def test_an_endless_recursion_leaves_a_record_of_some_size() -> None:
    recorder = Recorder(sample_hz=None)

    def between(depth: int) -> None:
        deeper(depth - 1)

    def deeper(depth: int) -> None:
        if depth:
            between(depth)
        with recorder.stage("node"):
            raise ValueError("at the bottom")

    with pytest.raises(ValueError, match="bottom"):
        deeper(200)
    details = recorder.run().stage("node").exception_details
    assert details is not None
    (raised,) = raised_in(details)
    assert 2 < len(raised.frames) <= 62
    assert raised.frames[-1].endswith("in deeper")


QUOTED = 'worker failed:\n\nTraceback (most recent call last):\n  File "/srv/zebracorn/w.py", line 3, in load\nKeyError: 1'


def raise_group() -> None:
    try:
        zeros(2, 3) @ zeros(4, 5)
    except RuntimeError as error:
        raise ExceptionGroup("of zebracorn", [error, ValueError("zebracorn")]) from None


def raise_quoting_a_trace() -> None:
    error = ValueError(QUOTED)
    error.add_note(QUOTED)
    raise error


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("fail", "said"), [(raise_group, "2×3 cannot be multiplied with one of 4×5"), (raise_quoting_a_trace, "ValueError")]
)  # fmt: skip
def test_groups_tell_their_members_and_quoted_traces_nothing(
    fail: Callable[[], None], said: str, kept: bool
) -> None:
    recorder = Recorder(sample_hz=None)
    with pytest.raises(Exception, match="zebracorn"), keeping_words(kept), recorder.stage("node"):
        fail()
    (stage,) = without_words(recorder.run()).stages
    assert stage.error is not None
    assert said in stage.error
    assert stage.exception_details is not None
    assert "zebracorn" not in str(stage)
    raised = raised_in(stage.exception_details)
    assert any(frame.endswith(f"in {fail.__name__}") for one in raised for frame in one.frames)
    assert [one.depth for one in raised] == ([0, 1, 1] if fail is raise_group else [0])


def test_an_old_record_that_quotes_a_trace_gives_no_frames_of_it() -> None:
    trace = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\nValueError: {QUOTED}\n'
    (raised,) = raised_in(ExceptionDetails("ValueError", QUOTED, trace))
    assert raised.frames == ("a.py:3 in f",)
    assert raised_in(ExceptionDetails("ValueError", "something else", trace)) == []


def test_the_way_to_an_error_in_a_notebook_begins_in_its_cell() -> None:
    trace = """Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/ipykernel/kernelbase.py", line 508, in dispatch_shell
    await result
  File "/opt/env/lib/python3.11/site-packages/IPython/core/interactiveshell.py", line 3577, in run_code
    exec(code_obj, self.user_global_ns, self.user_ns)
  File "/tmp/ipykernel_4711/361413445.py", line 2, in <module>
    show(pipe("a fox"))
  File "/opt/env/lib/python3.11/site-packages/IPython/core/display.py", line 9, in show
    raise ValueError("no picture")
ValueError: no picture
"""
    (raised,) = raised_in(ExceptionDetails("ValueError", "no picture", trace))
    assert raised.frames == ("<cell>:2 in <module>", "IPython/core/display.py:9 in show")
    (kept,) = raised_in(
        ExceptionDetails("ValueError", "no picture", short_paths(trace))
    )  # as a record holds it
    assert kept.frames == raised.frames
    (script,) = raised_in(
        ExceptionDetails("ValueError", "no picture", trace.replace("ipykernel_4711/361413445", "show"))
    )
    assert len(script.frames) == 4
