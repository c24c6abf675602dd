# SPDX-License-Identifier: Apache-2.0
"""Real processes on this machine: how they are started, and what they run."""
