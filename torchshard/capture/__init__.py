"""Captures a module, called on example inputs, as one flat graph of ATen ops. Read `flat` first.

flat                                     `capture`: from a call's arguments to its graph
signature, known_calls                   arguments as tensors and structure
models, looks, shared_memory             copies and checks of models and tensors
trace                                    the call of torch.export, with
  entry_points, function_mode            a flat forward, and calls that export gets wrong
  whole_calls, recording                 Python code that stays one op
  modes, regions                         no_grad and autocast, op by op
  seeding, generators                    random numbers that a graph would freeze
  conditions, known_numbers              numbers that forward takes from buffers, known before a call
  value_checks                           checks of values that only raise
  replacements, transforms               functions that fake tensors can't run; torch.func as ops
  carried, state_before                  values that forward stores in arguments and buffers
  repeated, equal_layers, copied_layers  equal layers, traced once for plans
  equal_sizes, assumptions               dynamic sizes
  quiet, names, export_errors, tools     logs, names of nodes, texts of errors, debugging tools
visible, namespaces, user_code           values that forward can read beyond its arguments,
  attributes, rehearsal, watch           those that it writes there, and their changes since
facts                                    the facts about a model that planning needs
"""

from torchshard.capture.attributes import describe
from torchshard.capture.call_arguments import flatten_call
from torchshard.capture.conditions import Condition, Conditions, Number, Numbers
from torchshard.capture.copies import copy_model, copy_with_values, model_without_storage, views_kept, without_storage
from torchshard.capture.flat import Captured, capture
from torchshard.capture.keys import look_key, memory_order
from torchshard.capture.known_calls import KnownCalls
from torchshard.capture.looks import copy_attributes, look_like
from torchshard.capture.models import (
    check_buffers,
    check_devices,
    check_inputs,
    check_weights,
    refuse_transforms,
    shared_names,
    transform_error,
)
from torchshard.capture.rehearsal import ModelCall, refuse_state_between
from torchshard.capture.signature import Leaves, flatten
from torchshard.capture.tools import without_tools
from torchshard.capture.watch import Watch, global_hooks

__all__ = [
    "Captured", "Condition", "Conditions", "KnownCalls", "Leaves", "ModelCall", "Number", "Numbers", "Watch",
    "capture", "check_buffers", "check_devices", "check_inputs", "check_weights", "copy_attributes", "copy_model",
    "copy_with_values", "describe", "flatten", "flatten_call", "global_hooks", "look_key", "look_like",
    "memory_order", "model_without_storage", "refuse_state_between", "refuse_transforms", "shared_names",
    "transform_error", "views_kept", "without_storage", "without_tools",
]  # fmt: skip
