"""Log lines: plain, and without secrets."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from headwater.observability.log import PlainFormatter, configure, redact
from headwater.observability.outlet import flush


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("headwater")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("host=db password=hunter2 user=me", "host=db password=*** user=me"),
        ("{'password': 'hun ter2', 'a': 1}", "{'password': ***, 'a': 1}"),
        ("postgresql://me:hunter2@db/shop", "postgresql://me:***@db/shop"),
        ("the password is wrong", "the password is wrong"),
        ("c.password: the environment variable X is not set", "c.password: the environment variable X is not set"),
        ("c.password: missing; expected a string", "c.password: missing; expected a string"),
        ("c.password: expectedly", "c.password: ***"),
        ("jdbc:sqlite:/tmp/catalog.db", "jdbc:sqlite:/tmp/catalog.db"),
    ],
)
def test_what_looks_like_a_secret_is_blotted_out(text: str, wanted: str) -> None:
    assert redact(text) == wanted


@pytest.mark.invariant(16)
def test_a_known_secret_is_blotted_out_of_messages_arguments_and_tracebacks(
    restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(logging.INFO, ["hunter2hunter2", "hunter2"])
    try:
        raise ValueError("bad hunter2hunter2")
    except ValueError:
        logging.getLogger("headwater.engine.apply").exception("failed with %s", "hunter2")
    assert flush()
    said = capsys.readouterr().err
    assert "hunter2" not in said
    assert "error engine apply: failed with ***" in said
    assert "ValueError: bad ***" in said


def test_third_parties_are_quiet_and_configuring_twice_does_not_double_lines(
    restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    configure()
    configure()
    logging.getLogger("py4j.java_gateway").info("chatter")
    logging.getLogger("headwater.x").info("once")
    assert flush()
    said = capsys.readouterr().err
    assert said.count("once") == 1
    assert "chatter" not in said


def test_a_secret_too_short_to_be_one_blots_out_nothing() -> None:
    record = logging.LogRecord("headwater.x", logging.INFO, "", 0, "a table", (), None)
    assert PlainFormatter(["a"]).format(record).endswith("info x: a table")
