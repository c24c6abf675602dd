# SPDX-License-Identifier: Apache-2.0
"""From the command line to an exit code."""

import logging
import sys

from .errors import UserError

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Runs the job.

    Returns:
      0 when it ended or was stopped and saved, 1 when training failed, 2 for bad
      input, 130 when a second Ctrl-C stopped it at once.
    """
    # Imported here, so that even Ctrl-C while JAX loads is a line and no traceback.
    try:
        from .options import parse

        given = parse(arguments)
        logging.getLogger("absl").setLevel(logging.ERROR)
        from optax_npu import LossScaleError

        from .run import run
    except UserError as error:
        return _tell(error, BAD_INPUT)
    except ModuleNotFoundError as error:
        needed = "python -m pip install 'optax-npu[examples]'"
        return _tell(f"{error.name} is not installed: {needed}", BAD_INPUT)
    except KeyboardInterrupt:
        return _tell("interrupted before the first step", INTERRUPTED)
    try:
        run(given)
    except UserError as error:
        return _tell(error, BAD_INPUT)
    except OSError as error:
        return _tell(f"{error.filename or ''}: {error.strerror or error}", BAD_INPUT)
    except LossScaleError as error:
        return _tell(error, FAILED)
    except KeyboardInterrupt:
        return _tell("interrupted; --resume goes on from the last save", INTERRUPTED)
    return DONE


def _tell(error: object, code: int) -> int:
    print(f"bert_pretrain.py: {error}", file=sys.stderr, flush=True)
    return code
