"""Other libraries' models, each tiny and with random weights, in train mode with their dropout and stochastic depth.

`MODELS` names them: a function that builds the model, and one that makes the arguments of a call. The libraries are
imported as they are needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from architectures import Made, tiny
from papers import PAPERS
from torch import Tensor, nn
from written import WRITTEN

MODELS: dict[str, Callable[[], Made]] = {}


def _add(name: str, build: Callable[[], nn.Module], *args: Callable[[], Any], **kwargs: Callable[[], Any]) -> None:
    assert name not in MODELS, name
    MODELS[name] = lambda: (build(), tuple(a() for a in args), {key: a() for key, a in kwargs.items()})


def x(*shape: int) -> Callable[[], Tensor]:
    """Some numbers."""
    return lambda: torch.randn(*shape)


def ids(most: int, *shape: int) -> Callable[[], Tensor]:
    """Some indices."""
    return lambda: torch.randint(0, most, shape)


def value(held: Any) -> Callable[[], Any]:
    """Always the same."""
    return lambda: held


# Of torchvision the package index has the build for CUDA alone, whose own ops a CPU's torch can't load; it asks for the
# names of some when it is imported, by the libraries here and by transformers, and no model here uses one.
for _op in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _op):
        torch.library.define(f"torchvision::{_op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _of(module: str, name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """What a library's class or function gives for some arguments."""
    return lambda: getattr(importlib.import_module(module), name)(*args, **kwargs)


for _name, (_class, _args) in (WRITTEN | PAPERS).items():
    _add(f"by hand {_name}", _class, *_args)

# --- timm ------------------------------------------------------------------------------------------------------------

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {**_VIT, "drop_path_rate": 0.1, "proj_drop_rate": 0.1},
    "vit_small_patch14_reg4_dinov2": {**_VIT, "drop_path_rate": 0.1},
    "deit3_small_patch16_224": {**_VIT, "drop_path_rate": 0.1},
    "beit_base_patch16_224": {**_VIT, "drop_path_rate": 0.1},
    "eva02_tiny_patch14_224": {**_VIT, "drop_path_rate": 0.1},
    "cait_xxs24_224": {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4},
    "xcit_nano_12_p16_224": {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 4},
    "mixer_s32_224": {"img_size": 64, "drop_path_rate": 0.1},
    "gmlp_ti16_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "drop_path_rate": 0.1,
    },
    "swinv2_tiny_window8_256": {
        "img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "drop_path_rate": 0.1,
    },
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (16, 32, 48, 64), "drop_path_rate": 0.1},
    "convnextv2_atto": {"depths": (1, 1, 1, 1), "dims": (16, 32, 48, 64), "drop_path_rate": 0.1},
    "poolformer_s12": {"drop_path_rate": 0.1},
    "resnet10t": {"drop_path_rate": 0.1, "drop_rate": 0.1},
    "resnest14d": {},
    "res2net50_26w_4s": {"layers": (1, 1, 1, 1)},
    "efficientnet_lite0": {"drop_path_rate": 0.1, "drop_rate": 0.1},
    "mobilenetv3_small_050": {"drop_rate": 0.1},
    "mnasnet_small": {},
    "ghostnet_050": {},
    "regnetx_002": {},
    "densenet121": {"block_config": (2, 2, 2, 2), "growth_rate": 8},
    "dla46x_c": {},
    "levit_128s": {"img_size": 64},
    "visformer_tiny": {"img_size": 32, "embed_dim": 48, "depth": (1, 1, 1), "num_heads": 3, "init_channels": 8},
    "pvt_v2_b0": {"drop_path_rate": 0.1},
    "edgenext_xx_small": {"drop_path_rate": 0.1},
    "mobilevit_xxs": {},
    "fastvit_t8": {},
    "repvgg_a0": {},
    "hgnetv2_b0": {},
    "skresnet18": {},
    "convit_tiny": {**_VIT, "local_up_to_layer": 1},
    "davit_tiny": {"embed_dims": (16, 24, 32, 48), "num_heads": (2, 2, 2, 2), "depths": (1, 1, 1, 1)},
    "gcvit_xxtiny": {
        "img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": 16, "num_heads": (2, 2, 2, 2), "window_size": (2, 2, 2, 2),
    },
    "hiera_tiny_224": {"img_size": (64, 64), "stages": (1, 1, 1, 1), "embed_dim": 24},
    "coatnet_pico_rw_224": {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (16, 24, 32, 64)},
    "caformer_s18": {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 64)},
    "mvitv2_tiny": {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": 16, "num_heads": 1},
    "naflexvit_base_patch16_gap": {"embed_dim": 48, "depth": 2, "num_heads": 4},
    "nfnet_f0": {},
    "senet154": {"layers": (1, 1, 1, 1)},
    "sequencer2d_s": {"layers": (1, 1, 1, 1), "embed_dims": (24, 32, 32, 32), "hidden_sizes": (8, 8, 8, 8)},
    "swinv2_cr_tiny_224": {"img_size": 64, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4},
    "tnt_s_patch16_224": {"img_size": 64, "embed_dim": 48, "depth": 2},
    "twins_svt_small": {
        "img_size": 64, "embed_dims": (16, 24, 32, 48), "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2),
    },
    "vit_relpos_small_patch16_224": _VIT,
    "volo_d1_224": {"img_size": 64, "layers": (1, 1, 1, 1), "embed_dims": (24, 48, 48, 48), "num_heads": (2, 4, 4, 4)},
    "resnetv2_50": {"layers": (1, 1, 1, 1), "channels": (16, 24, 32, 48)},
    "eca_botnext26ts_256": {"img_size": 64},
    "halonet26t": {"img_size": 64},
    "lambda_resnet26t": {"img_size": 64},
    "mambaout_femto": {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)},
    "efficientvit_m0": {"img_size": 224},
    "dpn48b": {},
    "starnet_s1": {},
}  # fmt: skip
for _name, _sizes in _TIMM.items():
    _side = _sizes.get("img_size", 64)
    _add(f"timm {_name}", _of("timm", "create_model", _name, num_classes=10, **_sizes), x(2, 3, _side, _side))

