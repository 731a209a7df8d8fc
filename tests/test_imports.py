"""Imports of the package go one way: from the command line down to the equations, with no circle."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hacpo_trl"

# A room imports rooms that stand before it, and modules of its own
ORDER = """_version _contract objective capability methods texts rollouts maths sampling memory playground evaluation
reporting setting_types config hub training cli""".split()

MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def imported(module, source):
    """The package's modules that one imports anywhere: inside functions and for type checking, too."""
    parents = module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("hacpo_trl")):
            start = parents[: len(parents) - node.level + 1] if node.level else []
            names = (node.module or "").removeprefix("hacpo_trl").strip(".").split(".") if node.module else []
            target = [*start, *filter(None, names)]
            for alias in node.names:  # "from . import x" names a module, or something of the package itself
                below = ".".join([*target, alias.name])
                found.add(below if below in MODULES else ".".join(target) or "__init__")
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] or "__init__" for alias in node.names if is_ours(alias.name)}
    return {f"{name}.__init__" if f"{name}.__init__" in MODULES else name for name in found}


def is_ours(name):
    return name == "hacpo_trl" or name.startswith("hacpo_trl.")


GRAPH = {module: imported(module, path.read_text(encoding="utf-8")) for module, path in MODULES.items()}


def wrong(graph):
    """The imports against the order of the rooms. The package's own `__init__` is above all of them."""
    place = {room: number for number, room in enumerate([*ORDER, "__init__"])}
    found = []
    for module, targets in graph.items():
        for target in targets:
            room, other = module.split(".")[0], target.split(".")[0]
            if room != other and place[other] >= place[room]:
                found.append(f"{module} imports {target}")
    return found


def circles(graph):
    """Every module that reaches itself."""
    reached = {module: set(targets) for module, targets in graph.items()}
    for middle in graph:
        for module in graph:
            if middle in reached[module]:
                reached[module] |= reached.get(middle, set())
    return sorted(module for module in graph if module in reached[module])


def test_every_room_has_its_place():
    assert {module.split(".")[0] for module in MODULES} == {*ORDER, "__init__"}
    assert all(targets <= MODULES.keys() for targets in GRAPH.values())


def test_imports_go_one_way():
    assert not wrong(GRAPH)


def test_no_module_imports_itself_over_others():
    assert not circles(GRAPH)


def test_the_equations_need_torch_only():
    for path in (MODULES["objective"], MODULES["capability"], MODULES["rollouts"]):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(("import", "from"))]
        assert not [line for line in lines if line.split()[1].split(".")[0] in ("transformers", "trl", "accelerate")]


@pytest.mark.parametrize(
    "source",
    [
        "from ..training.trainer import HACPOTrainer",
        "from ..training import trainer",
        "import hacpo_trl.training.trainer",
        "from hacpo_trl.training.trainer import HACPOTrainer",
        "if TYPE_CHECKING:\n    from ..training.trainer import HACPOTrainer",
        "def late():\n    from ..training.trainer import HACPOTrainer",
        "from .. import HACPOTrainer",
    ],
)
def test_the_check_sees_every_form(source):
    graph = {**GRAPH, "hub.card": GRAPH["hub.card"] | imported("hub.card", source)}
    assert wrong(graph) and "hub.card" in circles(graph)
