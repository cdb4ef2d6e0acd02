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


for _name, (_class, _args) in WRITTEN.items():
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
_add("denoising_diffusion_pytorch unet", _of("denoising_diffusion_pytorch", "Unet", 16, dim_mults=(1, 2)),
     x(2, 3, 16, 16), ids(10, 2))  # fmt: skip

# --- torch_geometric -------------------------------------------------------------------------------------------------


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
):  # fmt: skip
    _add(f"vit-pytorch {_module}", _of(f"vit_pytorch.{_module}", _name, **_V, **_sizes), x(2, 3, 32, 32))

# --- state spaces ----------------------------------------------------------------------------------------------------

_add("mambapy mamba", lambda: importlib.import_module("mambapy.mamba").Mamba(
    importlib.import_module("mambapy.mamba").MambaConfig(d_model=32, n_layers=2, d_state=4)), x(2, 8, 32))  # fmt: skip


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