# --- torchvision -----------------------------------------------------------------------------------------------------

_TV = "torchvision.models"
for _name, _sizes in {
    "resnet18": {}, "squeezenet1_1": {}, "mobilenet_v2": {}, "mobilenet_v3_small": {}, "shufflenet_v2_x0_5": {},
    "densenet121": {}, "mnasnet0_5": {}, "regnet_y_400mf": {}, "efficientnet_b0": {},
    "googlenet": {"aux_logits": False, "init_weights": False},
}.items():  # fmt: skip
    _add(f"torchvision {_name}", _of(_TV, _name, num_classes=10, **_sizes), x(2, 3, 64, 64))
_add(
    "torchvision vit",
    _of(_TV, "VisionTransformer", 32, 8, 2, 4, 48, 96, dropout=0.1, attention_dropout=0.1, num_classes=10),
    x(2, 3, 32, 32),
)
_add(
    "torchvision swin",
    _of(_TV, "SwinTransformer", [4, 4], 24, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.1, num_classes=10),
    x(2, 3, 32, 32),
)
_add(
    "torchvision maxvit",
    _of(_TV, "MaxVit", (32, 32), 16, 4, [16, 32], [1, 1], 8, stochastic_depth_prob=0.1, num_classes=10),
    x(2, 3, 32, 32),
)
_add(
    "torchvision lraspp",
    _of(f"{_TV}.segmentation", "lraspp_mobilenet_v3_large", weights_backbone=None),
    x(2, 3, 64, 64),
)
_add(
    "torchvision deeplabv3",
    _of(f"{_TV}.segmentation", "deeplabv3_mobilenet_v3_large", weights_backbone=None),
    x(2, 3, 64, 64),
)
_add("torchvision mc3_18", _of(f"{_TV}.video", "mc3_18", num_classes=10), x(1, 3, 8, 32, 32))

# --- diffusers -------------------------------------------------------------------------------------------------------

