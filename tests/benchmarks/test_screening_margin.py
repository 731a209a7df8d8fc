"""Test of benchmarks/screening_margin.py: in bfloat16 screening leaves out nothing that teaches."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


def test_screening_moves_the_gradient_no_more_than_rounding_does():
    import screening_margin

    *margins, rounding = screening_margin.measure(True, 0)
    (ours,) = (entry for entry in margins if entry["margin"] == 0.02)
    assert 8 <= ours["run"] < 16 and ours["left out though inside when alone"] == 0
    assert 0 < ours["largest change of a ratio"] < 0.005
    assert 0 < rounding["distance"] < 0.02 and ours["distance"] < 2 * rounding["distance"]
