"""Captures a module, called on example inputs, as one flat graph of ATen ops. Read `flat` first.

flat                                     `capture`: the way of a call from its arguments to its graph
signature, known_calls                   arguments as tensors and structure
models, looks, shared_memory             copies and checks of models and tensors
trace                                    the call of torch.export, with
  entry_points, function_mode            a flat forward, and calls that export gets wrong
  whole_calls, recording                 Python code that stays one op
  modes, regions                         no_grad and autocast, op by op
  seeding, generators                    random numbers that a graph would freeze
  conditions, known_numbers              numbers that forward takes from buffers, known before a call
  value_checks                           checks of values that only raise
  replacements                           functions that fake tensors can't run
  equal_sizes, assumptions               dynamic sizes
  quiet, names, export_errors            logs, names of nodes, texts of errors
visible, namespaces, user_code           what forward can read apart from its arguments, and
  attributes, rehearsal, watch           what it writes there, and what has changed since
facts                                    what planning must know of a model
"""

from torchshard.capture.attributes import describe
from torchshard.capture.conditions import Condition, Conditions, Number, Numbers
from torchshard.capture.flat import Captured, capture
from torchshard.capture.known_calls import KnownCalls
from torchshard.capture.looks import copy_attributes, look_like
from torchshard.capture.models import (
    check_buffers,
    check_devices,
    check_inputs,
    check_weights,
    copy_model,
    copy_with_values,
    model_without_storage,
    refuse_transforms,
    shared_names,
    transform_error,
    views_kept,
    without_storage,
)
from torchshard.capture.rehearsal import ModelCall, refuse_state_between
from torchshard.capture.signature import Leaves, flatten, flatten_call, look_key, memory_order
from torchshard.capture.tools import without_tools
from torchshard.capture.watch import Watch, global_hooks

__all__ = [
    "Captured", "Condition", "Conditions", "KnownCalls", "Leaves", "ModelCall", "Number", "Numbers", "Watch",
    "capture", "check_buffers", "check_devices", "check_inputs", "check_weights", "copy_attributes", "copy_model",
    "copy_with_values", "describe", "flatten", "flatten_call", "global_hooks", "look_key", "look_like",
    "memory_order", "model_without_storage", "refuse_state_between", "refuse_transforms", "shared_names",
    "transform_error", "views_kept", "without_storage", "without_tools",
]  # fmt: skip
