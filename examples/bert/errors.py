# SPDX-License-Identifier: Apache-2.0
"""What the user can put right, told in one line."""


class UserError(Exception):
    """Bad input: printed as one line on stderr, exit code 2, nothing written."""
