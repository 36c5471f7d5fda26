"""The layers of the design: who may import whom, and what must not be loaded."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dshuffle
from dshuffle.planning.assignment import ASSIGNMENTS
from dshuffle.planning.delivery import DELIVERIES

PACKAGE = Path(dshuffle.__file__).parent

# A module imports from its own package and from rows above it, never from another package of its own row.
ROWS = [
    {"private_files", "redaction"},
    {"errors", "numba_support"},
    {"checks", "kernels", "lazy_names", "notebook", "process_exit", "process_state", "units"},
    {"encodings", "noninferiority"},
    {"emulated_links", "rows", "synthetic"},
    {"planning", "coding"},
    {"records"},
    {"store", "exchange", "sharding", "report", "integrations"},
    {"runtime"},
    {"training", "launched"},
    {"compare"},
    {"pipeline"},
    {"cli"},
    {"__main__"},
]
ROW = {name: row for row, names in enumerate(ROWS) for name in names}
MODULES = {
    ".".join(("dshuffle", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def forget_trees():
    """A million nodes, which every later collection of garbage would visit."""
    yield
    tree_of.cache_clear()


@functools.cache
def imports(path: Path, *, types: bool = False) -> list[tuple[str, ast.AST | None]]:
    """Modules that a file imports, each with the function that hides the import, if any.

    ``importlib.import_module`` of a constant is an import too, but may stand in a function: it loads optional extras.
    With ``types``, also what is imported for type checkers only, except the lazy names of a package.
    """
    text = path.read_text()
    found: list[tuple[str, ast.AST | None]] = [
        (name, None) for name in re.findall(r'import_module\("([^"{]+)"\)', text)
    ]

    def visit(node: ast.AST, function: ast.AST | None) -> None:
        for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if for_types and (not types or path.name == "__init__.py"):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node
        if isinstance(node, ast.Import):
            found.extend((alias.name, function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append((name if name in MODULES else str(node.module), function))
        for part_of in ("body", "orelse", "handlers", "finalbody", "cases"):  # statements, but no expressions
            children = getattr(node, part_of, None)
            for child in children if isinstance(children, list) else ():
                visit(child, function)

    visit(tree_of(path), None)
    return found


def part(module: str) -> str | None:
    """The package or module below ``dshuffle`` to which a module belongs."""
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "dshuffle" and len(pieces) > 1 else None


def test_every_part_has_a_row():
    assert {part(module) for module in MODULES} - {None} <= set(ROW)
    assert len(MODULES) > 30


def test_imports_go_up_the_rows():
    down = [
        f"{module} imports {target}"
        for module in set(MODULES) - {"dshuffle"}
        for target, _ in imports(MODULES[module])
        if part(target) not in (None, part(module)) and ROW[part(target)] >= ROW[part(module)]
    ]
    assert down == []


# The folders of `runtime` say where code runs. Its files are for all participants, and import none of the folders.
SIDES: dict[str, set[str]] = {
    "": set(),
    "worker": {""},
    "scheduler": {"", "worker"},  # the scheduler plugin sends the workers theirs
    "client": {"", "worker", "scheduler", "measure"},
    "measure": {"", "client"},
    "gather": {"", "client"},
}


def side(module: str) -> str | None:
    """The folder of `runtime` in which a module is; empty for its files."""
    pieces = module.split(".")
    if pieces[:2] != ["dshuffle", "runtime"] or len(pieces) == 2:
        return None
    return pieces[2] if pieces[2] in SIDES else ""


def test_sides_of_a_session_import_what_they_may():
    sideways = [
        f"{module} imports {target}"
        for module, path in MODULES.items()
        if (own := side(module)) is not None
        for target, _ in imports(path)
        if side(target) not in {None, own, *SIDES[own]}
    ]
    assert sideways == []


def test_every_folder_of_the_runtime_is_a_side():
    folders = {path.parent.name for path in (PACKAGE / "runtime").glob("*/__init__.py")}
    assert folders == set(SIDES) - {""}


def test_no_import_hides_in_a_function():
    """But in commands, whose help is fast because what does their work is imported when they run."""
    hidden = [
        f"{module}.{where.name} imports {name}"
        for module, path in MODULES.items()
        for name, where in imports(path)
        if where is not None and part(module) != "cli"
    ]
    assert hidden == []


def test_no_import_circles():
    edges = {
        module: {target for target, _ in imports(path, types=True) if target in MODULES and target != module}
        for module, path in MODULES.items()
    }
    edges["dshuffle"] = set()  # its names are lazy
    done: set[str] = set()

    def walk(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for target in edges[module]:
                walk(target, (*above, module))
            done.add(module)

    for module in edges:
        walk(module, ())


PURE = {"numpy", "numba", "scipy", "dshuffle"} | set(sys.stdlib_module_names)


def test_planning_is_pure():
    parts = {
        "planning",
        "coding",
        "kernels",
        "private_files",
        "numba_support",
        "rows",
        "errors",
        "records",
        "checks",
        "units",
        "redaction",
    }
    parts |= {"noninferiority"}
    impure = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name, _ in imports(path)
        if part(module) in parts and name.split(".")[0] not in PURE
    ]
    assert parts <= {part(module) for module in MODULES}
    assert impure == []


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("dshuffle.runtime.scheduler.machine")])
def test_the_session_machine_is_pure(module):
    """It knows no Dask, no clock and no driver."""
    names = {name for name, _ in imports(MODULES[module])}
    assert {name.split(".")[0] for name in names} <= PURE - {"asyncio", "time"}
    runtime = {name for name in names if name.startswith("dshuffle.runtime.")}
    assert all(name.startswith(("dshuffle.runtime.messages", "dshuffle.runtime.scheduler.machine")) for name in runtime)


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("zarr", {"store"}),
        ("sklearn", {"sharding", "training"}),  # ShuffledSGD alone
        ("click", {"cli"}),
        ("numba", {"numba_support"}),
    ],
)
def test_a_library_has_its_place(library, places):
    users = {part(m) for m, path in MODULES.items() for name, _ in imports(path) if name.split(".")[0] == library}
    assert users
    assert users <= places


def test_one_file_calls_rpc():
    """Sample bytes cross the network in `exchange/comms.py` alone."""
    users = {m for m, path in MODULES.items() if "worker.rpc(" in path.read_text()}
    assert users == {"dshuffle.exchange.comms"}


def compared_names(path: Path) -> list[str]:
    """Constant strings that a file compares something with, or looks for something in."""
    found = []
    for node in ast.walk(tree_of(path)):
        values: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            values = [node.value]
        for value in values:
            inner = value.elts if isinstance(value, ast.Tuple | ast.List | ast.Set) else [value]
            found += [one.value for one in inner if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return found


# Words of a cost model's resources that deliveries share.
RESOURCES = {"dshuffle.planning.cost": {"storage"}}


def test_no_module_tests_names_of_deliveries_or_assignments():
    """What others have to know is in the records: see `Delivery` and `Assignment`."""
    registered = DELIVERIES.keys() | ASSIGNMENTS.keys()
    registries = ("dshuffle.planning.delivery", "dshuffle.planning.assignment")
    compared = [
        f"{module} compares something with {name!r}"
        for module, path in MODULES.items()
        if not module.startswith(registries)
        for name in compared_names(path)
        if name in registered - RESOURCES.get(module, set())
    ]
    assert compared == []


PUBLIC_MODULES = {
    "dshuffle.errors",
    "dshuffle.synthetic",
    "dshuffle.units",
    "dshuffle.training.torch_ddp",
}
PIPELINES = sorted((Path(__file__).parents[1] / "pipelines").rglob("*.py"))


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.name)
def test_pipelines_use_public_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dshuffle"):
            names = {alias.name for alias in node.names}
            if node.module not in PUBLIC_MODULES:
                home = importlib.import_module(str(node.module))
                assert names <= set(home.__all__), f"{node.module}: {names}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import dshuffle", ["dask", "distributed", "zarr", "numba", "bokeh"]),
        ("import dshuffle.planning", ["dask", "distributed", "zarr", "numba", "bokeh"]),
        ("import dshuffle.cli", ["dask", "distributed", "zarr", "numba", "bokeh"]),
        (
            "import dshuffle.runtime.worker.worker_plugin",
            ["dask.array", "numba", "pandas", "scipy", "sklearn", "xarray", "bokeh"],
        ),
    ],
)
def test_an_import_stays_light(statement, absent):
    code = f"{statement}; import sys; print([name for name in {absent!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["dshuffle", "dshuffle.runtime"])
def test_the_table_of_names_is_what_type_checkers_see(package):
    [block] = [
        node
        for node in ast.parse(MODULES[package].read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    lazy = importlib.import_module(package)
    seen = {
        (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None or alias.name in lazy.__all__  # a name for others
    }
    assert seen == {(home, name) for name, home in lazy._HOMES.items()}
    for name in lazy.__all__:
        assert getattr(lazy, name) is not None
        assert f"{package}.{name}" not in MODULES, "the module would take the place of the name once it is imported"


def test_public_names_exist():
    for name in dshuffle.__all__:
        assert getattr(dshuffle, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        dshuffle.no_such_name  # noqa: B018
