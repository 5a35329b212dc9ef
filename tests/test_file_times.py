"""The recorded times of test files: which come first, and which are too long."""

import json
from types import SimpleNamespace

import pytest

from tests import file_times


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Write a record of two files."""

    def write(first: float, second: float) -> None:
        seconds = {"tests/conftest.py": first, "tests/file_times.py": second, "tests/test_removed.py": 1000.0}
        (tmp_path / "seconds.json").write_text(json.dumps(seconds))

    monkeypatch.setattr(file_times, "RECORD", tmp_path / "seconds.json")
    return write


def test_a_file_that_took_too_long_is_named(record, capsys):
    limit = file_times.SCATTER * file_times.LONGEST_S
    record(limit - 0.1, 60.0)
    assert file_times.main() == 0
    record(60.0, limit + 0.1)
    assert file_times.main() == 1
    assert capsys.readouterr().out.startswith(f"tests/file_times.py took {limit:.0f} s of {file_times.LONGEST_S}")


def test_a_file_may_have_a_limit_of_its_own(record, monkeypatch):
    monkeypatch.setitem(file_times.LONGER, "tests/file_times.py", 200)
    record(1.0, 200 * file_times.SCATTER - 0.1)
    assert file_times.main() == 0
    record(1.0, 200 * file_times.SCATTER + 0.1)
    assert file_times.main() == 1
    assert all((file_times.ROOT / file).is_file() for file in file_times.LONGER)


def test_a_slow_machine_has_longer_limits_and_one_slow_file_does_not_make_it_slow(record, monkeypatch):
    usual = file_times.SPEED_S
    known = {f"tests/test_{i}.py": usual for i in range(file_times.FEW)}
    monkeypatch.setattr(file_times, "committed", lambda: known | {"tests/test_short.py": 1.0})
    assert file_times.slowness(dict.fromkeys(known, 2 * usual)) == 2.0
    assert file_times.slowness(dict.fromkeys(known, usual / 2)) == 1.0
    assert file_times.slowness(dict.fromkeys(known, usual) | {"tests/test_0.py": 500.0}) == 1.0
    assert file_times.slowness({"tests/test_0.py": 500.0, "tests/test_short.py": 500.0}) == 1.0
    record(1.0, 2 * file_times.LONGEST_S)
    assert file_times.main() == 1
    monkeypatch.setattr(file_times, "slowness", lambda seconds: 2.0)
    assert file_times.main() == 0


def test_without_a_record_nothing_is_too_long(record):
    assert file_times.main() == 0


def test_unknown_files_come_first_and_then_the_longest(record):
    record(3.0, 30.0)
    names = ["tests/conftest.py::a", "tests/file_times.py::b", "tests/test_new.py::c", "tests/file_times.py::d"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    file_times.longest_first(items)
    assert [item.nodeid[-1] for item in items] == ["c", "b", "d", "a"]


def test_times_are_recorded_without_long_tests_unless_a_part_of_a_file_was_run(record, tmp_path):
    def finish(keyword: str, *arguments: str) -> dict[str, float]:
        times = file_times.FileTimes()
        for name, keywords in (("a", {}), ("b", {}), ("c", {"long": 1})):
            report = SimpleNamespace(nodeid=f"tests/conftest.py::{name}", duration=2.0, keywords=keywords)
            times.pytest_runtest_logreport(report)
        times.pytest_sessionfinish(
            SimpleNamespace(config=SimpleNamespace(option=SimpleNamespace(keyword=keyword), args=arguments))
        )
        return file_times.recorded()

    record(1.0, 30.0)
    assert finish("name", "tests")["tests/conftest.py"] == 1.0
    assert finish("", "tests/conftest.py::a")["tests/conftest.py"] == 1.0
    assert finish("", "tests")["tests/conftest.py"] == 4.0
    assert file_times.recorded()["tests/file_times.py"] == 30.0
