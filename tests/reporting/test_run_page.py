"""The HTML page of a run."""

import html
import json
import re
import sys

import matplotlib.pyplot as plt
import pytest
from support.tiny_teams import config, dataset, digit_reward, team

from hacpo_trl.reporting import run_page as page_module
from hacpo_trl.reporting.run_page import write_page


@pytest.fixture(scope="module")
def run_dir(agent_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    args = config(
        folder, beta=0.1, peer_clip_delta=0.9, log_completions=True, max_rounds=3, per_device_eval_batch_size=4,
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    trainer = team(agent_folders, ["char", "bpe"], args, [digit_reward, last_word_reward], eval_dataset=dataset(2))
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    return folder


def last_word_reward(completions, log_extra, **kwargs):
    """Tells what it read, and gives nothing for it."""
    log_extra("parsed_answer", [text.split()[-1] if text.split() else "" for text in completions])
    return [0.0] * len(completions)


def test_the_page_holds_everything_in_itself(run_dir):
    page = open(write_page(str(run_dir)), encoding="utf-8").read()
    assert page.count("<svg") == 2
    for text in ("hacpo: char, bpe", "char → bpe", "Mean reward in evaluation", "All settings", "sampling"):
        assert text in page
    assert "3 rounds logged" in page and "KL" in page.split("<h2>Curves")[0]
    assert not re.search(r"<(script|link|img|iframe)\b", page)
    assert not re.search(r"(src|href)=\"http", page.replace("http://www.w3.org", ""))


def test_a_prompt_that_only_one_agent_got_right(run_dir):
    page = open(write_page(str(run_dir), str(run_dir / "other.html")), encoding="utf-8").read()
    section = page.split("Right by one agent only")[1]
    golds = {row["prompt"]: row["answer"] for row in dataset()}
    heading, answers = (
        r"<b>only (\w+)</b>, round \d; gold: <code>(.*?)</code></p>",
        "(?:<pre class.*?</p>)+",
    )
    found = re.findall(f"{heading}<pre>(.*?)</pre>({answers})", section, re.S)
    assert found and len(found) == section.count("<b>only")
    for winner, gold, prompt, shown in found:
        assert golds[html.unescape(prompt)] == gold
        answers = re.findall(r'<pre class="(\w+)">(\w+): (.*?)</pre><p class="quiet verdict">(.*?)</p>', shown, re.S)
        assert [agent for kind, agent, *_ in answers if kind == "right"] == [winner] and len(answers) == 2
        for kind, _, text, verdict in answers:
            text = html.unescape(text)
            assert (digit_reward([text]) == [1.0]) == (kind == "right")
            read = f"read as {text.split()[-1]!r}" if text.split() else "no answer found"
            assert html.unescape(verdict) == f"reward {digit_reward([text])[0]:g}, {read}"


def test_responses_of_the_last_round(run_dir):
    page = open(write_page(str(run_dir), str(run_dir / "last.html")), encoding="utf-8").read()
    section = page.split("Responses of the last round")[1].split("<h2>")[0]
    assert section.count("round 3; gold: ") == 2 and section.count('<p class="quiet verdict">') == 4  # 2 prompts


def test_evaluations_before_and_after_a_run_belong_to_it(run_dir):
    history = json.loads((run_dir / "trainer_state.json").read_text())["log_history"]
    steps = [entry["step"] for entry in history if "eval_bpe/reward" in entry]
    assert steps == [0, 4, 8, 12, 12]
    assert history[0]["eval_char/reward"] is not None  # the first of all entries


def test_a_resumed_and_a_second_run_hold_each_evaluation_once(agent_folders, tmp_path):
    args = config(tmp_path, max_rounds=1, per_device_eval_batch_size=4, save_strategy="steps", save_steps=4)
    trainer = team(agent_folders, ["char", "bpe"], args, eval_dataset={"x": dataset(1), "y": dataset(1)})

    def evaluations():
        history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
        return [(entry["step"], key) for entry in history for key in entry if re.fullmatch("eval.*bpe/reward", key)]

    trainer.evaluate()
    trainer.train()
    one = [(0, "eval_x_bpe/reward"), (0, "eval_y_bpe/reward"), (0, "eval_bpe/reward")]
    assert evaluations() == one
    trainer.evaluate()
    assert evaluations() == one + [(4, key) for _, key in one]
    trainer.train()  # what was evaluated between two runs belongs to both
    assert evaluations() == one

    for agent in trainer.agents:
        agent.args.max_steps *= 2
    trainer.evaluate()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert evaluations() == one  # those of the checkpoint


def test_without_a_reference_there_is_no_kl(agent_folders, monkeypatch, tmp_path):
    args = config(tmp_path, max_rounds=1, beta=0.0, agent_overrides={"bpe": {"beta": 0.1}})
    trainer = team(agent_folders, ["char", "bpe"], args)
    trainer.train()
    history = trainer.state.log_history
    assert any("bpe/kl" in entry for entry in history) and not any("char/kl" in entry for entry in history)
    _, page = drawn(monkeypatch, tmp_path, HISTORY)
    assert "KL" not in page


def test_evaluations_on_several_data_sets(monkeypatch, tmp_path):
    keys = ["eval_a/reward", "eval_x_a/reward", "eval_b/reward", "eval_x_b/reward", "eval_x_b/rewards/f/mean"]
    (curves, _), page = drawn(monkeypatch, tmp_path, [*HISTORY[:3], {"step": 4, **dict.fromkeys(keys, 0.5)}])
    titles = [axis.get_title() for axis in curves.axes]
    assert [title for title in titles if "eval" in title] == [
        "Mean reward in evaluation", "Mean reward in evaluation on x",
    ]  # fmt: skip
    assert "<th>reward in evaluation on x</th>" in page


def test_a_data_sets_name_may_end_like_an_agents():
    history = [{"eval_a/reward": 0.5, "eval_b_a/reward": 0.5, "eval_b_b_a/reward": 0.5}]
    assert page_module._evaluations(history, ["a", "b_a"]) == ["", "b_"]


def test_text_of_models_is_no_markup(run_dir, tmp_path):
    run = json.loads((run_dir / "hacpo_run.json").read_text())
    state = json.loads((run_dir / "trainer_state.json").read_text())
    run["settings"]["run_name"] = "<script>alert(1)</script>"
    (tmp_path / "hacpo_run.json").write_text(json.dumps(run))
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    page = open(write_page(str(tmp_path)), encoding="utf-8").read()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "log_completions=True" in page  # without kept completions it says how to get them


def test_a_running_run_is_read_from_its_checkpoints(run_dir, tmp_path):
    (tmp_path / "hacpo_run.json").write_text((run_dir / "hacpo_run.json").read_text())
    with pytest.raises(ValueError, match="has logged nothing yet"):
        write_page(str(tmp_path))
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text((run_dir / "trainer_state.json").read_text())
    assert "3 rounds logged" in open(write_page(str(tmp_path))).read()


def test_folders_without_a_run(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        write_page(str(tmp_path / "lost"))
    with pytest.raises(ValueError, match="holds no run"):
        write_page(str(tmp_path))


def drawn(monkeypatch, tmp_path, history):
    """The figures of the page of a run with this history, and the page."""
    run = {"agents": ["a", "b"], "models": ["a", "b"], "method": "hacpo", "shares_rollouts": True, "settings": {}}
    (tmp_path / "hacpo_run.json").write_text(json.dumps(run))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    figures = []
    monkeypatch.setattr(page_module, "_svg", lambda figure: figures.append(figure) or "")
    page = open(write_page(str(tmp_path)), encoding="utf-8").read()
    for figure in figures:
        figure.canvas.draw()
        plt.close(figure)
    return figures, page


HISTORY = [
    {"step": 1, "a/reward": 0.25, "b/reward": 0.0, "a/capability": 0.25, "b/capability": 1e-8},
    {"step": 3, "pair/a->b/ratio_mean": 0.9, "pair/b->a/ratio_mean": 0.8},
    {"step": 4, "pair/a->b/ratio_mean": 0.7},
    {"step": 4, "eval_a/reward": 0.5, "eval_b/reward": 0.125},
]


def test_one_evaluation_is_seen(monkeypatch, tmp_path):
    (curves, _), _ = drawn(monkeypatch, tmp_path, HISTORY)
    panel = next(axis for axis in curves.axes if axis.get_title() == "Mean reward in evaluation")
    assert [list(line.get_ydata()) for line in panel.lines] == [[0.5], [0.125]]
    assert all(line.get_marker() == "o" for line in panel.lines)
    low, high = panel.get_xlim()
    assert [tick for tick in panel.get_xticks() if low <= tick <= high] == [4]


def test_heat_maps_name_the_updates(monkeypatch, tmp_path):
    (_, maps), _ = drawn(monkeypatch, tmp_path, HISTORY)
    axis = next(axis for axis in maps.axes if axis.get_title() == "Mean raw importance ratio")
    assert [label.get_text() for label in axis.get_xticklabels()] == ["3", "4"] and axis.get_xlabel() == "update"
    assert axis.images[0].get_array().tolist() == [[0.8, None], [0.9, 0.7]]  # b told a nothing at update 4


def test_ticks_of_long_runs_are_few(monkeypatch, tmp_path):
    history = HISTORY[:1] + [{"step": step, "pair/a->b/ratio_mean": 0.9} for step in range(3, 103)]
    (_, maps), _ = drawn(monkeypatch, tmp_path, history)
    labels = [label.get_text() for label in maps.axes[0].get_xticklabels()]
    assert labels == [str(step) for step in range(3, 103, 7)]


def test_the_smallest_capability_is_not_0(monkeypatch, tmp_path):
    _, page = drawn(monkeypatch, tmp_path, HISTORY)
    cells = re.findall(r'<td class="number">(.*?)</td>', page.split("<h2>Curves")[0])
    assert cells == ["0.250", "0.250", "0.500", "0.000", "1e-8", "0.125"]


def test_first_and_last_value():
    assert [page_module._change(values) for values in ([], [0.25], [1e-8, 0.5, 1.0])] == ["", "0.250", "1e-8 → 1.000"]


def test_without_matplotlib_the_extra_is_named(run_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs matplotlib: pip install matplotlib pandas"):
        write_page(str(run_dir), str(tmp_path / "report.html"))
