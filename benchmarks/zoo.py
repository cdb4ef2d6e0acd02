"""Models with no annotation: is what `ts.shard(model, "auto")` computes exact, and how much of it is split?

Of each architecture of transformers a tiny one (two layers, width 64, random weights), and models of other libraries
(others.py), go through `ts.check` in float64, each in a process of its own with a time limit: outputs and every
parameter gradient beside the unsharded model's, at a relative 1e-10.

    exact      they are equal, at all numbers of ranks
    refused    a typed error says why the model can't be sharded
    wrong      they differ
    failed     anything else: an error that is not ours, or no end within the limit
    not built  the library itself does not build or run the tiny model

    python benchmarks/zoo.py --json zoo.json --write docs/models.md
    python benchmarks/zoo.py --models llama "timm convnext_atto" --ranks 2 3
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import others
import settings
import torch
import transformers
from alone import in_processes
from others import Made
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto

import torchshard as ts
from torchshard.capture.facts import ModelFacts
from torchshard.checking.check import check_program
from torchshard.checking.processes import check_processes
from torchshard.compiler.constraints import read_constraints
from torchshard.compiler.program import planned, prepared
from torchshard.core.layouts import I
from torchshard.core.mesh import MeshAxis
from torchshard.plans.machine import objective

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
         "ZERO_SHOT_IMAGE_CLASSIFICATION", "DEPTH_ESTIMATION", "OBJECT_DETECTION")  # fmt: skip
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
    if kind in settings.MODELS:
        return settings.MODELS[kind]()
    if kind in others.MODELS:
        model, args, kwargs = others.MODELS[kind]()
        return model.train(), args, kwargs
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


# --- one model -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What became of one model."""

    kind: str
    status: str
    split: dict[int, float] = dataclasses.field(default_factory=dict)
    """Ranks -> the share of the parameters' bytes that is split."""
    why: str = ""
    error: float = 0.0
    """The largest, relative to the largest value of its tensor."""
    seconds: float = 0.0


def tried(kind: str, ranks: list[int]) -> Result:
    """Builds, shards and checks."""
    setting = kind.rpartition(", ")[2]
    with settings.AROUND.get(setting, contextlib.nullcontext)():
        return _tried(kind, ranks, (None,) if setting in settings.AS_IT_IS else DTYPES)


DTYPES = (torch.float64, torch.float32)
"""Some models make tensors of float32 whatever they are cast to."""


def _tried(kind: str, ranks: list[int], dtypes: Sequence[torch.dtype | None]) -> Result:
    for dtype in dtypes:
        try:
            model, args, kwargs = built(kind)
            if dtype is not None:
                args, kwargs = tree_map_only(torch.Tensor, partial(_as, dtype=dtype), (args, kwargs))
                model.to(dtype)
            with torch.no_grad():
                model(*args, **kwargs)
            break
        except Exception as error:
            why = " ".join(str(error).split())[:400]
    else:
        return Result(kind, "not built", why=why)
    split, error = dict[int, float](), 0.0
    try:
        captured = prepared(model, args, kwargs)
        for world in ranks:
            constraints = read_constraints(ModelFacts.of(model), {}, MeshAxis(world))
            made = planned(captured, model, constraints)
            split[world] = split_share(model, made.plan)
            report = check_program(model, made, made.graph, args, kwargs)
            error = max(error, report.worst.error)
            if not report.ok:
                worst = report.worst
                text = f"{world} ranks: {worst.kind} {worst.name} {worst.error:.1e} {report.diverges_at}"
                return Result(kind, "wrong", split, text)
    except ts.ShardError as refusal:
        return Result(kind, "refused", split, " ".join(f"{type(refusal).__name__}: {refusal}".split())[:400])
    return Result(kind, "exact", split, error=error)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def on_processes(kind: str, world: int) -> str:
    """'exact', or what differs, on processes that send through gloo."""
    report = check_processes(built, (kind,), {}, world, objective("cpu-gloo"))
    worst = report.worst
    return "exact" if report.ok else f"wrong: {worst.kind} {worst.name} {worst.error:.1e}"


def split_share(model: torch.nn.Module, plan: ts.Plan) -> float:
    """The part of the parameters' bytes that lies in slices."""
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    return sum(size for name, size in sizes.items() if plan.parameters.get(name, I) != I) / max(sum(sizes.values()), 1)


# --- the page --------------------------------------------------------------------------------------------------------

