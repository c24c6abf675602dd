# SPDX-License-Identifier: Apache-2.0
"""The README and the documents: every block runs, every name and link exists."""

import ast
import contextlib
import inspect
import io
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

import optax_npu

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCS]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str, int]]:
    """(language, text, line) of every fenced block."""
    return [
        (m[2], textwrap.dedent(m[3]), text.count("\n", 0, m.start(3)) + 1)
        for m in BLOCK.finditer(text)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_block_runs_and_prints_what_stands_below_it(name):
    """In order, in one namespace; a `text` block is the output of the one above."""
    found = blocks((ROOT / name).read_text())
    names: dict = {"__name__": "documentation"}
    printed = None
    for language, text, line in found:
        if language == "python":
            code = compile("\n" * (line - 1) + text, name, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            printed = out.getvalue()
        elif language == "text":
            assert printed is not None, f"{name}:{line} is the output of nothing"
            assert printed.split() == text.split(), f"{name}:{line}"
            printed = None
    if name == "README.md":
        assert sum(language == "python" for language, _, _ in found) == 2


def test_the_quick_start_is_short_and_shows_a_skip():
    (_, code, _), (_, output, _) = [
        block
        for block in blocks((ROOT / "README.md").read_text())
        if block[0] in ("python", "text")
    ][:2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    assert "SKIPPED" in output
    assert "applied" in output


@pytest.mark.parametrize("name", NAMES)
def test_names_and_links_exist(name):
    text = (ROOT / name).read_text()
    for symbol in re.findall(r"\boptax_npu\.([a-zA-Z]\w*)", text):
        assert hasattr(optax_npu, symbol), symbol
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        if "://" not in target:
            assert (ROOT / name).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_calls_in_running_text_and_tables_are_possible(name):
    """`f(..., argument=1)` in a code span: f takes such an argument."""
    text = BLOCK.sub("", (ROOT / name).read_text())
    checked = 0
    for span in re.findall(r"`([^`\n]+)`", text):
        try:
            tree = ast.parse(span.strip())
        except SyntaxError:
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = ast.unparse(call.func).removeprefix("optax_npu.")
            if not hasattr(optax_npu, function):
                continue
            given = {k.arg: k.value for k in call.keywords if k.arg}
            parameters = inspect.signature(getattr(optax_npu, function)).parameters
            if function == "loss_scale_preset":
                code = ast.unparse(call)
                if "..." not in code and "NAME" not in code:
                    assert eval(code, dict(vars(optax_npu))), span
            else:
                assert set(given) <= set(parameters), span
            checked += 1
    if name == "docs/coming-from.md":
        assert checked > 60


def test_make_and_modules_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert f"\n{target}: " in makefile
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert ROOT.joinpath(*module.split(".")).with_suffix(".py").exists(), module
    for script in re.findall(r"\bexamples/\w+\.py", text):
        assert (ROOT / script).exists(), script


def test_the_table_of_versions_is_that_of_the_project():
    readme = (ROOT / "README.md").read_text()
    oldest = dict(re.findall(r"^\| (Python|JAX|Optax) \| ([\d.]+) \|", readme, re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    jax, optax = project["dependencies"]
    assert project["requires-python"] == f">={oldest['Python']}"
    assert (jax, optax) == (f"jax>={oldest['JAX']}", f"optax>={oldest['Optax']}")
    floor = f"jax=={oldest['JAX']} jaxlib=={oldest['JAX']} optax=={oldest['Optax']}"
    assert f"suite {oldest['Python']} {floor}" in (ROOT / ".ci" / "run").read_text()
