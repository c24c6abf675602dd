# SPDX-License-Identifier: Apache-2.0
"""What users may rely on: names, examples, types, and that nothing private is used."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import optax
import pytest
from hatchling.builders.wheel import WheelBuilder

import optax_npu

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "optax_npu").glob("*.py"))
CODE = [
    path
    for folder in ("optax_npu", "tests", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

CONTRACT = [
    "AlreadyReducedWarning",
    "BucketPlan",
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "HierarchicalCopyAllReduce",
    "LossScaleError",
    "LossScaleState",
    "ReduceOp",
    "accumulate_gradients",
    "apply_gradients",
    "assert_replicas_equal",
    "assert_tail_overlap",
    "backward_order",
    "broadcast_from",
    "bucket_plan",
    "chain",
    "check_health",
    "exclude_from_weight_decay",
    "explain",
    "get_loss_scale",
    "hierarchical_all_reduce",
    "hierarchical_pmean",
    "hierarchical_psum",
    "keep_if_applied",
    "local_params",
    "loss_scale_metrics",
    "loss_scale_preset",
    "npu_distributed_optimizer",
    "npu_loss_scale",
    "npu_loss_scale_optimizer",
    "npu_optimizer",
    "scale_loss",
    "scaled_value_and_grad",
    "schedule_report",
    "skip_on_overflow",
    "tail_lint",
    "two_level_mesh",
]

# What the library makes and users read: documented field by field, without an example.
RESULTS = {
    "AccumulationState",
    "BucketPlan",
    "CollectiveRow",
    "Explanation",
    "LossScaleState",
    "NPUOptimizerState",
    "ScheduleReport",
    "TailFinding",
}

# Names of the loss scale and of the transformations that design and docs show.
SIGNATURES = {
    "DynamicLossScale": ("initial_loss_scale", "increment_period", "multiplier"),
    "FixedLossScale": ("loss_scale",),
    "ExponentialUpdateLossScaleManager": (
        "init_loss_scale",
        "incr_every_n_steps",
        "decr_every_n_nan_or_inf",
        "incr_ratio",
        "decr_ratio",
    ),
    "FixedLossScaleManager": ("loss_scale", "enable_overflow_check"),
    "npu_loss_scale": ("loss_scale",),
    "npu_optimizer": (
        "opt",
        "loss_scale_manager",
        "is_distributed",
        "is_loss_scale",
        "is_tailing_optimization",
        "name",
    ),
    "npu_loss_scale_optimizer": ("opt", "loss_scale_manager", "is_distributed"),
    "scaled_value_and_grad": ("fun", "opt_state", "argnums", "has_aux"),
    "scale_loss": ("loss", "opt_state"),
    "apply_gradients": ("tx", "params", "grads", "opt_state"),
    "keep_if_applied": ("opt_state", "new_tree", "old_tree"),
    "HierarchicalCopyAllReduce": ("num_packs",),
    "broadcast_from": ("tree", "axis_name", "root"),
    "assert_replicas_equal": ("tree", "axis_name"),
    "two_level_mesh": ("devices",),
}


def exported() -> dict[str, object]:
    """The public names that are no modules."""
    return {
        name: value
        for name, value in vars(optax_npu).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


@pytest.mark.parametrize("name", CONTRACT)
def test_every_name_of_the_contract_is_exported(name):
    assert name in exported()


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_keep_their_names_and_places(name):
    positional = [
        p.name
        for p in inspect.signature(getattr(optax_npu, name)).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert tuple(positional) == SIGNATURES[name]


def test_state_fields_start_as_agreed():
    assert optax_npu.LossScaleState._fields[:6] == (
        "loss_scale",
        "good_steps",
        "bad_steps",
        "found_inf",
        "skipped_steps",
        "consecutive_skips",
    )


def test_transformations_take_extra_arguments():
    made = [
        optax_npu.npu_loss_scale(),
        optax_npu.chain(optax.sgd(1.0)),
        optax_npu.skip_on_overflow(optax.sgd(1.0)),
        optax_npu.hierarchical_all_reduce("data"),
        optax_npu.npu_optimizer(optax.sgd(1.0)),
        optax_npu.npu_loss_scale_optimizer(optax.sgd(1.0), 8.0),
        optax_npu.npu_distributed_optimizer(optax.sgd(1.0), axis_name="data"),
        optax_npu.accumulate_gradients(optax.sgd(1.0), 2),
    ]
    assert all(isinstance(tx, optax.GradientTransformationExtraArgs) for tx in made)


@pytest.mark.parametrize("name", sorted(exported()))
def test_every_public_name_is_documented(name):
    """The examples themselves run as doctests of the package."""
    value = exported()[name]
    text = inspect.getdoc(value) or ""
    assert value.__doc__
    assert len(text) > 40
    if isinstance(value, type) and issubclass(value, Exception):
        return
    if name in RESULTS:
        assert "Attributes:" in text
    else:
        assert "Example:\n" in text
        assert ">>> " in text
    assert "Args:\n  x: TODO" not in text


def test_exports_are_sorted_explicit_and_unique():
    tree = ast.parse((ROOT / "optax_npu" / "__init__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(tree.body) - 1, "re-exports and a docstring, only"
    assert all(alias.asname == alias.name for i in imports for alias in i.names)
    names = [alias.name for i in imports for alias in i.names]
    modules = [str(i.module) for i in imports]
    assert len(names) == len(set(names))
    assert modules == sorted(modules)
    assert set(names) == set(exported())


def imports_of(path: Path) -> list[tuple[str, int]]:
    """(module, column) of every import; column 0 is at the top level."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.col_offset) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append((str(node.module), node.col_offset))
            found += [(f"{node.module}.{a.name}", node.col_offset) for a in node.names]
    return found


