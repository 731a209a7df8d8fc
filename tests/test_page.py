"""The HTML page of a run."""

import json
import re
import sys

import matplotlib.pyplot as plt
import pytest
from conftest import config, dataset, digit_reward, team

from hacpo_trl.reporting import run_page as page_module
from hacpo_trl.reporting.run_page import write_page


@pytest.fixture(scope="module")
def run_dir(agent_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    args = config(
        folder, beta=0.1, peer_clip_delta=0.9, log_completions=True, max_rounds=3, per_device_eval_batch_size=4,
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    trainer = team(agent_folders, ["char", "bpe"], args, eval_dataset=dataset(2))
    trainer.train()
    return folder


def test_the_page_holds_everything_in_itself(run_dir):
    page = open(write_page(str(run_dir)), encoding="utf-8").read()
    assert page.count("<svg") == 2
    for text in ("hacpo: char, bpe", "char → bpe", "Mean reward in evaluation", "All settings", "sampling"):
        assert text in page
    assert "3 rounds logged" in page
    assert not re.search(r"<(script|link|img|iframe)\b", page)
    assert not re.search(r"(src|href)=\"http", page.replace("http://www.w3.org", ""))


def test_a_prompt_that_only_one_agent_got_right(run_dir):
    page = open(write_page(str(run_dir), str(run_dir / "other.html")), encoding="utf-8").read()
    section = page.split("Right by one agent only")[1]
    for match in re.finditer(r"<b>only (\w+)</b></p><pre>(.*?)</pre>((?:<pre class=.*?</pre>)+)", section, re.S):
        answers = re.findall(r'<pre class="(\w+)">(\w+): (.*?)</pre>', match[3], re.S)
        assert [agent for kind, agent, _ in answers if kind == "right"] == [match[1]]
        for kind, _, text in answers:
            unescaped = text.replace("&lt;", "<").replace("&gt;", ">").replace("&#x27;", "'").replace("&quot;", '"')
            assert (digit_reward([unescaped.replace("&amp;", "&")]) == [1.0]) == (kind == "right")


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
    assert "1e-8 → 1e-8" in cells and "0.000 → 0.000" in cells and "0.250 → 0.250" in cells


def test_without_matplotlib_the_extra_is_named(run_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs matplotlib: pip install matplotlib pandas"):
        write_page(str(run_dir), str(tmp_path / "report.html"))
