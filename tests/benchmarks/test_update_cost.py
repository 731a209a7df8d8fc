"""Test of benchmarks/update_cost.py: what it counts."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


def test_what_saves_work_is_counted(tmp_path, capsys):
    import update_cost

    update_cost.main(["--out", str(tmp_path), "--quick"])
    (arms,) = json.loads((tmp_path / "update_cost.json").read_text()).values()
    runs = {arm: values[0] for arm, values in arms.items()}
    assert set(runs) == {*update_cost.ARMS, "GRPOTrainer"}
    # Screening trades tokens of a forward and backward pass for tokens of a forward pass
    assert 0 < runs["screening"]["backward"] < runs["plain"]["backward"]
    assert runs["screening"]["forward"] > runs["plain"]["forward"]
    # GRPOTrainer runs what has no gradient, too, and pads its passes without gradient to the longest response
    assert runs["plain"]["backward"] <= runs["GRPOTrainer"]["backward"]
    assert all(run["seconds"] > 0 and run["padding"] >= 0 for run in runs.values())
    assert "| two | GRPOTrainer |" in capsys.readouterr().out
