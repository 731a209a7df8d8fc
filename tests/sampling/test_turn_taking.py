"""Turn taking: the order is fixed, waiting overlaps, errors end all, graders run in the main thread."""

import signal
import threading
import time

import pytest
from support.tiny_teams import all_weights, config, digit_reward, team

from hacpo_trl import math_reward
from hacpo_trl.sampling.turn_taking import Turns


def test_the_order_is_that_of_the_turns():
    turns, events = Turns(), []

    def agent(name, pauses):
        def work():
            for i in range(pauses):
                events.append(f"{name}{i}")
                # the first to pause is the last to be done: its turn comes before the others' all the same
                turns.pause(lambda: time.sleep(0.03 if name == "a" else 0.0))
            events.append(f"{name}!")
            return name

        return work

    assert turns.run([agent("a", 2), agent("b", 1), agent("c", 2)]) == ["a", "b", "c"]
    assert events == ["a0", "b0", "c0", "a1", "b!", "c1", "a!", "c!"]


def test_one_at_a_time_but_waiting_overlaps():
    turns, running, most = Turns(), [], []
    together = threading.Barrier(4, timeout=60)  # opens only when all four wait at once

    def agent():
        for _ in range(3):
            running.append(1)
            most.append(len(running))
            running.pop()
            turns.pause(together.wait)

    turns.run([agent] * 4)
    assert len(most) == 12 and max(most) == 1


def test_functions_on_main_run_in_the_main_thread():
    turns = Turns()

    def agent():
        return turns.pause(lambda: threading.current_thread() is threading.main_thread(), on_main=True), (
            threading.current_thread() is threading.main_thread()
        )

    assert turns.run([agent, agent]) == [(True, False), (True, False)]
    assert turns.run([agent]) == [(True, True)]


@pytest.mark.parametrize("on_main", [False, True])
def test_an_error_ends_all(on_main):
    turns, ended = Turns(), []

    def fails():
        turns.pause(lambda: 1 / 0, on_main=on_main)

    def waits():
        try:
            for _ in range(100):
                turns.pause(lambda: None)
        finally:
            ended.append(True)

    with pytest.raises(ZeroDivisionError):
        turns.run([waits, fails, waits])
    assert ended == [True, True]
    assert turns.run([lambda: 1, lambda: 2]) == [1, 2]  # and it can be used again


def test_an_error_can_be_handled_by_its_agent():
    turns = Turns()

    def agent():
        try:
            turns.pause(lambda: 1 / 0, on_main=True)
        except ZeroDivisionError:
            return "handled"

    assert turns.run([agent, lambda: "other"]) == ["handled", "other"]


def test_waiting_is_told_apart():
    turns = Turns()

    def agent():
        turns.pause(lambda: time.sleep(0.1))  # its own work
        own = turns.waited()
        turns.pause(lambda: time.sleep(0.1), on_main=True, is_work=False)
        return own, turns.waited()

    (own, both), *_ = turns.run([agent, lambda: None])
    assert both - own >= 0.1 > own


def test_the_next_agent_samples_while_one_is_graded(agent_folders, tmp_path):
    names = ["char", "bpe", "mini"]
    sampling = [threading.Event() for _ in names]
    graded = []

    def reward(completions, **kwargs):
        # the grader of an agent, but for the last one's, is done only when the next agent is sampling
        number = len(graded)
        if number + 1 < len(names):
            assert sampling[number + 1].wait(timeout=60)
        graded.append(number)
        return digit_reward(completions)

    trainer = team(agent_folders, names, config(tmp_path, max_rounds=1), reward)
    for event, agent in zip(sampling, trainer.agents, strict=True):
        generate = agent._generate_single_turn

        def announced(*args, event=event, generate=generate, **kwargs):
            event.set()
            return generate(*args, **kwargs)

        agent._generate_single_turn = announced
    trainer.train()
    assert graded == [0, 1, 2]


def test_thread_safe_graders_run_at_the_same_time(agent_folders, tmp_path):
    together = threading.Barrier(3, timeout=60)  # opens when the responses of all three agents are being graded

    def reward(completions, **kwargs):
        together.wait()
        assert threading.current_thread() is not threading.main_thread()
        return digit_reward(completions)

    reward.thread_safe = True
    trainer = team(agent_folders, ["char", "bpe", "mini"], config(tmp_path, max_rounds=2), reward)
    trainer.train()
    assert trainer.state.global_step == 12


def test_the_maths_reward_is_thread_safe():
    assert math_reward.thread_safe


def test_graders_may_use_signals(agent_folders, tmp_path):
    """Such as the time-out of math-verify, which works in the main thread only."""

    def reward(completions, **kwargs):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return digit_reward(completions)

    trainer = team(agent_folders, ["char", "bpe"], config(tmp_path, max_rounds=1), reward)
    trainer.train()
    assert trainer.state.global_step == 4


def test_the_weights_do_not_depend_on_the_graders_speed(agent_folders, tmp_path):
    results = []
    for delay in (0.0, 0.2):

        def reward(completions, delay=delay, **kwargs):
            time.sleep(delay)
            return digit_reward(completions)

        trainer = team(agent_folders, ["char", "bpe"], config(tmp_path, beta=0.1), reward)
        trainer.train()
        results.append(all_weights(trainer))
    for a, b in zip(*results, strict=True):
        assert (a == b).all()
