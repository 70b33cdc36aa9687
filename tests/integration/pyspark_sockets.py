"""Marks for the tests of a module that uses Spark: `pytestmark = PYSPARK_SOCKETS`."""

from __future__ import annotations

import pytest

PYSPARK_SOCKETS = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""PySpark leaves the sockets on which results come to the garbage collector, which warns of each."""
