"""Maths problems: reading them, the benchmarks known by name, and grading answers."""
