"""The process from which a test's ranks are forked: it has imported their modules and sharded one model.

A rank is a fork, so it starts from this module's state, whatever an earlier rank changed in its own process. Tests
reset nothing, and a rank that dies affects no other. A fork takes milliseconds, and saves the half second of the
first capture in a fresh process (lazy imports and the caches of torch.export).
"""

from __future__ import annotations

import sys

import hypothesis  # noqa: F401  (a rank imports the module of its function, and that imports these)
import pytest  # noqa: F401
import torch
import torch.distributed.optim
from transformers import AutoTokenizer, BertModel, GPT2Model, LlamaForCausalLM, MixtralForCausalLM  # noqa: F401

import torchshard as ts
from tests.models import MLP

sys.dont_write_bytecode = False  # else each rank compiles the module of its function


def _shard_once() -> None:
    """Fills the caches of capture, planning and steps, without other effects."""
    torch.set_num_threads(1)  # a fork doesn't inherit the threads of a pool
    state = torch.get_rng_state()
    x = torch.randn(3, 12)
    model = ts.shard(MLP(), "auto", (x,))
    if torch.backends.cuda.is_built():  # its autograd has threads, which a fork doesn't inherit
        with torch.no_grad():
            model(x)
    else:
        for _ in range(2):  # the second call makes backward graphs
            model(x).sum().backward()
    ts.distributed.destroy_process_group()
    torch.set_rng_state(state)


_shard_once()
