# SPDX-License-Identifier: Apache-2.0
"""The table of field trials is complete, and every test in it exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "trials.md").read_text()
TRIALS = re.findall(
    r"B\d\d",
    "B01 B02 B04 B05 B06 B07 B09 B10 B11 B12 B15 B17 B18 B20 B21 B23 B24 B26 B27 B28"
    " B29 B30 B32 B34 B35 B36 B38 B40 B42 B44 B45 B46 B47 B48 B49 B50 B52 B53 B56 B58"
    " B62 B63 B64 B66 B68 B69 B70 B72 B73 B74 B75",
)


def rows() -> dict[str, list[str]]:
    """Trial -> the tests named in its row."""
    found = re.findall(r"^\| (B\d\d) \|.*\|(.*)\|$", TABLE, re.MULTILINE)
    assert len(found) == len(dict(found)), "a trial has two rows"
    return {trial: re.findall(r"`([^`]+)`", cell) for trial, cell in found}


def defined(name: str) -> set[str]:
    """The test functions of a file."""
    tree = ast.parse((TESTS / name).read_text())
    functions = (x for x in tree.body if isinstance(x, ast.FunctionDef))
    return {f.name for f in functions if f.name.startswith("test_")}


def test_every_trial_has_a_row_with_a_test():
    assert list(rows()) == TRIALS
    assert [trial for trial, tests in rows().items() if not tests] == []


def test_every_test_of_the_table_exists_and_names_its_trial():
    files: dict[str, set[str]] = {}
    for trial, tests in rows().items():
        for test in tests:
            name, _, function = test.partition("::")
            assert function in files.setdefault(name, defined(name)), test
            assert re.search(rf"_{trial}(_|$)", function), (trial, test)


def test_names_of_tests_cite_known_trials_only():
    for path in TESTS.glob("test_*.py"):
        for function in defined(path.name):
            cited = re.findall(r"_(B\d\d)(?=_|$)", function)
            assert set(cited) <= set(TRIALS), (path.name, function)
