"""One made-up run and its report, for all tests of the report."""

import pytest


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run's folder with results of every kind, and their report."""
    from full_run import fill

    from mxd.report.page import write_report

    folder = fill(tmp_path_factory.mktemp("runs") / "made-up")
    write_report(folder)
    return folder
