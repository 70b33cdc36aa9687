from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from headwater.errors import HeadwaterError
from headwater.spark import java
from headwater.spark.trust_store import PASSWORD, key_store


@pytest.fixture(autouse=True)
def _own_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java, "find_java", java.find_java.__wrapped__)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(java, "_packaged_runtime", lambda: None)


def _java(home: Path, version: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -XshowSettings:properties ] || {{ for a in "$@"; do echo "<$a>"; done; exit; }}\n'
        f"echo '    java.home = {home}' >&2\necho '    java.specification.version = {version}' >&2\n"
    )
    program.chmod(0o755)
    return home


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "17", "17")))
    found = _java(tmp_path / "21", "21")
    monkeypatch.setattr(shutil, "which", lambda name: str(found / "bin" / "java"))
    assert java.find_java() == java.Java(tmp_path / "17", 17, "JAVA_HOME")


def test_instead_of_an_old_java_home_the_path_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "8", "1.8")))
    found = _java(tmp_path / "21", "21")
    monkeypatch.setattr(shutil, "which", lambda name: str(found / "bin" / "java"))
    assert java.find_java() == java.Java(found, 21, "PATH")


def test_without_any_java_the_error_says_what_was_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "8", "1.8")))
    with pytest.raises(HeadwaterError, match="no Java 17 or newer") as caught:
        java.find_java()
    assert "is version 8" in caught.value.detail


@pytest.mark.parametrize("packaged", [True, False])
def test_java_is_started_without_the_flag_that_makes_it_warn_or_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packaged: bool
) -> None:
    runtime = _java(tmp_path / "java", "21")
    monkeypatch.setattr(java, "machine_trust_store", lambda: None)
    if packaged:
        monkeypatch.setattr(java, "_packaged_runtime", lambda: runtime)
    else:
        monkeypatch.setenv("JAVA_HOME", str(runtime))
    home = java.java_home()
    assert home != runtime
    # A process that we start finds the same Java behind the script that it is told to use.
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.java_home() == home
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "Main", 'it\'s "$x"']
    said = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["<-cp>", "<a b>", "<>", "<Main>", '<it\'s "$x">']


def test_a_key_store_ends_in_the_digest_java_checks() -> None:
    store = key_store([b"first", b"second"])
    body, digest = store[:-20], store[-20:]
    assert body.startswith(bytes.fromhex("feedfeed 00000002 00000002"))
    assert digest == hashlib.sha1(PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body).digest()
