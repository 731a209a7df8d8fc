"""An editable install is found from every folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", "77")
ROOT = Path(__file__).parent.parent


def test_an_editable_install_is_found_from_the_folder_above_the_clone(tmp_path):
    clone, site = tmp_path / "hacpo_trl", tmp_path / "site"
    (clone / "hacpo_trl").mkdir(parents=True)
    for name in (
        "setup.cfg",
        "pyproject.toml",
        "PACKAGE.md",
        "LICENSE",
        "hacpo_trl/__init__.py",
        "hacpo_trl/_version.py",
    ):
        shutil.copy(ROOT / name, clone / name)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    build = "from setuptools import build_meta; build_meta.build_editable('..')"
    subprocess.run(
        [sys.executable, "-c", build], cwd=clone, env=environment, check=True, capture_output=True, timeout=60
    )
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    look = f"import site; site.addsitedir({str(site)!r}); from hacpo_trl import __version__, __file__ as f; print(f)"
    # -S -E: without what else is installed here
    found = subprocess.run(
        [sys.executable, "-S", "-E", "-c", look], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert found.stdout.strip() == str(clone / "hacpo_trl" / "__init__.py"), found.stderr
