"""scripts/measurement_tables.py: the tables of docs/measurements are those of benchmarks/results."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/measurements").glob("*.md")) + [ROOT / "docs/faq.md"]


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("measurement_tables")
    sys.path.pop(0)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_up_to_date(tables, page):
    text, made_here = page.read_text(encoding="utf-8"), tables.TABLES[page.relative_to(tables.DOCS).as_posix()]
    made = tables.page_tables.with_tables(text, made_here, "measurement_tables.py")
    assert made == text, "run scripts/measurement_tables.py"
    assert text.count("<!-- begin ") == len(made_here)


def test_a_table_that_is_out_of_date_fails_the_check(tables, tmp_path, monkeypatch, capsys):
    page = tmp_path / "attention.md"
    text = (tables.DOCS / "measurements/attention.md").read_text(encoding="utf-8")
    page.write_text(re.sub(r"\| (\d)\.(\d+) \|", r"| \1.\g<2>1 |", text, count=1), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["measurement_tables.py", "--check"])
    pages = {page: tables.TABLES["measurements/attention.md"]}
    assert tables.page_tables.main("", pages, "measurement_tables.py") == 1
    assert "out of date" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["measurement_tables.py"])
    assert tables.page_tables.main("", pages, "measurement_tables.py") == 0
    assert page.read_text(encoding="utf-8") == text


def test_tables_of_the_readme_are_up_to_date(tables):
    readme_tables = importlib.import_module("readme_tables")
    for page, of_page in readme_tables.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert tables.page_tables.with_tables(text, of_page, "readme_tables.py") == text, "run scripts/readme_tables.py"


def test_a_table_without_its_comments_is_an_error(tables):
    with pytest.raises(ValueError, match=r"table times: expected .* once"):
        tables.page_tables.with_tables("no table", tables.TABLES["measurements/attention.md"], "measurement_tables.py")


def test_later_rows_replace_earlier_ones_and_failures_do_not(tables, tmp_path, monkeypatch):
    lines = ["provider,status,note,median_ms", "a,ok,,1.0", "a,ok,portable path,2.0", "a,out of memory,,"]
    lines += ["a,ok,wrong: err_dx 2.13e+03,0.5", 'a,ok,"portable path, wrong: err_dx nan err_dweight nan",0.25']
    (tmp_path / "some.csv").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.ms(tables.find("some.csv", provider="a")) == "2.00"
    assert tables.find("some.csv", provider="b") is None
    assert tables.ms(None) == ""


def test_misses_of_a_page_are_one_row(tables, tmp_path, monkeypatch):
    lines = ["- FAIL: a: 3, target 2; missed also in 2.5 at 8", "- PASS: b: 1, target 2", "- FAIL: c", "no - FAIL: d"]
    (tmp_path / "some.md").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "other.md").write_text(lines[1], encoding="utf-8")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert list(tables.miss_rows())[1:] == [("[some.md](../../benchmarks/results/some.md)", "a: 3, target 2<br>c")]


@pytest.mark.parametrize("x, text", [(0.0894, "0.0894"), (4.585, "4.58"), (74.031, "74.0"), (1252.76, "1253")])
def test_three_digits(tables, x, text):
    assert tables.significant(x) == text
