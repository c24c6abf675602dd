# SPDX-License-Identifier: Apache-2.0
"""From a Python stack to the name a user knows: `clip_by_global_norm`."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Frame(NamedTuple):
    """One line of a Python stack; `function` is the qualified name."""

    function: str
    file: str
    line: int


# Factories that only pass on to others; the culprit stands further inside.
_WRAPPERS = frozenset(
    [
        "chain",
        "named_chain",
        "with_extra_args_support",
        "skip_on_overflow",
        "partition",
        "multi_transform",
        "masked",
        "inject_hyperparams",
        "conditionally_transform",
        "conditionally_mask",
        "npu_optimizer",
    ]
)
_UPDATE = re.compile(r"(?:^|\.)(\w+)\.<locals>\.(?:\w*update\w*|init_fn)\b")


def transformation(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame that belongs to the update of a gradient transformation.

    Args:
      frames: A stack, innermost frame first.

    Returns:
      The frame, its `function` replaced by the name of the factory; `None` where no
      transformation is on the stack.
    """
    for frame in frames:
        found = _UPDATE.search(frame.function)
        if found and found[1] not in _WRAPPERS:
            return frame._replace(function=found[1])
    return None


def describe(frames: Iterable[Frame]) -> str:
    """Where an operation comes from: transformation or function, file and line."""
    stack = [frame for frame in frames if frame.file]
    frame = transformation(stack) or next(iter(stack), None)
    if frame is None:
        return "an operation without source information"
    short = "/".join(frame.file.split("/")[-3:])
    name = frame.function.split(".")[-1] or "a module"
    return f"{name} ({short}:{frame.line})"
