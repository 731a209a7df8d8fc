"""What all `hacpo` commands have in common: a quiet start, and an orderly end by Ctrl-C."""

import logging
import os
import signal
import sys

_SLOW = 3.0  # seconds that weights may take to be loaded or written before there is a bar

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a command that Ctrl-C has ended, as shells have it."""


class _Held(logging.Filter):
    """Keeps what a logger says and most runs have nothing to do with."""

    def __init__(self, start: str):
        super().__init__()
        self.start = start
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        held = record.getMessage().startswith(self.start)
        self.records += [record] * held
        return not held


_HELD = {
    "bitsandbytes.backends.cpu.ops": _Held("Failed to load CPU gemm_4bit_forward"),
    "DeepSpeed": _Held("Setting accelerator to CPU"),
}


def start_quietly() -> None:
    """Keeps others from speaking before a command does: to be called before transformers and TRL are imported.

    Held back is what is of no use to most runs, such as hints of parts that a run does not use; see `tell_held`.
    """
    for name, held in _HELD.items():
        logger = logging.getLogger(name)
        if held not in logger.filters:
            logger.addFilter(held)


def tell_held(name: str) -> None:
    """Lets a logger say what was held back, and whatever else it will: the run uses what it belongs to."""
    logger, held = logging.getLogger(name), _HELD[name]
    logger.removeFilter(held)
    while held.records:
        logger.handle(held.records.pop(0))


def show_slow_bars_only() -> None:
    """Gives transformers' bars of weights that are loaded or written a few seconds until they are shown."""
    from transformers.utils import logging

    logging.set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{"delay": _SLOW, "disable": None, **kwargs}))


def end_interrupted(command: str, sentence: str, *, main_process: bool = True, at_once: bool = False) -> int:
    """Says what to do after Ctrl-C. A further one ends the process at once.

    Args:
        command: of `hacpo`, such as "train".
        sentence: what is left of the run, and how to go on.
        main_process: whether this is the process that speaks, when there are several.
        at_once: whether agents still compute, as after a second Ctrl-C.

    Returns:
        The exit status. Does not return where agents still compute.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if main_process:
        print(f"\nhacpo {command}: interrupted. {sentence}", file=sys.stderr, flush=True)
    if at_once:
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # ending in the ordinary way would abort the process
    return INTERRUPTED
