"""Hugging Face's architectures, each tiny and with random weights: two layers of width 64."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model with the arguments of a call of it."""
VOCAB, BATCH, SEQUENCE, IMAGE = 99, 2, 10, 32

# --- tiny configurations ---------------------------------------------------------------------------------------------

_NAMED: dict[int, str] = {
    64: "hidden_size d_model n_embd embed_dim dim model_dim word_embed_proj_dim decoder_hidden_size rnn_hidden_size "
        "lru_width encoder_hidden_size embedding_size projection_dim num_mel_bins max_position_embeddings n_positions "
        "max_source_positions max_target_positions dim_model max_sequence_length emb_dim entity_emb_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
       "num_decoder_layers num_key_value_heads num_kv_heads num_experts_per_tok moe_top_k top_k_experts "
       "num_experts_per_token num_hidden_groups depth moe_k n_group num_expert_group",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
       "num_encoder_attention_heads num_decoder_attention_heads num_local_experts num_experts n_routed_experts "
       "moe_num_experts",
    96: "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size moe_intermediate_size "
        "hidden_dim shared_expert_intermediate_size dim_ff shared_intermediate_size",
    128: "mamba_d_ssm",
    16: "head_dim d_kv sliding_window local_window_size attention_window qk_nope_head_dim v_head_dim mamba_d_state "
        "mamba_chunk_size linear_head_dim",
    8: "patch_size qk_rope_head_dim rotary_dim mamba_n_heads",
    VOCAB: "vocab_size vocab_size_per_layer_input decoder_vocab_size entity_vocab_size",
    IMAGE: "image_size q_lora_rank kv_lora_rank",
    0: "layerdrop encoder_layerdrop decoder_layerdrop pad_token_id",
    1: "bos_token_id eos_token_id decoder_start_token_id first_k_dense_replace topk_group",
}  # fmt: skip
SMALL = {name: size for size, names in _NAMED.items() for name in names.split()}
"""What a configuration's sizes are set to, where it has them under these names."""

OVERRIDES: dict[str, dict[str, Any]] = {
    # of two layers one has attention, without which their caches do not work
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "convnext": {"patch_size": 4},
    "convnextv2": {"patch_size": 4},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    # its reversible layers seed themselves from the system's entropy, so that dropout differs from run to run
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "hash_seed": 0,
        "hidden_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    },
    "speech_to_text": {"input_feat_per_channel": 80},
    # of the whole depth the last images are one pixel: a batch norm of two numbers loses all digits
    **{kind: {"depths": [1, 2], "hidden_sizes": [32, 64], "embedding_size": 16} for kind in ("resnet", "regnet")},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""model type -> sizes of its own."""

TASKS = ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION",
         "ZERO_SHOT_IMAGE_CLASSIFICATION", "DEPTH_ESTIMATION", "OBJECT_DETECTION", "QUESTION_ANSWERING",
         "PRETRAINING")  # fmt: skip
"""Of these the first that a model type has is what it is tried as, where it is no causal language model."""
_OTHERS = """
    albert bert camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm eurobert flaubert fnet
    funnel ibert layoutlm longformer luke megatron-bert mobilebert modernbert mpnet nomic_bert nystromformer rembert
    roberta roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta xlm-roberta-xl xmod
    bart blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart
    prophetnet switch_transformers t5 t5gemma umt5 whisper speech_to_text moonshine
    beit bit convnext convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers efficientnet focalnet hiera
    ijepa imagegpt levit mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 poolformer pvt pvt_v2 regnet resnet segformer
    siglip swiftformer swin swinv2 vit vit_msn clip metaclip_2
    data2vec-audio hubert unispeech unispeech-sat wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm
    audio-spectrogram-transformer glpn
    canine jina_embeddings_v3 markuplm mra splinter ultrabert yoso gte neomme tapas modernvbert
    lasr_ctc parakeet_ctc canary cohere_asr pop2piano t5gemma2 qwen2_audio encoder-decoder
    pp_lcnet yolos vit_mae visual_bert mistral4 evolla llava
"""
OTHERS = _OTHERS.split()
"""Model types that are tried as something else than a causal language model."""


def class_of(kind: str) -> tuple[str, str]:
    """The model type and the class of 'llama' or of 'bert (other)'."""
    plain = kind.removesuffix(" (other)")
    if plain == kind:
        return plain, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    mappings = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS)
    named = next(mapping[plain] for mapping in mappings if plain in mapping)
    return plain, named if isinstance(named, str) else named[0]


def tiny(kind: str) -> PreTrainedConfig:
    """A small configuration of a model type."""
    return _shrunk(type(AutoConfig.for_model(kind)), OVERRIDES.get(kind, {}))


def _shrunk(kind: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    default = kind()
    sizes: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            sizes[name] = _shrunk(type(value), own.get(name, {}))
        elif name in SMALL and isinstance(value, int | float) and not isinstance(value, bool):
            sizes[name] = type(value)(SMALL[name])
    if "qk_rope_head_dim" in sizes:  # latent attention: the rotary part is the head's, and no head is shared
        sizes.update(num_key_value_heads=sizes.get("num_attention_heads", 4), head_dim=sizes["qk_rope_head_dim"])
    parts = {name: config for name, config in sizes.items() if isinstance(config, PreTrainedConfig)}
    plain = {name: size for name, size in {**sizes, **own}.items() if name not in parts}
    made = kind(**plain, **parts)
    made.use_cache = False
    return made


def built(kind: str) -> Made:
    """A tiny model with a call of it."""
    torch.manual_seed(0)
    plain, named = class_of(kind)
    config = tiny(plain)
    config._experts_implementation = "batched_mm"  # grouped products have no float64
    model = getattr(transformers, named)(config).train()
    return model, (), example(model, config)


def example(model: torch.nn.Module, config: PreTrainedConfig) -> dict[str, Any]:
    """Inputs of a model, by the name of its main one."""
    main = model.main_input_name
    ids = torch.randint(3, VOCAB, (BATCH, SEQUENCE))
    if main == "input_ids":
        pairs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return pairs | ({"decoder_input_ids": ids.flip(0)} if config.is_encoder_decoder else {})
    if main == "pixel_values":
        return {main: torch.randn(BATCH, getattr(config, "num_channels", 3), IMAGE, IMAGE)}
    if main == "input_values":
        found = {main: torch.randn(BATCH, 2000)}
        return found | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    if main == "input_features":
        time = 2 * config.max_source_positions if config.model_type == "whisper" else 2 * SEQUENCE
        shape = (time, getattr(config, "input_feat_per_channel", getattr(config, "num_mel_bins", 64)))
        found = {main: torch.randn(BATCH, *(shape[::-1] if config.model_type == "whisper" else shape))}
        return found | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    raise ValueError(f"no example for {main}")
