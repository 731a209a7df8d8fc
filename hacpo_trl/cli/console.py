"""What all `hacpo` commands have in common: a quiet start, and an orderly end by Ctrl-C."""

import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a command that Ctrl-C has ended, as shells have it."""


def end_interrupted(command: str, sentence: str, *, main_process: bool = True) -> int:
    """Says what to do after Ctrl-C. A further one ends the process at once.

    Args:
        command: of `hacpo`, such as "train".
        sentence: what is left of the run, and how to go on.
        main_process: whether this is the process that speaks, when there are several.

    Returns:
        The exit status. Does not return where agents still compute, as after a second Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if main_process:
        print(f"\nhacpo {command}: interrupted. {sentence}", file=sys.stderr, flush=True)
    turns = sys.modules.get("hacpo_trl.sampling.turn_taking")
    if turns is not None and turns.agents_are_running():
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # ending in the ordinary way would abort the process
    return INTERRUPTED
