"""Reading maths data sets: formats, columns, answers, and errors that name the place."""

import json

import pandas
import pytest

from hacpo_trl.maths.problems import extract_answer, is_local, load_problems, to_prompts
from hacpo_trl.texts.prompts import make_form


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("72", "72"),
        ("  72\n", "72"),
        ("48 / 2 = <<48/2=24>>24\n#### 72", "72"),
        ("so \\boxed{3} is wrong and \\boxed{\\frac{1}{2}} right", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\text{a}^{b_{c}}} ok", "\\text{a}^{b_{c}}"),
        ("an unclosed \\boxed{3", "an unclosed \\boxed{3"),
        ("\\fbox{7}", "7"),
        (72, "72"),
        (0.5, "0.5"),
        (["1", "2"], "1, 2"),
        ("", None),
        ("####", None),
        (None, None),
        (float("nan"), None),
    ],
)
def test_final_answers(text, answer):
    assert extract_answer(text) == answer


def write(path, rows):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return str(path)


def test_json_lines_with_other_line_separators_inside(tmp_path):
    rows = [{"problem": "a\u2028b\u0085c", "answer": "1"}, {"problem": "d", "answer": "2"}]
    assert load_problems(write(tmp_path / "a.jsonl", rows)) == rows


@pytest.mark.parametrize("ending", ["json", "csv", "parquet"])
def test_other_formats(tmp_path, ending):
    rows = [{"question": "1 + 1?", "solution": "it is \\boxed{2}"}, {"question": "2 + 2?", "solution": "#### 4"}]
    path = tmp_path / f"data.{ending}"
    frame = pandas.DataFrame(rows)
    if ending == "json":
        path.write_text(json.dumps(rows))
    else:
        getattr(frame, f"to_{ending}")(path, index=False)
    assert load_problems(str(path)) == [
        {"problem": "1 + 1?", "answer": "2"},
        {"problem": "2 + 2?", "answer": "4"},
    ]


def test_rows_without_an_answer_are_counted(tmp_path, caplog):
    rows = [{"problem": "a", "answer": "1"}, {"problem": "b", "answer": ""}, {"problem": " ", "answer": "3"}]
    assert len(load_problems(write(tmp_path / "a.jsonl", rows))) == 1
    assert "2 of 3 rows have no 'problem' or no 'answer' and are left out: line 2, line 3." in caplog.text


def test_of_many_rows_left_out_the_first_are_named(tmp_path, caplog):
    rows = [{"problem": str(i), "answer": "" if i else "1"} for i in range(8)]
    load_problems(write(tmp_path / "a.jsonl", rows))
    assert "7 of 8 rows" in caplog.text and "left out: line 2, line 3, line 4, line 5, line 6, ..." in caplog.text


def test_columns_that_the_first_row_lacks(tmp_path):
    rows = [{"problem": "a"}, {"problem": "b", "answer": "2"}]
    assert load_problems(write(tmp_path / "a.jsonl", rows)) == [{"problem": "b", "answer": "2"}]


def test_csv_keeps_texts_as_they_are(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfproblem, answer\r\n"a, ""b""\r\nc",0.50\r\n\r\n7,1e3\r\nlast\r\n')
    found = load_problems(str(path))
    assert found == [{"problem": 'a, "b"\r\nc', "answer": "0.50"}, {"problem": "7", "answer": "1e3"}]
    assert "1 of 3 rows" in caplog.text and "left out: line 6." in caplog.text


def test_long_fields_of_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"problem,solution\na,{'x' * 200_000} #### 5\n")
    assert load_problems(str(path)) == [{"problem": "a", "answer": "5"}]


@pytest.mark.parametrize(("value", "kind"), [(5, "a number"), (["x"], "of type list")])
def test_a_problem_that_is_no_text(tmp_path, value, kind):
    path = write(tmp_path / "a.jsonl", [{"problem": "a", "answer": "1"}, {"problem": value, "answer": "1"}])
    with pytest.raises(ValueError, match=rf"a.jsonl, line 2: the problem in column 'problem' is .*, {kind} and not"):
        load_problems(path)


@pytest.mark.parametrize("limit", [0, -1])
def test_no_problems_to_take(tmp_path, limit):
    with pytest.raises(ValueError, match="use at least 1"):
        load_problems(write(tmp_path / "a.jsonl", [{"problem": "a", "answer": "1"}]), limit=limit)


