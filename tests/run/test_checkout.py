"""What a run says of its checkout and its CI job: right, harmless, and nothing where nothing is known."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.run.session.environment import ci_link, header, source

GIT = shutil.which("git")
WHO = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def _git(folder: Path, *words: str) -> str:
    if GIT is None:
        pytest.skip("no git here")
    clean = {**os.environ, **WHO, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run([GIT, *words], cwd=folder, env=clean, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one commit of two files, on the branch `main`."""
    folder = tmp_path / "checkout"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_text("a", encoding="utf-8")
    (folder / "deep" / "b").write_text("b", encoding="utf-8")
    _git(folder, "init", "-q")
    _git(folder, "symbolic-ref", "HEAD", "refs/heads/main")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "one")
    return folder


def test_commit_and_branch_are_git_s(checkout: Path) -> None:
    """Commit and branch are what git says, from any folder of the checkout, packed or not, and in a second checkout."""
    want = {"commit": _git(checkout, "rev-parse", "HEAD").strip(), "branch": "main"}
    assert source(checkout / "deep", {}) == want
    _git(checkout, "gc", "-q")
    assert source(checkout, {}) == want
    _git(checkout, "worktree", "add", "-q", "-b", "other", "../second")
    assert source(checkout.parent / "second", {}) == {**want, "branch": "other"}
    _git(checkout, "checkout", "-q", "--detach")
    assert source(checkout, {}) == {"commit": want["commit"]}
    assert source(checkout, {"GITHUB_REF_NAME": "of\nCI"})["branch"] == "of\ufffdCI"


def test_nothing_of_a_stranger_s_checkout_runs(checkout: Path) -> None:
    """What `.git/config` names as a monitor or a filter is not started."""
    evil = checkout.parent / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {checkout.parent}/ran\n", encoding="utf-8")
    evil.chmod(0o755)
    _git(checkout, "config", "core.fsmonitor", str(evil))
    _git(checkout, "config", "filter.x.clean", str(evil))
    (checkout / ".git" / "info" / "attributes").write_text("* filter=x\n", encoding="utf-8")
    (checkout / "a").write_text("b", encoding="utf-8")
    assert source(checkout, {})["branch"] == "main"
    assert not (checkout.parent / "ran").exists()


@pytest.mark.parametrize("name", ["HEAD", "refs/heads/main"])
@pytest.mark.parametrize("how", ["garbage", "empty", "folder", "pipe", "cut"])
def test_a_damaged_checkout_is_no_error(checkout: Path, name: str, how: str) -> None:
    """Whatever git's files are, nothing is raised and nothing is waited for; no commit is made up."""
    path = checkout / ".git" / name
    raw = path.read_bytes() if path.is_file() else b""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes({"garbage": b"\xff\0DIRC" * 9, "empty": b"", "cut": raw[: len(raw) // 2]}[how])
    assert "commit" not in source(checkout, {})


def test_no_checkout_says_nothing(tmp_path: Path) -> None:
    """A folder outside any checkout, and one whose `.git` leads nowhere, have neither commit nor branch."""
    (tmp_path / ".git").write_text("gitdir: nowhere\n", encoding="utf-8")
    assert source(tmp_path, {}) == {}


def test_every_document_says_where_it_comes_from(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of every document has the commit and the CI job's link beside the machine."""
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("CI_JOB_URL", "https://ci.example/jobs/7")
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    environment = header("perf")["environment"]
    assert environment["commit"] == _git(checkout, "rev-parse", "HEAD").strip()
    assert environment["ci"] == "https://ci.example/jobs/7"
    assert environment["machine"]


GITHUB = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "12"}


@pytest.mark.parametrize(
    ("variables", "link"),
    [
        (GITHUB, "https://github.com/a/b/actions/runs/12"),
        ({**GITHUB, "GITHUB_RUN_ID": ""}, None),
        ({"BUILD_URL": "https://jenkins.example:8443/job/x/7/"}, "https://jenkins.example:8443/job/x/7/"),
        ({"BUILD_URL": "http://jenkins.example/job/x/7/"}, None),
        ({"CI_JOB_URL": "javascript:alert(1)//https://x"}, None),
        ({"CI_JOB_URL": "https://user:secret@ci.example/7"}, None),
        ({"CI_JOB_URL": "https://ci.example/7\nX"}, None),
        ({"CI_JOB_URL": 'https://ci.example/"><script>'}, None),
        ({"CI_JOB_URL": "https://ci.example/" + "a" * 2000}, None),
        ({"CI_JOB_URL": "https://ci.ex\u0430mple/7", "BUILD_URL": "https://b.example/7"}, "https://b.example/7"),
        ({}, None),
    ],
)  # fmt: skip
def test_only_plain_https_is_a_link(variables: dict[str, str], link: str | None) -> None:
    """The CI job's link is https to a plain host, with no user's name and nothing that a page could take for more."""
    assert ci_link(variables) == link
