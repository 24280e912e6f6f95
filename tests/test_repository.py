"""The rules of the house, as tests: which way imports run, how long a module is, where a hazard may live."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import reshard
from reshard.cli.main import build_parser, parsers_below

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "reshard"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400

# Imports go down this list only.
LAYERS = [
    "cli",
    "cluster",
    "train",
    "dcp",
    "verify",
    "rewrite",
    "engine",
    "formats",
    "plan",
    "index",
    "geometry",
    "processes",
    "storage",
    "batch",
    "environment",
    "errors",
]


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Modules of this package that a module imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("reshard."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "reshard":
            if node.module == "reshard":
                yield from (f"reshard.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_down(path: Path) -> None:
    layer = layer_of(path)
    if layer in ("__init__", "__main__"):
        return
    for name in imports_of(path):
        target = name.split(".")[1]
        if target == "__version__":
            continue
        assert target in LAYERS, f"{path} imports {name}, which is in no layer"
        assert LAYERS.index(layer) <= LAYERS.index(target), f"{path} imports {name}, which is above it"


def test_siblings_do_not_import_in_circles() -> None:
    graph = {module_name(path): set(imports_of(path)) & set(map(module_name, MODULES)) for path in MODULES}
    graph.pop("reshard")
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in finished:
            for target in sorted(graph.get(name, ())):
                visit(target, (*trail, name))
            finished.add(name)

    for name in sorted(graph):
        visit(name, ())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert path.stem not in ("utils", "helpers", "common", "base", "manager")
    if path.name not in ("__init__.py", "__main__.py"):
        assert ast.get_docstring(ast.parse(text)), "no docstring"


def calls_and_names(path: Path) -> set[str]:
    """Dotted names as written, of everything a module mentions or imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Attribute, ast.Name)):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


# What a hazard looks like, and the one place where it may stand.
HAZARDS = {
    "unpickling": (("pickle.load", "pickle.loads", "pickle.Unpickler"), {"formats/unpickle.py"}),
    "environment variables": (("os.environ", "os.getenv", "os.putenv"), {"environment.py"}),
    "signals": (("signal.signal", "signal.sigaction"), {"cluster/signals.py"}),
    "printing": (("print", "sys.stdout", "sys.stdout.write"), {"cli/output.py", "cli/main.py"}),
    "subprocesses": (("subprocess", "subprocess.run", "subprocess.Popen", "os.system"), {"processes.py"}),
}


@pytest.mark.parametrize("hazard", HAZARDS)
def test_a_hazard_lives_in_one_place(hazard: str) -> None:
    names, allowed = HAZARDS[hazard]
    found = {str(path.relative_to(PACKAGE)) for path in MODULES if calls_and_names(path) & set(names)}
    assert found <= allowed


def test_private_torch_symbols_live_in_one_module() -> None:
    found = {}
    for path in MODULES:
        private = {
            name
            for name in calls_and_names(path)
            if name.startswith("torch.") and any(p.startswith("_") and not p.startswith("__") for p in name.split("."))
        }
        if private:
            found[str(path.relative_to(PACKAGE))] = private
    assert found.keys() <= {"dcp/torch_private.py"}, found


def test_torch_loads_weights_only() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert arguments.get("weights_only") == "True", f"{path}:{node.lineno}"


def test_public_names_are_frozen() -> None:
    assert sorted(reshard.__all__) == [
        "BatchPlan",
        "Checkpoint",
        "Checkpointer",
        "ElasticSampler",
        "LoadReport",
        "RecoveryMonitor",
        "ReshardError",
        "Rewarmup",
        "SeededDataset",
        "SlotStreams",
        "StepResult",
        "StopSignal",
        "TraceRow",
        "TraceWriter",
        "TrainState",
        "accumulate",
        "clip_grad_norm_",
        "convert",
        "dcp",
        "describe_flat",
        "exact",
        "export_weights",
        "load_state",
        "open_checkpoint",
        "save_state",
    ]
    for name in reshard.__all__:
        assert getattr(reshard, name).__doc__, f"{name} has no docstring"


def test_the_command_line_is_frozen() -> None:
    options = {
        verb: sorted(option for action in parser._actions for option in action.option_strings if option[:2] == "--")
        for verb, parser in parsers_below(build_parser()).items()
    }
    assert options == {
        "batch": [
            "--debug",
            "--global-batch",
            "--help",
            "--json",
            "--max-micro-batch",
            "--micro-batch",
            "--world-size",
        ],
        "batch-config": [
            "--debug",
            "--global-batch",
            "--help",
            "--json",
            "--keys",
            "--old-world-size",
            "--world-size",
            "--write",
        ],
        "check": ["--debug", "--deep", "--help", "--in", "--json"],
        "compare-traces": ["--column", "--debug", "--epsilon", "--force", "--help", "--json", "--plot"],
        "convert": [
            "--debug",
            "--drop",
            "--dry-run",
            "--dtype",
            "--force",
            "--from",
            "--help",
            "--hf-config",
            "--json",
            "--layout",
            "--memory",
            "--mesh",
            "--model",
            "--only",
            "--param-order",
            "--rename",
            "--tied",
            "--to",
            "--unstack",
            "--weights",
            "--world-size",
            "--wrap",
        ],
        "diff": ["--atol", "--debug", "--help", "--json", "--rtol"],
        "estimate": [
            "--bandwidth",
            "--checkpoint",
            "--config",
            "--debug",
            "--help",
            "--json",
            "--params",
            "--world-size",
        ],
        "inspect": ["--debug", "--help", "--in", "--json", "--tree"],
        "offline": [
            "--debug",
            "--drop",
            "--dry-run",
            "--dtype",
            "--force",
            "--help",
            "--in",
            "--json",
            "--memory",
            "--mesh",
            "--only",
            "--world-size",
        ],
        "prove": [
            "--debug",
            "--epsilon",
            "--folder",
            "--force",
            "--help",
            "--interval",
            "--json",
            "--kill-at",
            "--patience-s",
            "--ranks",
            "--reference",
            "--signal",
            "--steps",
        ],
        "prune": ["--debug", "--dry-run", "--help", "--json", "--keep", "--keep-best", "--keep-every"],
        "slurm": ["--debug", "--help"],
        "slurm render": ["--config", "--debug", "--help"],
        "slurm submit": ["--chain", "--config", "--debug", "--dry-run", "--help", "--json"],
        "slurm wrap": [
            "--debug",
            "--fall-back",
            "--forward",
            "--help",
            "--max-failures",
            "--poll-s",
            "--ranks",
            "--run",
        ],
        "triage": [
            "--checkpoint",
            "--column",
            "--debug",
            "--force",
            "--help",
            "--json",
            "--plot",
            "--reference",
            "--resume-step",
        ],
    }


def test_importing_the_package_and_the_command_line_does_not_import_torch() -> None:
    code = "import reshard, reshard.cli.main, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
