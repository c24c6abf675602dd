# SPDX-License-Identifier: Apache-2.0
"""Which leaf travels in which bucket, as plain data."""

import dataclasses
import hashlib
import json
import math
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """Elements `start` to `stop` of one flattened leaf."""

    leaf: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Bucket(NamedTuple):
    """One packet: pieces of one dtype, in the order in which they are packed."""

    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(piece.size for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * np.dtype(self.dtype).itemsize


class LeafSpec(NamedTuple):
    """What the plan knows of a leaf; the dtype is `None` where it is not reduced."""

    path: str
    shape: tuple[int, ...]
    dtype: str | None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Which leaf is reduced in which bucket; see `bucket_plan`.

    Plain data: hashable, comparable, printable, ``BucketPlan.from_json(p.to_json())``
    gives it back, and every process that plans the same tree gets the same.

    Attributes:
      leaves: All leaves of the tree, in tree order.
      buckets: The buckets, in the order in which they are reduced.
      order: The positions of `leaves` in the order in which the backward pass produces
        them.
    """

    leaves: tuple[LeafSpec, ...]
    buckets: tuple[Bucket, ...]
    order: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits; equal plans have equal ones, on every process."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as a JSON text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BucketPlan":
        """The plan that `to_json` wrote."""
        data = json.loads(text)
        return cls(
            tuple(LeafSpec(p, tuple(s), d) for p, s, d in data["leaves"]),
            tuple(Bucket(d, tuple(Piece(*p) for p in ps)) for d, ps in data["buckets"]),
            tuple(data["order"]),
        )

    def __str__(self) -> str:
        total = self.nbytes or 1
        lines = [f"BucketPlan {self.fingerprint}: {len(self.buckets)} buckets"]
        for i, bucket in enumerate(self.buckets):
            paths = [self.leaves[piece.leaf].path for piece in bucket.pieces]
            names = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]}"
            lines.append(
                f"  {i}: {bucket.nbytes} bytes ({100 * bucket.nbytes / total:.1f} %)"
                f" {bucket.dtype},"
                f" {len(paths)} {'leaf' if len(paths) == 1 else 'leaves'}: {names}"
            )
        return "\n".join(lines)
