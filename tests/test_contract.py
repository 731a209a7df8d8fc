"""The private parts of TRL, transformers and accelerate that we rely on are there, and all are listed."""

import ast
import configparser
import importlib
import inspect
from pathlib import Path

import pytest
from conftest import config, team
from trl import GRPOTrainer

from hacpo_trl import _contract
from hacpo_trl.trainer import HACPOTrainer

ROOT = Path(__file__).parent.parent


def resolve(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, names in _contract.METHODS.items() for n in names])
def test_methods_take_the_arguments_that_we_know(owner, name):
    method = getattr(resolve(owner), name, None)
    assert method is not None, f"{owner}.{name} is gone: hacpo_trl has to find another seam"
    parameters = [p for p in inspect.signature(method).parameters if p != "self"]
    expected = list(_contract.METHODS[owner][name])
    assert parameters[: len(expected)] == expected, f"{owner}.{name} takes {parameters} now, not {expected}"


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in _contract.FUNCTIONS.items() for n in names])
def test_functions_are_where_we_import_them(module, name):
    assert hasattr(importlib.import_module(module), name), f"{module}.{name} is gone"


def test_attributes_exist(agent_folders, tmp_path):
    trainer = team(agent_folders, ["char"], config(tmp_path))
    for name in _contract.ATTRIBUTES:
        assert hasattr(trainer, name), f"a trainer has no {name} any more"


@pytest.mark.parametrize("file", ["agent.py", "completions.py", "trainer.py"])
def test_every_private_name_is_listed(file):
    listed = {name for names in _contract.METHODS.values() for name in names} | set(_contract.ATTRIBUTES)
    source = ast.parse((ROOT / "hacpo_trl" / file).read_text())
    used = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    defined = {node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}
    private = {name for name in used | defined if name.startswith("_") and not name.startswith("__")}
    parents = GRPOTrainer.__mro__
    of_parents = {name for name in private if any(name in vars(parent) for parent in parents)}
    assert of_parents - listed == set(), f"{file} uses private names that _contract.py does not list"


def test_nothing_of_the_parent_is_hidden_by_accident():
    """What we define and TRL defines, too, is an override on purpose: listed, or public."""
    listed = {name for names in _contract.METHODS.values() for name in names}
    for cls in HACPOTrainer.__mro__[:2]:
        for name in vars(cls):
            if not name.startswith("__") and any(name in vars(parent) for parent in GRPOTrainer.__mro__):
                known = listed | {
                    "train",
                    "evaluate",
                    "log",
                    "save_model",
                    "create_model_card",
                    "init_hf_repo",
                    "push_to_hub",
                    "get_train_dataloader",
                    "training_step",
                }
                assert name in known | {"_tag_names", "_name", "_paper"}, name


def test_tested_versions_are_those_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    requirements = setup["options"]["install_requires"].split()
    for package, tested in _contract.TESTED.items():
        assert f"{package}{tested}" in requirements


def test_other_versions_are_warned_of(monkeypatch):
    monkeypatch.setattr(_contract, "version", lambda package: "9.9.9")
    with pytest.warns(UserWarning, match="9.9.9 is installed"):
        _contract.check_versions()