_D = "diffusers"
_CHANNELS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_add(
    "diffusers unet",
    _of(_D, "UNet2DModel", sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8, **_CHANNELS),
    x(2, 3, 16, 16), value(3),
)  # fmt: skip
_add(
    "diffusers unet with text",
    _of(_D, "UNet2DConditionModel", sample_size=16, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=24, attention_head_dim=4, **_CHANNELS),
    x(2, 4, 16, 16), value(3), x(2, 7, 24),
)  # fmt: skip
_add(
    "diffusers controlnet",
    _of(_D, "ControlNetModel", down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=24,
        attention_head_dim=4, conditioning_embedding_out_channels=(8, 16), **_CHANNELS),
    x(2, 4, 16, 16), value(3), x(2, 7, 24), x(2, 3, 32, 32),
)  # fmt: skip
_BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_add("diffusers vae", _of(_D, "AutoencoderKL", **_BLOCKS, **_CHANNELS), x(2, 3, 16, 16))
_add("diffusers vq", _of(_D, "VQModel", num_vq_embeddings=32, **_BLOCKS, **_CHANNELS), x(2, 3, 16, 16))
_add(
    "diffusers tiny vae",
    _of(_D, "AutoencoderTiny", encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
    x(2, 3, 16, 16),
)  # fmt: skip
_add(
    "diffusers dit",
    _of(_D, "DiTTransformer2DModel", num_attention_heads=4, attention_head_dim=12, num_layers=2, sample_size=8,
        norm_num_groups=8, num_embeds_ada_norm=10, dropout=0.1),
    x(2, 4, 8, 8), timestep=ids(10, 2), class_labels=ids(10, 2),
)  # fmt: skip
_add(
    "diffusers pixart",
    _of(_D, "PixArtTransformer2DModel", num_attention_heads=4, attention_head_dim=12, num_layers=2, sample_size=8,
        cross_attention_dim=48, caption_channels=24, norm_num_groups=8),
    x(2, 4, 8, 8), x(2, 7, 24), timestep=ids(10, 2),
    added_cond_kwargs=value({"resolution": None, "aspect_ratio": None}),
)  # fmt: skip
_add(
    "diffusers sd3",
    _of(_D, "SD3Transformer2DModel", sample_size=8, in_channels=4, num_layers=2, attention_head_dim=12,
        num_attention_heads=4, joint_attention_dim=24, caption_projection_dim=48, pooled_projection_dim=16,
        out_channels=4, pos_embed_max_size=8),
    x(2, 4, 8, 8), x(2, 7, 24), x(2, 16), ids(10, 2),
)  # fmt: skip
_add(
    "diffusers flux",
    _of(_D, "FluxTransformer2DModel", in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=24, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8)),
    x(2, 16, 4), x(2, 7, 24), x(2, 16), timestep=lambda: torch.rand(2), img_ids=lambda: torch.zeros(16, 3),
    txt_ids=lambda: torch.zeros(7, 3),
)  # fmt: skip
_add(
    "diffusers prior",
    _of(_D, "PriorTransformer", num_attention_heads=4, attention_head_dim=12, num_layers=2, embedding_dim=24,
        num_embeddings=7, additional_embeddings=4, dropout=0.1),
    x(2, 24), timestep=ids(10, 2), proj_embedding=x(2, 24), encoder_hidden_states=x(2, 7, 24),
)  # fmt: skip
_add(
    "diffusers hunyuan dit",
    _of(_D, "HunyuanDiT2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4, patch_size=2,
        sample_size=8, hidden_size=16, num_layers=2, cross_attention_dim=8, cross_attention_dim_t5=8,
        pooled_projection_dim=4, text_len=4, text_len_t5=4, use_style_cond_and_image_meta_size=False),
    x(2, 4, 8, 8), lambda: torch.rand(2), encoder_hidden_states=x(2, 4, 8), text_embedding_mask=value(torch.ones(2, 4)),
    encoder_hidden_states_t5=x(2, 4, 8), text_embedding_mask_t5=value(torch.ones(2, 4)),
    image_rotary_emb=lambda: (torch.randn(16, 8), torch.randn(16, 8)),
)  # fmt: skip
_add(
    "diffusers cogvideox",
    _of(_D, "CogVideoXTransformer3DModel", num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4,
        time_embed_dim=2, text_embed_dim=8, num_layers=2, sample_width=8, sample_height=8, sample_frames=8,
        max_text_seq_length=8),
    x(2, 1, 4, 8, 8), x(2, 8, 8), ids(10, 2),
)  # fmt: skip
_add(
    "diffusers ltx",
    _of(_D, "LTXVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8,
        cross_attention_dim=32, num_layers=2, caption_channels=16),
    x(2, 32, 4), x(2, 6, 16), ids(10, 2), value(torch.ones(2, 6).bool()), num_frames=value(2), height=value(4),
    width=value(4),
)  # fmt: skip
_add(
    "diffusers wan",
    _of(_D, "WanTransformer3DModel", num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32),
    x(2, 4, 2, 8, 8), ids(10, 2), x(2, 6, 16),
)  # fmt: skip
_add(
    "diffusers sana",
    _of(_D, "SanaTransformer2DModel", in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8,
        num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16,
        caption_channels=8, sample_size=8),
    x(2, 4, 8, 8), x(2, 6, 8), ids(10, 2),
)  # fmt: skip
_add(
    "diffusers auraflow",
    _of(_D, "AuraFlowTransformer2DModel", sample_size=8, num_mmdit_layers=1, num_single_dit_layers=1,
        attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16, caption_projection_dim=32,
        pos_embed_max_size=64),
    x(2, 4, 8, 8), x(2, 6, 16), lambda: torch.rand(2),
)  # fmt: skip
_add(
    "diffusers mochi",
    _of(_D, "MochiTransformer3DModel", num_attention_heads=2, attention_head_dim=8, num_layers=2, in_channels=4,
        pooled_projection_dim=16, text_embed_dim=16, time_embed_dim=4, max_sequence_length=6),
    x(2, 4, 2, 8, 8), x(2, 6, 16), ids(10, 2), value(torch.ones(2, 6).bool()),
)  # fmt: skip
_add(
    "diffusers lumina2",
    _of(_D, "Lumina2Transformer2DModel", sample_size=8, in_channels=4, hidden_size=24, num_layers=2,
        num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 64, 64), cap_feat_dim=8),
    x(2, 4, 8, 8), lambda: torch.rand(2), x(2, 6, 8), value(torch.ones(2, 6).bool()),
)  # fmt: skip
_add(
    "diffusers cogview4",
    _of(_D, "CogView4Transformer2DModel", in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, text_embed_dim=8, time_embed_dim=8, condition_dim=4, rope_axes_dim=(8, 8)),
    x(2, 4, 8, 8), x(2, 6, 8), ids(10, 2), *[value(torch.tensor([[8.0, 8.0]] * 2))] * 3,
)  # fmt: skip
_add(
    "diffusers hunyuan video",
    _of(_D, "HunyuanVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2,
        attention_head_dim=10, num_layers=1, num_single_layers=1, num_refiner_layers=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4)),
    x(1, 4, 2, 8, 8), ids(10, 1), x(1, 6, 16), value(torch.ones(1, 6)), x(1, 8), guidance=ids(10, 1),
)  # fmt: skip
_add(
    "diffusers chroma",
    _of(_D, "ChromaTransformer2DModel", in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8,
        approximator_hidden_dim=16, approximator_layers=1),
    x(2, 16, 4), x(2, 7, 32), lambda: torch.rand(2), lambda: torch.zeros(16, 3), lambda: torch.zeros(7, 3),
)  # fmt: skip
_add(
    "diffusers qwen image",
    _of(_D, "QwenImageTransformer2DModel", in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=16, axes_dims_rope=(8, 4, 4)),
    x(1, 16, 16), x(1, 7, 16), value(torch.ones(1, 7).bool()), lambda: torch.rand(1), value([(1, 4, 4)]),
)  # fmt: skip
_add(
    "diffusers latte",
    _of(_D, "LatteTransformer3DModel", num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8,
        num_layers=1, cross_attention_dim=32, sample_size=8, patch_size=2, num_embeds_ada_norm=10, video_length=2,
        norm_type="ada_norm_single", norm_elementwise_affine=False, caption_channels=8, attention_bias=True),
    x(2, 4, 2, 8, 8), ids(10, 2), x(2, 6, 8),
)  # fmt: skip
_add(
    "diffusers stable audio",
    _of(_D, "StableAudioDiTModel", sample_size=4, in_channels=4, num_layers=2, attention_head_dim=4,
        num_attention_heads=4, num_key_value_attention_heads=2, out_channels=4, cross_attention_dim=16,
        time_proj_dim=8, global_states_input_dim=8, cross_attention_input_dim=8),
    x(2, 4, 12), ids(10, 2), x(2, 6, 8), x(2, 1, 8), lambda: (torch.randn(13, 4), torch.randn(13, 4)),
)  # fmt: skip
_add(
    "diffusers muse",
    _of(_D, "UVit2DModel", hidden_size=32, cond_embed_dim=16, micro_cond_encode_dim=4, micro_cond_embed_dim=20,
        encoder_hidden_size=16, vocab_size=32, codebook_size=24, in_channels=16, block_out_channels=16,
        num_res_blocks=1, downsample=True, upsample=True, block_num_heads=2, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=48, sample_size=8),
    ids(24, 2, 8, 8), x(2, 6, 16), x(2, 16), x(2, 5),
)  # fmt: skip
_add(
    "diffusers stable cascade",
    _of(_D, "StableCascadeUNet", in_channels=4, out_channels=4, timestep_ratio_embedding_dim=8, conditioning_dim=16,
        block_out_channels=(16, 32), num_attention_heads=(2, 2), down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1), clip_text_pooled_in_channels=12, clip_seq=2,
        block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2),
    x(2, 4, 8, 8), lambda: torch.rand(2), x(2, 1, 12),
)  # fmt: skip
_add(
    "diffusers unet 1d",
    _of(_D, "UNet1DModel", sample_size=32, in_channels=2, out_channels=2, block_out_channels=(16, 16, 32),
        extra_in_channels=16, down_block_types=("DownBlock1D", "AttnDownBlock1D", "AttnDownBlock1D")),
    x(2, 2, 64), value(3),
)  # fmt: skip
_add(
    "diffusers unet 3d",
    _of(_D, "UNet3DConditionModel", down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=16, attention_head_dim=4, **_CHANNELS),
    x(1, 4, 3, 8, 8), value(3), x(1, 5, 16),
)  # fmt: skip
_add(
    "diffusers stable video",
    _of(_D, "UNetSpatioTemporalConditionModel", in_channels=4, block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), num_attention_heads=(2, 2),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=16,
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=24, num_frames=2),
    x(1, 2, 4, 8, 8), value(3), x(1, 1, 16), x(1, 3),
)  # fmt: skip
_add("diffusers t2i adapter", _of(_D, "T2IAdapter", channels=[16, 32], num_res_blocks=1), x(2, 3, 32, 32))
_add(
    "diffusers dc autoencoder",
    _of(_D, "AutoencoderDC", latent_channels=4, attention_head_dim=4, encoder_block_types=("ResBlock",
        "EfficientViTBlock"), decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 16), decoder_block_out_channels=(8, 16), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,))),
    x(2, 3, 16, 16),
)  # fmt: skip
_add(
    "diffusers oobleck",
    _of(_D, "AutoencoderOobleck", encoder_hidden_size=8, downsampling_ratios=[2, 4], channel_multiples=[1, 2],
        decoder_channels=8, decoder_input_channels=4),
    x(2, 2, 48),
)  # fmt: skip
_add(
    "diffusers wan vae",
    _of(_D, "AutoencoderKLWan", base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
    x(1, 3, 3, 8, 8),
)  # fmt: skip
_add(
    "diffusers flux 2",
    _of(_D, "Flux2Transformer2DModel", in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4)),
    x(2, 16, 4), x(2, 7, 32), lambda: torch.rand(2), lambda: torch.zeros(2, 16, 4), lambda: torch.zeros(2, 7, 4),
    lambda: torch.rand(2),
)  # fmt: skip
_add("denoising_diffusion_pytorch unet", _of("denoising_diffusion_pytorch", "Unet", 16, dim_mults=(1, 2)),
     x(2, 3, 16, 16), ids(10, 2))  # fmt: skip

