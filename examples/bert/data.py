# SPDX-License-Identifier: Apache-2.0
"""Text into batches of masked tokens, from any text, with nothing to download.

A vocabulary of the most frequent words is made from the corpus itself; other words
are spelled in bytes, so every text has a token sequence and none is unknown. A batch
is a pure function of (seed, step): that is the whole data position to be saved.
"""

import collections
import dataclasses
import hashlib
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .errors import UserError

MASK = 256  # token ids below are the bytes, above are the words
MAX_BYTES = 16 * 2**20
MASKED_SHARE = 0.15
_PIECE = re.compile(rb"\n[ \t]*| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|.", re.DOTALL)
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
_BLOCKS, _HELD_OUT_EVERY = 100, 20


class Batch(NamedTuple):
    """One batch of the masked language model, all int32.

    Attributes:
      tokens: [batch, length], chosen places hold `MASK`.
      places: [batch, chosen], which places were chosen.
      targets: [batch, chosen], the tokens that stood there.
    """

    tokens: np.ndarray
    places: np.ndarray
    targets: np.ndarray


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as tokens.

    Attributes:
      name: Where it was read.
      vocab: What each token id stands for.
      train: int32 tokens to train on.
      held_out: int32 tokens that training never sees: every twentieth hundredth.
      fingerprint: Tells this text and vocabulary from any other.
    """

    name: str
    vocab: tuple[bytes, ...]
    train: np.ndarray
    held_out: np.ndarray
    fingerprint: str


def load_corpus(path: str | None, vocab_size: int, length: int) -> Corpus:
    """Reads a file or folder; by default the sources of the standard library.

    Raises:
      UserError: It cannot be read, is not text, is empty or too small.
    """
    text, name = read_text(path)
    pieces = _PIECE.findall(text)
    vocab = make_vocab(pieces, vocab_size)
    tokens = encode(pieces, vocab)
    need = 2 * _BLOCKS * length
    if tokens.size < need:
        raise UserError(
            f"corpus {name} is too small: {len(text)} bytes make {tokens.size} tokens,"
            f" at least {need} are needed for sequences of {length}"
        )
    blocks = np.array_split(tokens, _BLOCKS)
    held_out = blocks[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    train = [b for i, b in enumerate(blocks, 1) if i % _HELD_OUT_EVERY]
    digest = hashlib.sha256(b"\0".join(vocab) + tokens.tobytes()).hexdigest()
    return Corpus(
        name, vocab, np.concatenate(train), np.concatenate(held_out), digest[:16]
    )


def read_text(path: str | None) -> tuple[bytes, str]:
    """The text of a file or of all text files of a folder, and what to call it."""
    root = Path(path if path is not None else sysconfig.get_path("stdlib"))
    try:
        if root.is_dir():
            text = _join(_texts(root, ".py" if path is None else ""))
        else:
            text = _read(root)
    except OSError as error:
        raise UserError(
            f"cannot read corpus {error.filename}: {error.strerror}"
        ) from error
    if not text.strip():
        raise UserError(f"corpus {root} holds no text; --corpus takes a file or folder")
    if b"\0" in text:
        raise UserError(f"corpus {root} is not text: it holds zero bytes")
    cut = f" (its first {MAX_BYTES >> 20} MiB)" if len(text) == MAX_BYTES else ""
    return text, f"{root}{cut}"


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(MAX_BYTES)


def _texts(root: Path, suffix: str) -> Iterator[bytes]:
    for file in sorted(root.rglob("*" + suffix)):
        parts = file.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        skipped = suffix and not _SKIPPED.isdisjoint(parts)
        if not hidden and not skipped and file.is_file():
            text = _read(file)
            if b"\0" not in text:
                yield text


def _join(texts: Iterator[bytes]) -> bytes:
    chosen, size = [], 0
    for text in texts:
        chosen.append(text)
        size += len(text) + 1
        if size > MAX_BYTES:
            break
    return b"\n".join(chosen)[:MAX_BYTES]


def make_vocab(pieces: Sequence[bytes], size: int) -> tuple[bytes, ...]:
    """The bytes, the mask and the most frequent pieces of the text."""
    counts = collections.Counter(p for p in pieces if len(p) > 1)
    words = sorted(counts, key=lambda piece: (-counts[piece], piece))
    singles = [bytes([i]) for i in range(256)]
    return (*singles, b"[MASK]", *words[: size - len(singles) - 1])


def encode(pieces: Sequence[bytes], vocab: Sequence[bytes]) -> np.ndarray:
    """Token ids; a piece that is no word of the vocabulary is spelled in bytes."""
    ids = {word: i for i, word in enumerate(vocab) if i != MASK}
    tokens: list[int] = []
    for piece in pieces:
        token = ids.get(piece)
        tokens.extend(piece) if token is None else tokens.append(token)
    return np.array(tokens, np.int32)


def make_batch(
    tokens: np.ndarray, key: Sequence[int], rows: slice, size: int, length: int
) -> Batch:
    """Some rows of the batch that belongs to `key`.

    Every chosen token is hidden (BERT keeps or replaces a fifth of them), so that no
    prediction can be copied and the entropy of the targets is a fair yardstick.

    Args:
      tokens: The text.
      key: Seed and step; the same key always gives the same batch.
      rows: The rows that this process feeds; they depend on no other process.
      size: Rows of the whole batch.
      length: Tokens of a row.
    """
    random = np.random.default_rng(key)
    starts = random.integers(0, tokens.size - length + 1, size)[rows]
    noise = random.random((size, length))[rows]
    chosen = max(1, round(MASKED_SHARE * length))
    places = np.sort(np.argsort(noise, axis=1)[:, :chosen], axis=1).astype(np.int32)
    batch = tokens[starts[:, None] + np.arange(length)]
    targets = np.take_along_axis(batch, places, axis=1)
    np.put_along_axis(batch, places, MASK, axis=1)
    return Batch(batch, places, targets)


def unigram_entropy(targets: np.ndarray) -> float:
    """Nats per token: the loss of the best guess that looks at no context."""
    counts = np.unique(targets, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())
