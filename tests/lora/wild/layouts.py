"""LoRA files as trainers write them and as people report them: naming, prefix, endings and kind, with a known change.

Each layout says where its naming is written or reported. Weights are random; the change of each of diffusers' layers follows
from the names in `models`, which are independent of the families' records.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from .models import Row, layers, matching

RANK: Final = 2
FULL: Final = 9999999999.0
"""LyCORIS' alpha beside whole Kronecker factors."""
ENDS: Final = {
    "down": ("lora_down.weight", "lora_up.weight"),
    "A": ("lora_A.weight", "lora_B.weight"),
    "A.default": ("lora_A.default.weight", "lora_B.default.weight"),
    "A.default_0.default": ("lora_A.default_0.default.weight", "lora_B.default_0.default.weight"),
    "A.lora_1": ("lora_A.lora_1.weight", "lora_B.lora_1.weight"),
    "lora.down": ("lora.down.weight", "lora.up.weight"),
    "of processor": ("down.weight", "up.weight"),
    "bare down": ("lora_down", "lora_up"),
}
Naming = Literal["original", "diffusers", "joint"]


@dataclass(frozen=True)
class Layout:
    """How a kind of file names its tensors.

    Attributes:
        family: A key of `models.FAMILIES`.
        source: Who writes or reports the naming.
        start: What names begin with; if it ends in `_`, dots become underscores.
        naming: Whose paths follow.
        ends: A key of `ENDS`, or `lokr`.
        alpha: None without `.alpha` tensors.
        only: A pattern that the paths have.
        renames: Patterns and what stands for them in the paths.
        after: What follows each name.
        flat: Whether dots become underscores; by default if `start` ends in one.
        told: The family that has to be said, where names fit several and tiny models have no family's width.
    """

    family: str
    source: str
    start: str
    naming: Naming = "diffusers"
    ends: str = "A"
    alpha: float | None = None
    only: str = "blocks"
    renames: tuple[tuple[str, str], ...] = ()
    after: str = ""
    flat: bool | None = None
    told: str | None = None

    def rows(self) -> tuple[Row, ...]:
        """What the modules change."""
        return matching(self.only, self.family, self.naming)

    def name(self, path: str) -> str:
        """A module's name in the file."""
        for pattern, words in self.renames:
            path = re.sub(pattern, words, path)
        flat = self.start.endswith("_") if self.flat is None else self.flat
        return self.start + (path.replace(".", "_") if flat else path) + self.after

    def build(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors of such a file, and the change of each layer of the model."""
        generator, shapes = torch.Generator().manual_seed(1), layers(self.family)
        tensors: dict[str, Tensor] = {}
        truth: dict[str, Tensor] = {}

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator) * 0.1

        for row in self.rows():
            name, sizes = self.name(row.original), [shapes[part][0] for part in row.parts]
            out, (inner, *kernel) = sum(sizes), shapes[row.parts[0]][1:]
            if self.ends == "lokr":
                first, second = randn(2, 2), randn(out // 2, inner // 2)
                tensors |= {f"{name}.lokr_w1": first, f"{name}.lokr_w2": second}
                change = torch.kron(first, second)
            else:
                down, up = randn(RANK, inner, *kernel), randn(out, RANK, *(1 for _ in kernel))
                ends = ENDS[self.ends]
                tensors |= {f"{name}.{ends[0]}": down, f"{name}.{ends[1]}": up}
                change = (up.flatten(1) @ down.flatten(1)) * (
                    1.0 if self.alpha is None else self.alpha / RANK
                )
                change = change.view(out, inner, *kernel)
            if self.alpha is not None:
                tensors[f"{name}.alpha"] = torch.tensor(self.alpha)
            if row.swapped:
                change = change.roll(out // 2, 0)
            truth |= {
                part: piece.clone() for part, piece in zip(row.parts, torch.split(change, sizes), strict=True)
            }
        return tensors, truth


_HUNYUAN: Final = (
    (r"_attn\.", "_attn_"), (r"mlp\.0", "mlp.fc1"), (r"mlp\.2", "mlp.fc2"), (r"(mod|modulation)\.lin$", r"\1.linear"),
)  # fmt: skip
_ATTENTION: Final = r"blocks.*attn"
_STREAMS: Final = r"^(double|single)_blocks"
_XLABS: Final = (
    (r"^transformer_blocks\.(\d+)\.attn\.to_qkv$", r"double_blocks.\1.processor.qkv_lora1"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_added_qkv$", r"double_blocks.\1.processor.qkv_lora2"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0$", r"double_blocks.\1.processor.proj_lora1"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_add_out$", r"double_blocks.\1.processor.proj_lora2"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv$", r"single_blocks.\1.processor.qkv_lora"),
    (r"^single_transformer_blocks\.(\d+)\.proj_out$", r"single_blocks.\1.processor.proj_lora"),
)
_OF_XLABS: Final = r"attn\.to_(qkv|added_qkv|out\.0|add_out)$|^single.*proj_out$"
_PROCESSOR: Final = ((r"\.to_([qkv])$", r".processor.to_\1"), (r"\.to_out\.0$", ".processor.to_out"))

_COMFY, _DIFFUSERS, _KIJAI = "Comfy-Org/ComfyUI#", "huggingface/diffusers#", "kijai/ComfyUI-WanVideoWrapper#"
LAYOUTS: Final[dict[str, Layout]] = {
    # Stable Diffusion 1.5
    "sd15-kohya": Layout("sd15", "hako-mikan/sd-webui-lora-block-weight#97", "lora_unet_", "diffusers", "down", 1.0, "down_blocks.1.*attn"),
    "sd15-locon": Layout("sd15", "sd-scripts with conv_dim", "lora_unet_", "diffusers", "down", 1.0, "down_blocks.0|mid_block.resnets"),
    "sd15-diffusers": Layout("sd15", "diffusers' train_text_to_image_lora", "unet.", "diffusers", "A", None, "up_blocks.1.*attn"),
    "sd15-peft": Layout("sd15", "PEFT's get_peft_model", "base_model.model.", "diffusers", "A", None, "mid_block.*attn"),
    "sd15-processor": Layout("sd15", "LucianoCirino/efficiency-nodes-comfyui#104", "unet.", "diffusers", "lora.down", None, "mid_block.*attn[12].to_[qkv]"),
    "sd15-comfy": Layout("sd15", "ComfyUI's LoraSave", "diffusion_model.", "original", "down", 1.0, "middle_block|output_blocks.4"),
    # SDXL
    "sdxl-kohya": Layout("sdxl", f"{_COMFY}5655", "lora_unet_", "original", "down", 1.0, "input_blocks.[47].1"),
    "sdxl-onetrainer": Layout("sdxl", "OneTrainer's SDXL", "lora_unet_", "diffusers", "down", 1.0, "down_blocks.1|mid_block"),
    "sdxl-diffusers": Layout("sdxl", f"{_COMFY}1144", "unet.", "diffusers", "A", None, "up_blocks.0.*attn"),
    "sdxl-kohya-extract": Layout("sdxl", "sd-scripts, networks/extract_lora_from_models.py", "lora_unet_", "original", "down", 2.0, "input_blocks|middle_block"),
    "sdxl-lycoris": Layout("sdxl", "LyCORIS' full LoKr", "lora_unet_", "original", "lokr", FULL, "input_blocks.4.1.*attn"),
    "sdxl-unet-original": Layout("sdxl", "Nerogar/OneTrainer#885", "unet.", "original", "down", 1.0, "input_blocks.[47].1"),
    # Stable Diffusion 3.5
    "sd3-kohya": Layout("sd3", "sd-scripts' lora_sd3", "lora_unet_", "original", "down", 1.0),
    "sd3-diffusers": Layout("sd3", "diffusers' train_dreambooth_lora_sd3", "transformer.", "diffusers", "A", None, _ATTENTION),
    "sd3-onetrainer": Layout("sd3", f"{_COMFY}3701", "lora_transformer_", "diffusers", "down", 1.0),
    "sd3-comfy": Layout("sd3", "ComfyUI's LoraSave", "diffusion_model.", "original", "down", 1.0),
    "sd3-lycoris": Layout("sd3", "SimpleTuner's LyCORIS", "lycoris_", "diffusers", "lokr", FULL),
    # FLUX.1
    "flux-kohya": Layout("flux", "sd-scripts' lora_flux", "lora_unet_", "original", "down", 1.0, _STREAMS),
    "flux-aitoolkit": Layout("flux", "ostris/ai-toolkit#67", "transformer.", "diffusers"),
    "flux-simpletuner": Layout("flux", "bghira/SimpleTuner#779", "transformer.base_model.model.", "diffusers", "lora.down", None, _ATTENTION),
    "flux-onetrainer": Layout("flux", "OneTrainer's FLUX", "lora_transformer_", "diffusers", "down", 1.0),
    "flux-bfl": Layout("flux", "BFL's control LoRAs", "", "original", "A", None, _STREAMS),
    "flux-fal": Layout("flux", f"{_DIFFUSERS}9295", "diffusion_model.", "original", "A", None, _STREAMS),
    "flux-trailing": Layout("flux", f"{_COMFY}4347", "lora_unet_", "diffusers", "down", 1.0, "blocks", (), "_"),
    "flux-comfy": Layout("flux", "ComfyUI's LoraSave", "diffusion_model.", "original", "down", 1.0),
    "flux-xlabs": Layout(
        "flux", f"{_DIFFUSERS}9914", "", "original", "of processor", None, r"double_blocks.*(qkv|proj)$",
        ((r"img_attn\.(qkv|proj)$", r"processor.\1_lora1"), (r"txt_attn\.(qkv|proj)$", r"processor.\1_lora2")),
    ),
    "flux-xlabs-single": Layout("flux", f"{_DIFFUSERS}9959", "", "joint", "of processor", None, _OF_XLABS, _XLABS),
    "flux-xlabs-start": Layout(
        "flux", "diffusers' reader of XLabs' names takes this start too", "diffusion_model.", "joint", "of processor", None, _OF_XLABS, _XLABS
    ),
    "flux-bare": Layout("flux", "nunchaku's converted files", "transformer.", "diffusers", "bare down", None, _ATTENTION),
    "flux-lokr": Layout("flux", f"{_COMFY}4476", "lycoris_", "diffusers", "lokr", FULL),
    "flux-lokr-fused": Layout("flux", f"{_COMFY}4476", "diffusion_model.", "original", "lokr", FULL),
    "flux-fsdp": Layout(
        "flux", "torch's FSDP around each block", "transformer.", "diffusers",
        renames=((r"blocks\.(\d+)\.", r"blocks.\1._fsdp_wrapped_module."),),
    ),
    "flux-converted": Layout("flux", "musubi-tuner's convert_lora", "diffusion_model.", "original", "A", None, _STREAMS, ((r"_attn\.", "_attn_"),)),
    # FLUX.2
    "flux2-bfl": Layout("flux2", f"{_DIFFUSERS}13484", "diffusion_model.", "original"),
    "flux2-fal": Layout("flux2", f"{_DIFFUSERS}13484", "base_model.model.", "original"),
    "flux2-kohya": Layout("flux2", "Nerogar/OneTrainer#1563", "lora_unet_", "original", "down", 1.0),
    "flux2-diffusers": Layout("flux2", "xmarre/ComfyUI-DoRA-Dynamic-LoRA-Loader#24", "transformer.", "diffusers"),
    "flux2-lycoris": Layout("flux2", "bghira/SimpleTuner#2439", "lycoris_", "diffusers", "lokr", FULL),
    "flux2-converted": Layout("flux2", "musubi-tuner's convert_lora", "diffusion_model.", "original", "A", None, _STREAMS, ((r"_attn\.", "_attn_"),)),
    # Qwen-Image
    "flux3-diffusers": Layout("flux3", "diffusers' save_lora_weights", "transformer.", "diffusers"),
    "flux3-original": Layout("flux3", "diffusers' reader of original names", "diffusion_model.", "original"),
    "animate-original": Layout("animate", f"{_KIJAI}1421, with its face adapter", "diffusion_model.", "original", only="blocks"),
    "animate-musubi": Layout("animate", "musubi-tuner's names of all layers", "lora_unet_", "original", "down", 1.0, "face_adapter|blocks.0"),
    "animate-diffusers": Layout("animate", "diffusers' save_lora_weights", "transformer.", "diffusers", only="face_adapter|blocks.0"),
    "qwen-diffsynth": Layout("qwen", "modelscope/DiffSynth-Studio#886", "", "diffusers", "A.default"),
    "qwen-lightning": Layout("qwen", "ModelTC/Qwen-Image-Lightning#52", "", "diffusers", "down", 1.0),
    "qwen-musubi": Layout("qwen", "musubi-tuner's Qwen-Image", "lora_unet_", "diffusers", "down", 1.0),
    "qwen-aitoolkit": Layout("qwen", "ai-toolkit's Qwen-Image", "diffusion_model.", "diffusers"),
    "qwen-two-adapters": Layout("qwen", "PEFT's add_adapter under an adapter's name", "", "diffusers", "A.default_0.default"),
    "qwen-named-adapter": Layout("qwen", "PEFT's add_adapter under an adapter's name", "transformer.", "diffusers", "A.lora_1"),
    "qwen-dit": Layout("qwen", "DiffSynth's pipeline", "pipe.dit.", "diffusers", "A.default"),
    "qwen-ddp": Layout("qwen", "torch's DistributedDataParallel", "module.", "diffusers"),
    # WAN
    "wan-musubi": Layout("wan", "musubi-tuner's WAN", "lora_unet_", "original", "down", 1.0),
    "wan-pipe": Layout("wan", "tdrussell/diffusion-pipe#114", "diffusion_model.", "original"),
    "wan-diffusers": Layout("wan", f"{_DIFFUSERS}11107", "transformer.", "diffusers"),
    "wan-half-flat": Layout(
        "wan", f"{_KIJAI}869", "lora_unet_", "original", "down", 1.0, r"^blocks.*attn", ((r"^blocks\.", "blocks_"),), flat=False
    ),
    "wan-diffsynth": Layout("wan", "nv-tlabs/ChronoEdit#22", "", "original", "A.default"),
    "wan-fun": Layout("wan", "aigc-apps/VideoX-Fun", "lora_unet__", "original", "down", 1.0),
    "wan-lycoris": Layout("wan", f"{_COMFY}8285", "lycoris_", "diffusers", "lokr", FULL),
    "wan-compiled": Layout("wan", "torch.compile's wrapper", "_orig_mod.", "original"),
    "wan-checkpointed": Layout(
        "wan", "torch's checkpoint_wrapper around each block", "", "original", renames=((r"^blocks\.(\d+)\.", r"blocks.\1._checkpoint_wrapped_module."),)
    ),
    "wan-flat-compiled": Layout(
        "wan", "torch.compile around each block", "lora_unet_", "original", "down", 1.0, renames=((r"^blocks\.(\d+)\.", r"blocks.\1._orig_mod."),)
    ),
    "wan-animate": Layout("wani2v", f"{_KIJAI}1421", "base_model.model.", "original"),
    "wan-i2v-lightx2v": Layout("wani2v", f"{_KIJAI}909", "diffusion_model.", "original", "down", 1.0),
    "wan-i2v-musubi": Layout("wani2v", "musubi-tuner's I2V", "lora_unet_", "original", "down", 1.0),
    # Z-Image
    "zimage-aitoolkit": Layout("zimage", "shootthesound/comfyUI-Realtime-Lora#16", "diffusion_model.", "diffusers", "A", None, "^layers"),
    "zimage-fused": Layout("zimage", f"{_COMFY}11158", "diffusion_model.", "original", "A", None, "layers|refiner"),
    "zimage-musubi": Layout("zimage", "kohya-ss/musubi-tuner#770", "lora_unet_", "diffusers", "down", 1.0, "^layers"),
    "zimage-kohya": Layout("zimage", "musubi-tuner's conversion", "lora_unet_", "original", "down", 1.0, "^layers"),
    "zimage-converted": Layout("zimage", "kohya-ss/musubi-tuner#770", "diffusion_model.", "diffusers", "A", None, "layers|refiner", ((r"_", "."),)),
    "zimage-onetrainer": Layout("zimage", "Nerogar/OneTrainer#1563", "transformer.", "diffusers", "down", 1.0, "^layers"),
    "zimage-lokr": Layout("zimage", f"{_COMFY}10973", "diffusion_model.", "diffusers", "lokr", FULL, "^layers"),
    "zimage-net": Layout("zimage", "Diffusion-pipe's wrapper", "net.", "diffusers", "A", None, "^layers"),
    # Lumina 2
    "lumina2-kohya": Layout("lumina2", "sd-scripts' lora_lumina", "lora_unet_", "original", "down", 1.0, "layers|refiner"),
    "lumina2-diffusers": Layout("lumina2", f"{_COMFY}7502", "transformer.", "diffusers", "A", None, "layers|refiner"),
    # HunyuanVideo
    "hunyuan-musubi": Layout("hunyuan", "kohya-ss/musubi-tuner#26", "lora_unet_", "original", "down", 1.0, _STREAMS, _HUNYUAN),
    "hunyuan-comfy": Layout("hunyuan", "kijai/ComfyUI-HunyuanVideoWrapper#468", "diffusion_model.", "original", "down", 1.0, _STREAMS),
    "hunyuan-i2v": Layout(
        "hunyuan", "Tencent-Hunyuan/HunyuanVideo-I2V#61", "Hunyuan_video_I2V_lora_", "original", "down", 1.0, _STREAMS, _HUNYUAN
    ),
    "hunyuan-onetrainer": Layout("hunyuan", f"{_COMFY}6531", "lora_transformer_", "diffusers", "down", 1.0),
    "hunyuan-diffusers": Layout("hunyuan", f"{_DIFFUSERS}10562", "transformer.", "diffusers"),
    # Chroma
    "chroma-aitoolkit": Layout("chroma", "ai-toolkit's Chroma", "diffusion_model.", "original"),
    "chroma-kohya": Layout("chroma", "sd-scripts' Chroma", "lora_unet_", "original", "down", 1.0, _STREAMS),
    "chroma-onetrainer": Layout("chroma", "OneTrainer's Chroma", "lora_transformer_", "diffusers", "down", 1.0),
    # others
    "ltx-finetrainers": Layout("ltx", "finetrainers", "transformer.", "diffusers", told="ltx_video"),
    "ltx-comfy": Layout("ltx", f"{_COMFY}14349", "diffusion_model.", "original", told="ltx_video"),
    "ltx-diffsynth": Layout("ltx", f"{_COMFY}14349", "", "original", "A.default", None, _ATTENTION, told="ltx_video"),
    "hidream-onetrainer": Layout("hidream", "Nerogar/OneTrainer#842", "transformer.", "diffusers", "down", 1.0, "stream"),
    "hidream-aitoolkit": Layout("hidream", f"{_COMFY}7792", "diffusion_model.", "diffusers", "A", None, "stream"),
    "pixart-peft": Layout("pixart", "PixArt-alpha's train_pixart_lora_hf", "base_model.model.", "diffusers", "A", None, "transformer_blocks", told="pixart"),
    "sana-diffusers": Layout("sana", "diffusers' train_dreambooth_lora_sana", "transformer.", "diffusers", "A", None, "attn", told="sana"),
    "cogvideox-diffusers": Layout("cogvideox", "diffusers' train_cogvideox_lora", "transformer.", "diffusers", told="cogvideox"),
    "cogvideox-fun": Layout("cogvideox", "kijai/ComfyUI-CogVideoXWrapper#86", "lora_unet__", "diffusers", "down", 1.0, told="cogvideox"),
    "mochi-diffusers": Layout("mochi", "finetrainers' Mochi", "transformer.", "diffusers", "A", None, "attn"),
    "mochi-comfy": Layout("mochi", "ComfyUI's LoraSave", "diffusion_model.", "original", "down", 1.0),
    "auraflow-simpletuner": Layout("auraflow", f"{_COMFY}4060", "transformer.", "diffusers"),
    "auraflow-comfy": Layout("auraflow", "ComfyUI's LoraSave", "diffusion_model.", "original", "down", 1.0, "layers"),
    "cosmos-kohya": Layout("cosmos", f"{_COMFY}13747", "lora_unet_", "original", "down", 1.0),
    "cosmos-pipe": Layout("cosmos", "diffusion-pipe's Cosmos-Predict2", "diffusion_model.", "original"),
    "ltx2-trainer": Layout("ltx2", "Lightricks' ltx-trainer", "diffusion_model.", "original", told="ltx2"),
    "ltx2-simpletuner": Layout("ltx2", "SimpleTuner's LTX-2", "transformer.", "diffusers", "A", 2.0, told="ltx2"),
    "ltx2-musubi": Layout("ltx2", "musubi-tuner's LTX-2", "lora_unet_", "original", "down", 1.0, told="ltx2"),
    "krea2-aitoolkit": Layout("krea2", f"{_DIFFUSERS}14074", "base_model.model.", "original"),
    "krea2-trainer": Layout("krea2", f"{_DIFFUSERS}14074", "diffusion_model.", "original"),
    "krea2-lycoris": Layout("krea2", f"{_COMFY}16234", "lycoris_", "diffusers", "lokr", FULL, "blocks.*attn"),
    "krea2-joint": Layout("krea2", "bghira/SimpleTuner#3222", "lycoris_", "joint", "lokr", FULL, "blocks.*attn"),
    "ideogram4-aitoolkit": Layout("ideogram4", "diffusers' reader of ai-toolkit's files", "diffusion_model.", "original", only="^layers"),
    "ideogram4-kohya": Layout("ideogram4", "diffusers' reader of kohya's endings", "diffusion_model.", "original", "down", 1.0, "^layers"),
    "krea2-without-number": Layout(
        "krea2", f"{_COMFY}16234: ComfyUI's table of Krea 2 has both", "transformer.", "diffusers", renames=((r"to_out\.0$", "to_out"),)
    ),
    "sdxl-joint": Layout("sdxl", f"{_DIFFUSERS}11903", "unet.", "joint", "A", None, "down_blocks.1.*attn"),
    "zimage-invoke": Layout("zimage", "invoke-ai/InvokeAI#9007", "lora_unet__", "diffusers", "down", 1.0, "^layers"),
    "zimage-lycoris": Layout("zimage", "AbstractEyes/comfyui-lycoris#6", "lycoris_", "diffusers", "lokr", FULL, "layers|refiner"),
    "chroma-guidance": Layout("chroma", "Nerogar/OneTrainer#1079", "transformer.", "diffusers", "down", 1.0, "distilled_guidance|blocks.0"),
    "pixart-old-peft": Layout(
        "pixart", "PixArt's reference script, as ComfyUI reads it", "unet.base_model.model.", "diffusers", "A", None, "transformer_blocks",
        told="pixart",
    ),
    "hunyuan-pipe": Layout("hunyuan", "tdrussell/diffusion-pipe, as ComfyUI reads it", "transformer.", "original", "A", None, _STREAMS, _HUNYUAN),
    "mochi-genmo": Layout("mochi", "Genmo's own trainer, as ComfyUI reads it", "", "original", "A", None, "blocks.*attn.(?:qkv|proj)"),
    "cosmos-net": Layout("cosmos", "NVIDIA's own checkpoints' wrapper", "net.", "original"),
    "flux-joint": Layout("flux", "bghira/SimpleTuner#1569", "transformer.", "joint", only=_ATTENTION),
    "sd3-joint": Layout("sd3", f"{_DIFFUSERS}11903", "transformer.", "joint", only=_ATTENTION),
    "wan-joint": Layout("wan", "bghira/SimpleTuner#2777", "lycoris_", "joint", "lokr", FULL, "blocks.*attn"),
    "ltx2-joint": Layout("ltx2", "bghira/SimpleTuner#2777", "transformer.", "joint", only="blocks.*attn1", told="ltx2"),
    "kandinsky5-simpletuner": Layout("kandinsky5", "bghira/SimpleTuner#2013", "transformer.", "diffusers", only="transformer_blocks"),
    "kandinsky5-musubi": Layout("kandinsky5", "kohya-ss/musubi-tuner#774", "lora_unet_", "diffusers", "down", 1.0, "transformer_blocks"),
    "kandinsky5-comfy": Layout("kandinsky5", "ComfyUI's LoraSave", "diffusion_model.", "original", "down", 1.0, "transformer_blocks"),
}  # fmt: skip


NO_ORIGINAL: Final = {"cogvideox"}
"""Families whose original files are another library's."""
TITLES: Final = {
    "sd15": "Stable Diffusion 1.5", "sdxl": "SDXL", "sd3": "Stable Diffusion 3.5", "flux": "FLUX.1", "flux2": "FLUX.2",
    "qwen": "Qwen-Image", "wan": "WAN 2.1, 2.2", "wani2v": "WAN I2V", "zimage": "Z-Image", "lumina2": "Lumina 2",
    "hunyuan": "HunyuanVideo", "chroma": "Chroma", "ltx": "LTX-Video", "hidream": "HiDream", "pixart": "PixArt", "sana": "Sana",
    "cogvideox": "CogVideoX", "mochi": "Mochi", "auraflow": "AuraFlow", "cosmos": "Cosmos Predict 2", "ltx2": "LTX-2",
    "kandinsky5": "Kandinsky 5", "krea2": "Krea 2", "flux3": "FLUX.3", "animate": "WAN Animate", "ideogram4": "Ideogram 4",
}  # fmt: skip


def merged_into_single_files(layout: Layout) -> bool:
    """Whether the family has such files."""
    return layout.family not in NO_ORIGINAL


def goes_back(layout: Layout) -> bool:
    """Whether it is converted to kohya's and ComfyUI's format and back: plain factors are."""
    return layout.ends != "lokr"


def proven() -> Iterator[tuple[str, list[str], list[str]]]:
    """Of each family: its title, the beginnings of names by whose names follow, and how many layouts each test holds."""
    for family, title in TITLES.items():
        own = [layout for layout in LAYOUTS.values() if layout.family == family]
        starts = [
            " ".join(dict.fromkeys(f"`{one.start or '(nothing)'}`" for one in own if one.naming in naming))
            or "–"
            for naming in (("diffusers", "joint"), ("original",))
        ]
        total = len(own)
        single, back = sum(map(merged_into_single_files, own)), sum(map(goes_back, own))
        yield (
            title,
            starts,
            [f"{count} of {total}" if count else "–" for count in (total, single, total, total, back)],
        )
