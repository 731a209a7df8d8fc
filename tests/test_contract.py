"""The private parts of other packages that we rely on are there, and all are listed."""

import ast
import configparser
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from support.tiny_teams import config, team
from trl import GRPOTrainer

from hacpo_trl import _contract
from hacpo_trl.training.trainer import HACPOTrainer

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


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, names in _contract.MEMBERS.items() for n in names])
def test_members_exist(owner, name):
    cls = resolve(owner)
    known = hasattr(cls, name) or any(name in inspect.getsource(parent) for parent in cls.__mro__[:-1])
    assert known, f"{owner}.{name} is gone"


@pytest.mark.parametrize(("file", "texts"), _contract.SOURCES.items())
def test_sources_say_what_we_rely_on(file, texts):
    package, path = file.split("/", 1)
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    source = (Path(spec.submodule_search_locations[0]) / path).read_text()
    assert [text for text in texts if text not in source] == [], f"{file} has changed"


def test_attributes_exist(agent_folders, tmp_path):
    trainer = team(agent_folders, ["char"], config(tmp_path))
    for name in _contract.ATTRIBUTES:
        assert hasattr(trainer, name), f"a trainer has no {name} any more"


@pytest.mark.parametrize("vllm", [False, True])
def test_trl_makes_no_log_probability_pass_while_an_agent_samples(monkeypatch, agent_folders, tmp_path, vllm):
    args = config(tmp_path, beta=0.1, num_iterations=2)
    trainer = team(agent_folders, ["char"], args)
    if vllm:  # what TRL decides by; the responses come from generate all the same
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        single_turn = type(trainer)._generate_single_turn

        def sampled(*args, **kwargs):
            trainer.use_vllm = False
            ids, _ = single_turn(trainer, *args, **kwargs)
            trainer.use_vllm = True
            return ids, [[-1.0] * len(tokens) for tokens in ids]

        monkeypatch.setattr(trainer, "_generate_single_turn", sampled)

    def forbidden(*args, **kwargs):
        raise AssertionError("TRL computes log-probabilities, in another micro-batch than the update's")

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", forbidden)
    before = {name: getattr(trainer, name) for name in _contract.STEERS_LOGP_PASSES}
    rollout = trainer.sample(next(iter(trainer.get_train_dataloader())))
    assert len(rollout) == 8 and (rollout.sampled_logps is not None) == vllm
    assert {name: getattr(trainer, name) for name in _contract.STEERS_LOGP_PASSES} == before


# Overrides of what TRL and transformers document
PUBLIC = set(
    """train evaluate log save_model create_model_card init_hf_repo push_to_hub get_train_dataloader training_step
    hyperparameter_search
    _tag_names _name _paper""".split()
)
PARENTS = GRPOTrainer.__mro__
OURS = HACPOTrainer.__mro__[: HACPOTrainer.__mro__.index(GRPOTrainer)]
LISTED = {name for names in _contract.METHODS.values() for name in names} | set(_contract.ATTRIBUTES)
LISTED |= {name for names in _contract.MEMBERS.values() for name in names}
LISTED |= {name for texts in _contract.SOURCES.values() for text in texts for name in re.findall(r"\w+", text)}


def of_parents(names):
    return {name for name in names if any(name in vars(parent) for parent in PARENTS)}


def private_names(source):
    """Names of one underscore that a module reads from an object, or that its classes define."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names |= {item.name for cls in classes for item in cls.body if isinstance(item, ast.FunctionDef)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def defined_names(source):
    """Private names that a module gives: of functions, classes, variables and attributes of its own objects."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


FILES = sorted((ROOT / "hacpo_trl").rglob("*.py"))
DEFINED = set().union(*(defined_names(path.read_text()) for path in FILES))
DEFINED |= {"_exit", "_replace"}  # Python documents them


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_private_name_is_listed(path):
    names = private_names(path.read_text())
    unlisted = (of_parents(names) | (names - DEFINED)) - LISTED - PUBLIC
    assert not unlisted, f"{path.name} uses private names that _contract.py does not list: {sorted(unlisted)}"


@pytest.mark.parametrize("path", sorted((ROOT / "hacpo_trl").rglob("*.py")), ids=lambda path: path.stem)
def test_no_class_defines_a_method_twice(path):
    """The second one silently replaces the first, and ruff does not look at private names."""
    for cls in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
        names = [f.name for f in cls.body if isinstance(f, ast.FunctionDef) and not f.decorator_list]
        assert len(names) == len(set(names)), f"{cls.name}: {sorted(n for n in names if names.count(n) > 1)}"


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_nothing_of_the_parent_is_hidden_by_accident(cls):
    """What we define and TRL defines, too, is an override on purpose: listed, or public."""
    overrides = of_parents(name for name in vars(cls) if not name.startswith("__"))
    assert not overrides - LISTED - PUBLIC, (
        f"{cls.__name__} hides names of its parents that _contract.py does not list"
    )


def test_the_check_sees_all_overrides():
    """It had lost its grip: it looked at the first two classes only."""
    found = {cls.__name__: of_parents(name for name in vars(cls) if not name.startswith("__")) for cls in OURS}
    assert {"HACPOTrainer", "HACPOAgent"} <= found.keys() and len(OURS) == len(set(OURS)) >= 2
    for override in (
        "_compute_loss",
        "_save_checkpoint",
        "_load_best_model",
        "_prepare_for_training",
        "log",
        "evaluate",
    ):
        assert any(override in names for names in found.values()), override
    assert not {"_rebuild_buckets", "_tied_weights_keys", "_reset_state"} & DEFINED
    assert private_names("class A:\n    def _compute_loss(self): self._step + self.__x + x._y") == {
        "_compute_loss",
        "_step",
        "_y",
    }


def test_tested_versions_are_those_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    requirements = setup["options"]["install_requires"].split()
    for package, tested in _contract.TESTED.items():
        assert f"{package}{tested}" in requirements


def test_the_package_holds_all_of_its_files():
    """And its description has no link that leads nowhere outside of the repository."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {path.parent for path in (ROOT / "hacpo_trl").rglob("*.py")}
    assert setup["options"]["packages"] == "find:" and all((folder / "__init__.py").exists() for folder in folders)
    data = [pattern for pattern in setup["options.package_data"]["hacpo_trl"].split()]
    packaged = {path for pattern in data for path in (ROOT / "hacpo_trl").glob(pattern)}
    ignored = {".py", ".pyc"}
    files = {path for path in (ROOT / "hacpo_trl").rglob("*") if path.is_file() and path.suffix not in ignored}
    assert files <= packaged, files - packaged
    page = (ROOT / setup["metadata"]["long_description"].removeprefix("file: ")).read_text(encoding="utf-8")
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", page))


def test_other_versions_are_warned_of(monkeypatch):
    monkeypatch.setattr(_contract, "version", lambda package: "9.9.9")
    with pytest.warns(UserWarning, match="9.9.9 is installed"):
        _contract.check_versions()
