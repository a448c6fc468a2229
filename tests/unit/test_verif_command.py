"""`ngu verify`: what it prints of a file of answers, and which files it refuses."""

import json
from pathlib import Path

import pytest

from pipeline.cli import main

ROWS = [
    {"gold": "18", "text": "so\nA: 18", "ok": True},
    {"gold": "18", "text": "#### 26", "ok": False},
    {"gold": "work #### 3", "text": r"\boxed{3}", "ok": False},
    {"gold": "x+1", "text": r"\boxed{1+x}", "ok": True},
    {"gold": "7", "text": "", "ok": False},
    {"gold": "7", "text": 7, "ok": False},
    {"gold": "x+2", "text": r"\boxed{2^{3^{4^{5}}}}", "ok": True},
]


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_agreement_and_every_disagreement(tmp_path: Path, capsys):
    path = write(tmp_path / "answers.jsonl", ROWS)
    assert main(["verify", path, "--answer", "text", "--label", "ok", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["judged"], report["correct"], report["incorrect"], report["unknown"]) == (7, 3, 3, 1)
    assert report["agreement_frac"] == pytest.approx(5 / 7)
    assert [(d["line"], d["verdict"], d["label"]) for d in report["disagreements"]] == [
        (3, "correct", False),
        (7, "unknown", True),
    ]
    assert main(["verify", path, "--answer", "text", "--label", "ok"]) == 0
    out, err = capsys.readouterr()
    assert "7 judged: 3 correct, 3 incorrect, 1 unknown" in out and "71.43%" in out and not err
    assert f"{path}:3: gold '3', answer '3': correct, label false" in out
    assert "power tower" in out.splitlines()[-1]


def test_without_labels_the_unknowns_are_listed(tmp_path: Path, capsys):
    assert main(["verify", write(tmp_path / "a.jsonl", ROWS), "--answer", "text"]) == 0
    out = capsys.readouterr().out
    assert "agreement" not in out and "1 could not be judged:" in out and "a.jsonl:7" in out


def test_golds_that_do_not_verify_against_themselves(tmp_path: Path, capsys):
    golds = ["18", r"\frac{\pi}{2}", "a}b", "2^{3^{4^{5}}}", "because, it! rains; 3"]
    assert main(["verify", write(tmp_path / "g.jsonl", [{"gold": g} for g in golds]), "--golds", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["correct"] >= 2 and [row["line"] for row in report["bad_golds"]] == [3, 4]


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([{"gold": "1"}], [], r"line 1: no field 'answer' (fields present: 'gold'); set --answer"),
        ([{"answer": "1"}], [], r"line 1: no field 'gold' (fields present: 'answer'); set --gold"),
        ([{"gold": "1", "answer": ["1"]}], [], "field 'answer' must be a text"),
        ([{"gold": "1", "answer": "1", "ok": "yes"}], ["--label", "ok"], "field 'ok' must be true or false"),
        ([], [], "empty"),
    ],
)
def test_bad_files_are_one_line_and_status_2(tmp_path: Path, capsys, rows, flags, message):
    assert main(["verify", write(tmp_path / "bad.jsonl", rows), *flags]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err and "bad.jsonl" in err


def test_a_missing_file(tmp_path: Path, capsys):
    assert main(["verify", str(tmp_path / "absent.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err
