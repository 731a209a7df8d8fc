"""`python -m hacpo_trl.playground` rebuilds the shipped agents."""

from .agents import main

main()
