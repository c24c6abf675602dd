# SPDX-License-Identifier: Apache-2.0
"""Loss scaling, two-level gradient all-reduce and tail hiding for Optax."""