# --- torch_geometric -------------------------------------------------------------------------------------------------


def _neighbours(positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Each point and the next: the search for the nearest ones is an op of a library of its own."""
    edges = torch.stack([torch.arange(11), torch.arange(1, 12)])
    return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)


def _edges() -> Tensor:
    return torch.randint(0, 12, (2, 40))


_G = "torch_geometric.nn"
for _name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN"):
    _add(f"torch_geometric {_name}", _of(_G, _name, 8, 16, 2, 4, dropout=0.2), x(12, 8), _edges)
for _name, _sizes in {
    "GATv2Conv": {"heads": 4}, "TransformerConv": {"heads": 4, "dropout": 0.1}, "ChebConv": {"K": 2},
    "SGConv": {"K": 2},
    "TAGConv": {}, "ARMAConv": {"num_layers": 2}, "GraphConv": {}, "LEConv": {}, "GENConv": {}, "ClusterGCNConv": {},
}.items():  # fmt: skip
    _add(f"torch_geometric {_name}", _of(_G, _name, 8, 16, **_sizes), x(12, 8), _edges)
_add("torch_geometric RGCNConv", _of(_G, "RGCNConv", 8, 16, 3), x(12, 8), _edges, ids(3, 40))

for _name, _sizes in {
    "EGConv": {}, "FeaStConv": {"heads": 4}, "FiLMConv": {}, "GeneralConv": {}, "HypergraphConv": {}, "MFConv": {},
    "MixHopConv": {}, "ResGatedGraphConv": {}, "SSGConv": {"alpha": 0.1, "K": 2}, "SuperGATConv": {"heads": 4},
}.items():  # fmt: skip
    _add(f"torch_geometric {_name}", _of(_G, _name, 8, 16, **_sizes), x(12, 8), _edges)
_add("torch_geometric GatedGraphConv", _of(_G, "GatedGraphConv", 16, 2), x(12, 8), _edges)
_add("torch_geometric AntiSymmetricConv", _of(_G, "AntiSymmetricConv", 16), x(12, 16), _edges)
_add("torch_geometric GCN2Conv", _of(_G, "GCN2Conv", 16, 0.1, 0.5, 1), x(12, 16), x(12, 16), _edges)
_add("torch_geometric FAConv", _of(_G, "FAConv", 16), x(12, 16), x(12, 16), _edges)
_add("torch_geometric PNAConv", _of(_G, "PNAConv", 8, 16, ["mean", "max", "std"], ["identity", "amplification"],
     torch.tensor([1, 3, 4, 2])), x(12, 8), _edges)  # fmt: skip
_add("torch_geometric NNConv", lambda: importlib.import_module(_G).NNConv(8, 16, nn.Linear(3, 128)), x(12, 8), _edges,
     x(40, 3))  # fmt: skip
_add("torch_geometric CGConv", _of(_G, "CGConv", 16, 3, batch_norm=True), x(12, 16), _edges, x(40, 3))
_add("torch_geometric GMMConv", _of(_G, "GMMConv", 8, 16, 3, 4), x(12, 8), _edges, x(40, 3))
_add("torch_geometric GINEConv", lambda: importlib.import_module(_G).GINEConv(
     nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), train_eps=True, edge_dim=3), x(12, 16), _edges,
     x(40, 3))  # fmt: skip
_add("torch_geometric RGATConv", _of(_G, "RGATConv", 8, 16, 3, heads=4), x(12, 8), _edges, ids(3, 40))
_add("torch_geometric FastRGCNConv", _of(_G, "FastRGCNConv", 8, 16, 3), x(12, 8), _edges, ids(3, 40))
_add("torch_geometric HEATConv", _of(_G, "HEATConv", 8, 16, 2, 3, 4, 3, 4, heads=4), x(12, 8), _edges, ids(2, 12),
     ids(3, 40), x(40, 3))  # fmt: skip
_add("torch_geometric GPSConv", lambda: importlib.import_module(_G).GPSConv(16, importlib.import_module(_G).GCNConv(16,
     16), heads=4, dropout=0.1), x(12, 16), _edges, value(torch.arange(12) // 6))  # fmt: skip
_add("torch_geometric PointTransformerConv", _of(_G, "PointTransformerConv", 8, 16), x(12, 8), x(12, 3), _edges)
_add("torch_geometric PPFConv", lambda: importlib.import_module(_G).PPFConv(nn.Linear(12, 16), nn.Linear(16, 24)),
     x(12, 8), x(12, 3), x(12, 3), _edges)  # fmt: skip
_add("torch_geometric HGTConv", _of(_G, "HGTConv", 8, 16, (["a", "b"], [("a", "to", "b"), ("b", "to", "a")]), 4),
     lambda: {"a": torch.randn(12, 8), "b": torch.randn(12, 8)},
     lambda: {("a", "to", "b"): _edges(), ("b", "to", "a"): _edges()})  # fmt: skip
_add("torch_geometric SchNet", _of(_G, "SchNet", 16, 16, 2, 8, interaction_graph=_neighbours), ids(9, 12), x(12, 3),
     value(torch.arange(12) // 6))  # fmt: skip
_add("torch_geometric AttentiveFP", _of(_G, "AttentiveFP", 8, 16, 4, 3, 2, 2, 0.1), x(12, 8), _edges, x(40, 3),
     value(torch.arange(12) // 6))  # fmt: skip
_add("torch_geometric LINKX", _of(_G, "LINKX", 12, 8, 16, 4, 2), x(12, 8), _edges)
_add("torch_geometric PMLP", _of(_G, "PMLP", 8, 16, 4, 2), x(12, 8), _edges)
_add("torch_geometric LightGCN", _of(_G, "LightGCN", 12, 16, 2), _edges)
_add("torch_geometric GraphUNet", _of(_G, "GraphUNet", 8, 16, 4, 2), x(12, 8), _edges)
_add("torch_geometric SGFormer", _of(_G, "SGFormer", 8, 16, 4), x(12, 8), _edges, value(torch.arange(12) // 6))
_add("torch_geometric Polynormer", _of(_G, "Polynormer", 8, 16, 4), x(12, 8), _edges, value(torch.arange(12) // 6))
for _name, _sizes in {
    "Set2Set": {"in_channels": 8, "processing_steps": 2}, "GRUAggregation": {"in_channels": 8, "out_channels": 16},
    "SoftmaxAggregation": {"learn": True, "channels": 8}, "PowerMeanAggregation": {"learn": True},
    "LSTMAggregation": {"in_channels": 8, "out_channels": 16},
    "SetTransformerAggregation": {"channels": 8, "heads": 2}, "SortAggregation": {"k": 3},
    "DeepSetsAggregation": {"local_nn": nn.Linear(8, 16), "global_nn": nn.Linear(16, 4)},
}.items():  # fmt: skip
    _add(f"torch_geometric {_name}", _of(_G, _name, **_sizes), x(12, 8), value(torch.arange(12) // 3),
         dim_size=value(4))  # fmt: skip

# --- x-transformers --------------------------------------------------------------------------------------------------

_X = "x_transformers"


def _decoder(causal: bool = True, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        lib = importlib.import_module(_X)
        layers = (lib.Decoder if causal else lib.Encoder)(dim=48, depth=2, heads=4, attn_dim_head=12, **options)
        return lib.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)

    return build


for _name, _options in {
    "decoder": {"attn_dropout": 0.1, "ff_dropout": 0.1}, "encoder": {"causal": False},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True}, "rmsnorm, swiglu": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "grouped queries": {"attn_kv_heads": 2}, "t5 bias": {"rel_pos_bias": True}, "qk norm": {"attn_qk_norm": True},
    "sandwich norm": {"sandwich_norm": True}, "macaron": {"macaron": True}, "memory": {"attn_num_mem_kv": 4},
    "shifted tokens": {"shift_tokens": 1}, "talking heads": {"attn_pre_talking_heads": True},
    "gated residual": {"gate_residual": True}, "flash": {"attn_flash": True},
    "dynamic positions": {"dynamic_pos_bias": True}, "xpos": {"rotary_xpos": True},
    "sparse topk": {"attn_sparse_topk": 4}, "gated values": {"attn_gate_values": True},
    "head scale": {"attn_head_scale": True, "use_scalenorm": True}, "one kv head": {"attn_one_kv_head": True},
    "hyper connections": {"num_residual_streams": 2}, "residual attention": {"residual_attn": True, "pre_norm": False},
    "value residual": {"add_value_residual": True}, "forgetting": {"attn_data_dependent_alibi": True},
    "sigmoid, softclamp": {"attn_sigmoid": True, "attn_softclamp_logits": True}, "laser": {"attn_laser": True},
    "dynamic tanh": {"use_dynamic_tanh": True}, "polar": {"polar_pos_emb": True}, "cope": {"attn_use_cope": True},
    "latent kv": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 16}, "selective": {"attn_selective": True},
    "layers integrated": {"integrate_layers": True}, "orthogonal residual": {"orthog_residual": True},
    "gumbel": {"attn_gumbel_softmax": True}, "l2 distance": {"attn_l2_distance": True},
}.items():  # fmt: skip
    _add(f"x-transformers {_name}", _decoder(**_options), ids(64, 2, 10))
_add(
    "x-transformers encoder-decoder",
    _of(_X, "XTransformer", dim=48, enc_num_tokens=64, enc_depth=2, enc_heads=4, enc_max_seq_len=16, dec_num_tokens=64,
        dec_depth=2, dec_heads=4, dec_max_seq_len=16),
    ids(64, 2, 9), ids(64, 2, 8),
)  # fmt: skip

# --- open_clip -------------------------------------------------------------------------------------------------------

_VISION = {"image_size": 32, "patch_size": 8, "width": 48, "layers": 2, "head_width": 12}
_TEXT = {"context_length": 8, "vocab_size": 64, "width": 48, "layers": 2, "heads": 4}
_add("open_clip clip", _of("open_clip", "CLIP", 32, _VISION, _TEXT), x(2, 3, 32, 32), ids(64, 2, 8))
_add("open_clip custom text", _of("open_clip", "CustomTextCLIP", 32, _VISION, _TEXT), x(2, 3, 32, 32), ids(64, 2, 8))
_add(
    "open_clip modified resnet",
    _of("open_clip", "CLIP", 32, {"image_size": 64, "width": 16, "layers": [1, 1, 1, 1], "head_width": 16}, _TEXT),
    x(2, 3, 64, 64), ids(64, 2, 8),
)  # fmt: skip

# --- segmentation models ---------------------------------------------------------------------------------------------

for _name in ("Unet", "UnetPlusPlus", "FPN", "Linknet", "MAnet", "PAN", "DeepLabV3Plus", "PSPNet"):
    _add(
        f"segmentation_models {_name}",
        _of("segmentation_models_pytorch", _name, "timm-mobilenetv3_small_minimal_100", encoder_weights=None),
        x(2, 3, 128, 128),
    )  # fmt: skip

# --- vit-pytorch -----------------------------------------------------------------------------------------------------

_V = {"image_size": 32, "num_classes": 10}
_SMALL = {"patch_size": 8, "dim": 48, "depth": 2, "heads": 4, "mlp_dim": 96}
_DROP = {"dropout": 0.1, "emb_dropout": 0.1}
for _module, _name, _sizes in (
    ("vit", "ViT", {**_SMALL, **_DROP}), ("simple_vit", "SimpleViT", _SMALL),
    ("deepvit", "DeepViT", {**_SMALL, **_DROP}),
    ("cait", "CaiT", {**_SMALL, **_DROP, "cls_depth": 1}),
    ("vit_for_small_dataset", "ViT", {**_SMALL, **_DROP}), ("parallel_vit", "ViT", {**_SMALL, **_DROP}),
    ("simple_vit_with_register_tokens", "SimpleViT", _SMALL), ("vit_with_patch_merger", "ViT", {**_SMALL, **_DROP}),
    ("nest", "NesT", {"patch_size": 4, "dim": 24, "heads": 3, "num_hierarchies": 2, "block_repeats": (1, 1)}),
    ("pit", "PiT", {"patch_size": 8, "dim": 48, "depth": (1, 1), "heads": 4, "mlp_dim": 96, **_DROP}),
    ("rvt", "RvT", {**_SMALL, **_DROP}), 
    ("xcit", "XCiT", {**_SMALL, **_DROP, "cls_depth": 1, "layer_dropout": 0.05}),
    ("ats_vit", "ViT", {**_SMALL, **_DROP, "max_tokens_per_depth": (8, 6)}), ("normalized_vit", "nViT", _SMALL),
    ("simple_uvit", "SimpleUViT", _SMALL), ("simple_vit_with_fft", "SimpleViT", {**_SMALL, "freq_patch_size": 8}),
    ("simple_vit_with_hyper_connections", "SimpleViT", {**_SMALL, "num_residual_streams": 2}),
    ("simple_vit_with_value_residual", "SimpleViT", _SMALL), ("learnable_memory_vit", "ViT", {**_SMALL, **_DROP}),
    ("look_vit", "LookViT", {"dim": 48, "depth": 2, "patch_size": 8, "heads": 4, "highres_patch_size": 4,
                             "patch_conv_kernel_size": 3}),
    ("cct", "CCT", {"img_size": 32, "embedding_dim": 48, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0}),
    ("cross_vit", "CrossViT", {"sm_dim": 24, "lg_dim": 48, "sm_patch_size": 8, "sm_enc_heads": 4, "sm_enc_mlp_dim": 48,
                               "lg_patch_size": 16, "lg_enc_depth": 1, "lg_enc_mlp_dim": 48, "depth": 1}),
    ("t2t", "T2TViT", {"dim": 48, "depth": 2, "heads": 4, "mlp_dim": 96, "t2t_layers": ((7, 4), (3, 2))}),
    ("levit", "LeViT", {"dim": (24, 32), "depth": 1, "heads": (2, 4), "mlp_mult": 2, "stages": 2}),
):  # fmt: skip
    _own = {} if "img_size" in _sizes else _V
    _add(f"vit-pytorch {_module}", _of(f"vit_pytorch.{_module}", _name, **(_own | _sizes)), x(2, 3, 32, 32))

# --- state spaces ----------------------------------------------------------------------------------------------------

_add("mambapy mamba", lambda: importlib.import_module("mambapy.mamba").Mamba(
    importlib.import_module("mambapy.mamba").MambaConfig(d_model=32, n_layers=2, d_state=4)), x(2, 8, 32))  # fmt: skip


# --- transformers' video, time series and others that architectures.py does not build ---------------------------------


def _configured(name: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        lib = importlib.import_module("transformers")
        return getattr(lib, name)(getattr(lib, config)(**sizes))

    return build


_H = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_VIDEO = {**_H, "image_size": 16, "patch_size": 8, "num_frames": 4}
_TIME = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "prediction_length": 4,
         "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2}  # fmt: skip
_SERIES = {"past_values": x(2, 10), "past_time_features": x(2, 10, 2), "past_observed_mask": value(torch.ones(2, 10)),
           "future_values": x(2, 4), "future_time_features": x(2, 4, 2)}  # fmt: skip
for _name in ("VideoMAEForVideoClassification", "VivitForVideoClassification", "TimesformerForVideoClassification"):
    _config = _name.replace("ForVideoClassification", "Config")
    _tubes = {"tubelet_size": [2, 8, 8]} if "Vivit" in _name else {}
    _add(f"transformers {_name}", _configured(_name, _config, **_VIDEO, **_tubes), x(2, 4, 3, 16, 16))
_add(
    "transformers VJEPA2Model",
    _configured("VJEPA2Model", "VJEPA2Config", crop_size=16, patch_size=8, frames_per_clip=4, hidden_size=48,
                num_hidden_layers=2, num_attention_heads=4, pred_hidden_size=24, pred_num_attention_heads=4,
                pred_num_hidden_layers=1, pred_num_mask_tokens=2),
    x(2, 4, 3, 16, 16),
)  # fmt: skip
_add("transformers DINOv3ViTModel", _configured("DINOv3ViTModel", "DINOv3ViTConfig", image_size=32, patch_size=8, **_H),
     x(2, 3, 32, 32))  # fmt: skip
_add(
    "transformers TimesFmModelForPrediction",
    _configured("TimesFmModelForPrediction", "TimesFmConfig", patch_length=8, context_length=32, horizon_length=8,
                head_dim=12, num_hidden_layers=2, hidden_size=48, intermediate_size=48, num_attention_heads=4),
    lambda: [torch.randn(32), torch.randn(32)], lambda: [0, 0],
)  # fmt: skip
_add(
    "transformers PatchTSTForPrediction",
    _configured("PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=3, context_length=16, patch_length=4,
                patch_stride=4, d_model=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
                prediction_length=4),
    x(2, 16, 3),
)  # fmt: skip
_add(
    "transformers PatchTSMixerForPrediction",
    _configured("PatchTSMixerForPrediction", "PatchTSMixerConfig", context_length=16, patch_length=4, patch_stride=4,
                num_input_channels=3, d_model=16, num_layers=2, prediction_length=4, mode="mix_channel",
                gated_attn=True, self_attn=True, self_attn_heads=2),
    x(2, 16, 3),
)  # fmt: skip
for _name in ("TimeSeriesTransformer", "Informer"):
    _add(f"transformers {_name}", _configured(f"{_name}ForPrediction", f"{_name}Config", **_TIME), **_SERIES)
_add(
    "transformers DecisionTransformerModel",
    _configured("DecisionTransformerModel", "DecisionTransformerConfig", state_dim=5, act_dim=3, hidden_size=32,
                n_layer=2, n_head=2, max_ep_len=20),
    states=x(2, 6, 5), actions=x(2, 6, 3), rewards=x(2, 6, 1), returns_to_go=x(2, 6, 1),
    timesteps=value(torch.arange(6).expand(2, 6)), attention_mask=value(torch.ones(2, 6, dtype=torch.long)),
)  # fmt: skip
_add(
    "transformers PerceiverForMaskedLM",
    _configured("PerceiverForMaskedLM", "PerceiverConfig", vocab_size=60, d_model=32, d_latents=32, num_latents=8,
                num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2,
                qk_channels=32, v_channels=32, max_position_embeddings=16),
    ids(60, 2, 16),
)  # fmt: skip
_add(
    "transformers VitsModel",
    _configured("VitsModel", "VitsConfig", vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                ffn_dim=48, flow_size=16, spectrogram_bins=9, upsample_initial_channel=16, upsample_rates=[2, 2],
                upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
                prior_encoder_num_flows=1, prior_encoder_num_wavenet_layers=1, duration_predictor_num_flows=1,
                duration_predictor_filter_channels=16, use_stochastic_duration_prediction=False),
    ids(40, 2, 6),
)  # fmt: skip
_add(
    "transformers EncodecModel",
    _configured("EncodecModel", "EncodecConfig", hidden_size=16, num_filters=4, upsampling_ratios=[2, 2],
                codebook_size=16, num_lstm_layers=1, num_residual_layers=1, target_bandwidths=[24.0]),
    x(2, 1, 64),
)  # fmt: skip
_add(
    "transformers DacModel",
    _configured("DacModel", "DacConfig", encoder_hidden_size=8, downsampling_ratios=[2, 2], decoder_hidden_size=16,
                n_codebooks=2, codebook_size=16, codebook_dim=4, hidden_size=32),
    x(2, 1, 64),
)  # fmt: skip

# --- peft ------------------------------------------------------------------------------------------------------------


def _tuned(kind: str, method: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import AutoModelForCausalLM

        peft = importlib.import_module("peft")
        model = AutoModelForCausalLM.from_config(tiny(kind))
        return peft.get_peft_model(model, getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", **options))

    return build


_QV = {"target_modules": ["q_proj", "v_proj"]}
for _label, _made in {
    "lora llama": _tuned("llama", "Lora", r=4, lora_dropout=0.1, **_QV),
    "lora gpt2": _tuned("gpt2", "Lora", r=4, target_modules=["c_attn"], fan_in_fan_out=True),
    "dora llama": _tuned("llama", "Lora", r=4, use_dora=True, **_QV),
    "ia3 llama": _tuned("llama", "IA3", target_modules=["k_proj", "v_proj", "down_proj"],
                        feedforward_modules=["down_proj"]),
    "loha llama": _tuned("llama", "LoHa", r=4, **_QV),
    "lokr llama": _tuned("llama", "LoKr", r=4, **_QV),
    "vera llama": _tuned("llama", "Vera", r=4, **_QV),
    "oft llama": _tuned("llama", "OFT", r=0, oft_block_size=4, **_QV),
}.items():  # fmt: skip
    _add(f"peft {_label}", _made, input_ids=ids(90, 2, 8))
