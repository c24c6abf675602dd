# SPDX-License-Identifier: Apache-2.0
"""Pre-trains a small BERT on real text: half precision, LAMB, dynamic loss scale.

    python examples/bert_pretrain.py                      # minutes on two CPU cores
    python examples/bert_pretrain.py --resume             # goes on, bit for bit
    python examples/bert_pretrain.py --distributed        # on eight simulated devices
    python examples/bert_pretrain.py --corpus ~/my/texts  # any text file or folder

On a GPU, "bit for bit" needs XLA_FLAGS=--xla_gpu_deterministic_ops=true.

The first steps overflow float16 on purpose: the loss scale starts high, each overflow
is skipped completely and halves it. `bert/train.py` shows how little that takes.
"""

import sys

from bert.cli import main

if __name__ == "__main__":
    sys.exit(main())