def test_no_private_module_of_jax():
    for path in CODE:
        private = [m for m, _ in imports_of(path) if m.startswith("jax._")]
        assert not private, path
        if path.name != Path(__file__).name:
            assert "jax._src" not in path.read_text(), path


def test_only_compat_knows_versions():
    for path in PACKAGE:
        if path.name != "_compat.py":
            text = path.read_text()
            assert "jax.__version" not in text, path
            assert "jaxlib" not in text, path


def test_runtime_needs_jax_and_optax_only():
    allowed = {"jax", "jaxlib", "numpy", "optax", "optax_npu", *sys.stdlib_module_names}
    for path in PACKAGE:
        for module, column in imports_of(path):
            package = module.partition(".")[0]
            if package == "matplotlib" and path.name == "_plot.py":
                assert column > 0, "matplotlib is an extra: imported when it is needed"
            else:
                assert package in allowed, (path, module)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["jax>=0.10.0", "optax>=0.2.8"]


def test_importing_starts_no_backend_and_brings_no_extra():
    code = (
        "import sys, jax; from jax.extend import backend; import optax_npu;"
        "jax.config.update('jax_num_cpu_devices', 3);"  # fails once a backend is up
        "extras = 'matplotlib flax orbax tensorboardX tqdm chex'.split();"
        "before = [m for m in extras if m in sys.modules];"
        "assert not [m for m in before if m != 'chex'], before;"
        "assert jax.device_count() == 3"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_the_wheel_holds_the_package_and_its_type_marker():
    files = {
        f.distribution_path for f in WheelBuilder(str(ROOT)).recurse_project_files()
    }
    files = {Path(f).as_posix() for f in files}
    assert "optax_npu/py.typed" in files
    assert {f"optax_npu/{path.name}" for path in PACKAGE} <= files
    assert all(f.startswith("optax_npu/") for f in files)


def test_text_files_name_no_machine():
    folder = "|".join(("work", "root", "home", "Users", "mnt", "workspace"))
    machine = re.compile(rf"(?<![\w.<-])/(?:{folder})/\w")
    assert machine.search(" /".join(("", "home/me")))
    suffixes = {".py", ".md", ".toml", ".svg", ".sh", ".yml", ".yaml", ".cfg", ""}
    folders = ("optax_npu", "tests", "examples", "benchmarks", "docs", "scripts", ".ci")
    paths = [p for p in ROOT.iterdir() if p.is_file()]
    for folder in folders:
        paths += (ROOT / folder).rglob("*")
    for path in paths:
        if (
            not path.is_file()
            or path.suffix not in suffixes
            or path.name == ".coverage"
        ):
            continue
        found = machine.search(path.read_text(errors="replace"))
        assert not found, f"{path.relative_to(ROOT)} names {found and found[0]!r}"
