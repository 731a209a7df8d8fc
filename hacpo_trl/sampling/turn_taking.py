"""Agents take turns: while one waits for its grader or its server, the next one samples.

Every agent samples in a thread of its own, but only the one that has the turn runs. It hands the turn on where it
would wait, and goes on when the turn comes round to it again: always in the same order, so that random numbers and
collective operations keep the order that they have on every process and in every run.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.utils import logging

logger = logging.get_logger(__name__)

_THREAD = "hacpo-agent-"
_PATIENCE = 2.0  # seconds that threads may take to end before it is said that they are waited for


class _Stopped(BaseException):
    """Ends a thread after another one has failed, or after Ctrl-C."""


class Turns:
    """A round robin of threads."""

    def __init__(self):
        self._condition = threading.Condition()
        self._thread = threading.local()
        self._live: list[int] = []
        self._turn: int | None = None
        self._stopped = False
        self._for_main: deque[tuple[Callable[[], Any], Future]] = deque()

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs functions that take turns.

        Args:
            functions: the first one has the first turn. A single one runs in this thread.

        Returns:
            Their results, in order.

        Raises:
            BaseException: the first error of any of them, when all have ended. Also an interruption of this thread
                (Ctrl-C); a second one while it waits for the others ends the waiting.
        """
        if len(functions) == 1:
            return [functions[0]()]
        self._live = list(range(len(functions)))
        self._turn, self._stopped = 0, False
        self._for_main.clear()
        results: list[Any] = [None] * len(functions)
        errors: list[BaseException] = []
        follow = _callers_streams()

        def work(index: int) -> None:
            self._thread.index = index
            try:
                follow()
                self._wait_for_turn(index)
                results[index] = functions[index]()
            except _Stopped:
                pass
            except BaseException as error:
                errors.append(error)
                self._stop()
            finally:
                self._leave(index)

        threads = [
            threading.Thread(target=work, args=(i,), name=f"{_THREAD}{i}", daemon=True) for i in range(len(functions))
        ]
        try:
            for thread in threads:
                thread.start()
            self._serve_main()
        except BaseException:
            self._stop()
            raise
        finally:  # a process that ends while a thread computes is aborted
            self._join(threads)
        if errors:
            raise errors[0]
        return results

    def pause(self, function: Callable[[], Any], *, on_main: bool = False, is_work: bool = True) -> Any:
        """Hands the turn on, runs a function meanwhile, and waits for the turn.

        Outside of `run` it only runs the function.

        Args:
            function: what would make everybody wait. It must not use what the others use.
            on_main: run it in the main thread (graders may rely on signals, which work only there), where such calls
                wait for each other.
            is_work: whether its time is the thread's own; if not it counts as waiting.

        Returns:
            The function's result; its error is raised here.
        """
        started = time.perf_counter()
        index = getattr(self._thread, "index", None)
        if index is None:
            result = function()
            running = time.perf_counter() - started
        else:
            self._pass_on(index)
            error = None
            try:
                if on_main:
                    future: Future = Future()
                    with self._condition:
                        self._for_main.append((function, future))
                        self._condition.notify_all()
                    while not future.done():
                        with self._condition:
                            if self._stopped:
                                raise _Stopped
                            self._condition.wait_for(lambda: future.done() or self._stopped, timeout=1.0)
                    result = future.result()
                else:
                    result = function()
            except Exception as raised:
                error = raised
            running = time.perf_counter() - started
            self._wait_for_turn(index)
            if error is not None:
                raise error
        total = time.perf_counter() - started
        self._thread.waited = self.waited() + (total - running if is_work else total)
        return result

    def check(self) -> None:
        """Ends the thread of an agent when all have to stop: to be called inside long work."""
        if self._stopped and getattr(self._thread, "index", None) is not None:
            raise _Stopped

    def waited(self) -> float:
        """Seconds that this thread has spent waiting: for turns, and for what is not its own work."""
        return getattr(self._thread, "waited", 0.0)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _serve_main(self) -> None:
        while True:
            with self._condition:
                while not self._for_main:
                    if not self._live:
                        return
                    self._condition.wait(timeout=1.0)
                function, future = self._for_main.popleft()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            with self._condition:
                self._condition.notify_all()

    def _wait_for_turn(self, index: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == index or self._stopped)
            if self._stopped:
                raise _Stopped

    def _pass_on(self, index: int) -> None:
        with self._condition:
            place = self._live.index(index)
            self._turn = self._live[(place + 1) % len(self._live)]
            self._condition.notify_all()

    def _leave(self, index: int) -> None:
        with self._condition:
            if self._turn == index:
                place = self._live.index(index)
                self._turn = self._live[(place + 1) % len(self._live)]
            self._live.remove(index)
            self._condition.notify_all()

    def _stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    @staticmethod
    def _join(threads: Sequence[threading.Thread]) -> None:
        started = [thread for thread in threads if thread.ident is not None]
        deadline = time.monotonic() + _PATIENCE
        for thread in started:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in started):
            logger.warning("Waiting for agents that still sample or grade. Ctrl-C once more ends at once.")
        for thread in started:
            thread.join()


class StopsWithOthers(StoppingCriteria):
    """Ends `generate` within a token when the agents have to stop.

    Args:
        turns: the agents'.
    """

    def __init__(self, turns: Turns):
        self.turns = turns

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        """(R,) no row is finished by it."""
        self.turns.check()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def agents_are_running() -> bool:
    """Whether threads of agents go on, as after a second Ctrl-C: then the process cannot end in the ordinary way."""
    return any(thread.name.startswith(_THREAD) for thread in threading.enumerate())


def _callers_streams() -> Callable[[], None]:
    """What a new thread calls to work on this thread's devices and streams, where all work is done.

    By itself a thread starts on the first device's default stream, and vLLM gives each thread a stream of its own:
    nothing would order its copy of the weights behind the last optimizer step, and the allocator would keep memory
    for every stream.
    """
    backends = [backend for backend in (torch.cuda, torch.xpu) if backend.is_initialized()]
    streams = [(backend, backend.current_stream()) for backend in backends]
    for backend in backends:
        backend.synchronize()

    def follow() -> None:
        for backend, stream in streams:
            backend.set_stream(stream)  # and the stream's device

    return follow
