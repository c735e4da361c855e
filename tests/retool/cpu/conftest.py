"""The marker of the tests that make a whole Debian: they run only where they are asked for, with -m debian."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "debian: makes a bare Debian by debootstrap and runs both commands in it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "debian" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("debian"):
            item.add_marker(pytest.mark.skip(reason="makes a bare Debian, half an hour: pass -m debian as root"))
