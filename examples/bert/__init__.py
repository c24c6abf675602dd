# SPDX-License-Identifier: Apache-2.0
"""The parts of `examples/bert_pretrain.py`, one file for each thing a job needs.

Read `train.py` first: it holds the twenty lines that matter here, the optimizer and
the training step. `model.py` is the BERT, `data.py` turns text into batches, and
`run.py`, `checkpoint.py`, `metrics.py`, `plot.py` and `cli.py` make a job of it.
"""