PAGE = """# Models

Models with no annotation, each tiny and with random weights, through `ts.check` at {ranks} ranks: outputs and every
parameter gradient beside the unsharded model's, in float64, at a relative 1e-10 (1e-5 where the model itself computes
in float32). To regenerate this page, in about two hours on two cores: `make sweep`.

On real ranks, processes that send through gloo (`--processes 2`): {processes}.
"""
PART = """
## {title}

{counts}

Of the exact ones {split} have at least 80 % of their parameters' bytes split at {most} ranks, and the largest error of
{close} is below 1e-10. {note}

| model | result | split at {ranks} ranks | |
|---|---|---|---|
"""
PARTS = {
    "Hugging Face transformers": (
        [*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(f"{kind} (other)" for kind in OTHERS)],
        f"Architectures of transformers {transformers.__version__}, two layers of width 64; what is tried as something "
        "else than a causal language model is marked (other).",
    ),
    "Other libraries": (
        [*others.MODELS],
        "In train mode, with their dropout and stochastic depth.",
    ),
    "Settings of Hugging Face's models": (
        [*settings.MODELS],
        "As people set them up; those in bfloat16 and in autocast are compared as they are and widened.",
    ),
}
"""Title -> the models, and a note."""


def page(results: dict[str, dict[str, Any]], ranks: list[int]) -> str:
    """All results as Markdown."""
    tried_on = ", ".join(f"{r['kind']} on {r['processes']}" for r in results.values() if "processes" in r)
    text = PAGE.format(ranks=" and ".join(map(str, ranks)), processes=tried_on or "none tried")
    found = {title: [results[kind] for kind in kinds if kind in results] for title, (kinds, _) in PARTS.items()}
    return text + "".join(_part(title, rows, ranks) for title, rows in found.items() if rows)


def _part(title: str, results: list[dict[str, Any]], ranks: list[int]) -> str:
    counts = Counter(result["status"] for result in results)
    exact = [result for result in results if result["status"] == "exact"]
    split = sum(list(result["split"].values())[-1] >= 0.8 for result in exact)
    rows = []
    for r in sorted(results, key=lambda r: (STATUSES.index(r["status"]), r["kind"])):
        why = f"{r['error']:.0e}" if r["status"] == "exact" else shown(r["why"])
        rows.append(f"| {r['kind']} | {r['status']} | {' '.join(f'{s:.0%}' for s in r['split'].values())} | {why} |")
    return PART.format(
        title=title,
        note=PARTS[title][1],
        ranks=" and ".join(map(str, ranks)),
        most=max(ranks),
        split=split,
        close=sum(result["error"] < 1e-10 for result in exact),
        counts=", ".join(f"{counts[status]} {status}" for status in STATUSES),
    ) + "\n".join([*rows, ""])


SAMPLE = [
    "llama", "gpt2", "mixtral", "qwen3", "gemma2", "mamba", "bert (other)", "t5 (other)", "vit (other)",
    "whisper (other)", "resnet (other)",
]  # fmt: skip
"""Models that are tried on real ranks too."""


def shown(why: str) -> str:
    """A reason without the folders of this machine."""
    return re.sub(r"\S*/site-packages/", "", why).replace("|", "\\|")[:240]


STATUSES = ("exact", "refused", "failed", "wrong", "not built")


# --- all of them -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--part", default="", help=f"a part of the title of one of {', '.join(PARTS)}")
    parser.add_argument("--processes", type=int, metavar="N", help="a sample again, on so many real ranks")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one model")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="results are written here; those that are there already are kept")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a page about all results")
    given = parser.parse_args()
    kinds = given.models or [kind for title, (kinds, _) in PARTS.items() for kind in kinds if given.part in title]
    known = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    todo = [kind for kind in kinds if given.models or kind not in known]
    for kind, found, seconds in in_processes(partial(tried, ranks=given.ranks), todo, given.limit, given.jobs):
        result = found if isinstance(found, Result) else Result(kind, "failed", why=found)
        known[kind] = dataclasses.asdict(result) | {"seconds": seconds}
        split = " ".join(f"{share:.0%}" for share in result.split.values())
        print(f"{kind:28} {result.status:10} {split:10} {seconds:6.1f} s  {result.why[:300]}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(known, indent=1))
    if given.processes:
        for kind in given.models or SAMPLE:
            known[kind]["processes"] = f"{given.processes}: {on_processes(kind, given.processes)}"
            print(f"{kind:28} on real ranks, {known[kind]['processes']}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(known, indent=1))
    if given.write:
        given.write.write_text(page({kind: known[kind] for kind in kinds}, given.ranks))
    print(Counter(known[kind]["status"] for kind in kinds))


if __name__ == "__main__":
    main()