def test_columns_of_ones_own(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"aufgabe": "1 + 1", "loesung": "2", "answer": "not this"}])
    found = load_problems(path, problem_column="aufgabe", answer_column="loesung")
    assert found == [{"problem": "1 + 1", "answer": "2"}]
    with pytest.raises(ValueError, match="which column holds the problem.*aufgabe, loesung, answer.*problem_column"):
        load_problems(path)
    with pytest.raises(ValueError, match="no column 'x'; the columns are"):
        load_problems(path, problem_column="x")


def test_limit(tmp_path, caplog):
    rows = [{"problem": str(i), "answer": str(i)} for i in range(5)]
    assert len(load_problems(write(tmp_path / "a.jsonl", rows), limit=2)) == 2
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"problem": "a", "answer": "1"}\n{"problem": }', "a.jsonl, line 2, column 13"),
        ("a.jsonl", "[1]", "line 1: expected an object"),
        ("a.json", '[{"problem": 1},\n}', "a.json, line 2, column 1"),
        ("a.json", '{"problem": "a"}', "expected a list of objects"),
        ("a.txt", "x", "cannot read .txt"),
        ("a.jsonl", '{"problem": "a", "answer": ""}', "none of the 1 rows"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.jsonl", " \n\n", "a.jsonl is empty"),
        ("a.json", "", "a.json is empty"),
        ("a.json", "[]", "a.json is empty: it has no rows"),
        ("a.csv", "", "a.csv is empty"),
        ("a.csv", "problem,answer\n", "a.csv is empty: it has no rows"),
        ("a.parquet", "", "a.parquet is empty"),
        ("a.parquet", "x", "a.parquet: no Parquet file that can be read: "),
        ("a.json", '{"problem": "a"}\n{"problem": "b"}\n', "a.json: one object a line is JSON Lines: name it .jsonl"),
        ("a.csv", 'problem,answer\n"a\nb",1\na, b,2\n', r"a.csv, line 4: 3 fields, .* 2 columns \(problem, answer\)"),
        ("a.csv", 'problem,answer\na,1\n"b,2\n', "a.csv, line 3: no CSV: "),
        ("a.csv", "question;answer\na;1\n", "which column holds the problem.*question;answer"),
        ("a.jsonl", '{"problem": "a"}\n{"problem": "ä 1 €"}'.encode("cp1252"), "line 2, column 14: the byte 0xe4 is"),
        ("a.jsonl", '{"problem": "€ é"}'.encode().replace(b"\xa9", b""), "a.jsonl, line 1, column 16: the byte 0xc3"),
        ("a.csv", "problem,answer\nä,1\n".encode("latin1"), "a.csv, line 2, column 1: the byte 0xe4 is no UTF-8"),
    ],
)
def test_errors_name_the_place(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        load_problems(str(path))


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        load_problems(str(tmp_path / "lost.jsonl"))


@pytest.mark.parametrize(("source", "local"), [("x.csv", True), ("x.txt", True), ("./x", True), ("lab/x-v1.5", False)])
def test_what_is_meant_to_be_a_file(source, local):
    assert is_local(source) is local


def test_a_misspelt_file_is_not_sought_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("hacpo_trl.maths.problems.load_dataset", lambda *args, **kwargs: pytest.fail("the Hub"))
    monkeypatch.chdir(tmp_path)
    assert not is_local("data/train")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    for name in ("data/trian.jsonl", "data/train", "./data/tran.jsonl"):
        with pytest.raises(ValueError, match=rf"{name}: there is no such file. Did you mean (./)?data/train.jsonl\?"):
            load_problems(name)
    with pytest.raises(ValueError, match=r"data/x: there is no such file. data holds train.jsonl."):
        load_problems("data/x")
    assert not is_local("openai/gsm8k") and is_local("a/b/c")


def test_prompts():
    problems = [{"problem": "1 + 1?", "answer": "2"}]
    chat = to_prompts(problems, make_form("chat", system_prompt="Be brief.", instruction="Box it."))[0]
    assert chat == {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?\n\nBox it."}],
        "answer": "2",
    }
    plain = to_prompts(problems, make_form("plain", instruction="Box it."))[0]
    assert plain["prompt"] == "Problem: 1 + 1?\nBox it.\nSolution:"
    assert to_prompts(problems, make_form("chat", instruction=""))[0]["prompt"] == [
        {"role": "user", "content": "1 + 1?"}
    ]
