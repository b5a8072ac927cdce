"""The workflows for a public host: what they call exists, and their versions are those of the package."""

import re
import tomllib

import pytest
import yaml
from paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def steps(path) -> list[dict]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_exist(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    lines = [line for step in steps(path) for line in step.get("run", "").splitlines()]
    made = {target for line in lines if line.startswith("make ") for target in line.split()[1:]}
    files = {word for line in lines for word in line.split() if re.match(r"(tests|docs|bench|\.ci)/", word)}
    assert made | files
    assert made <= targets
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_may_only_read_and_cannot_hang(path):
    data = yaml.safe_load(path.read_text())
    assert data["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 45 for job in data["jobs"].values())
    checkouts = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_only_publishing_may_ask_for_an_identity():
    asking = {
        (path.name, name) for path in WORKFLOWS for name, job in yaml.safe_load(path.read_text())["jobs"].items()
        if "id-token" in job.get("permissions", {})
    }  # fmt: skip
    assert asking == {("release.yml", "publish")}


def test_the_oldest_python_of_the_package_is_tested():
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    versions = job["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13"]
    assert PYPROJECT["project"]["requires-python"] == f">={versions[0]}"
    classifiers = PYPROJECT["project"]["classifiers"]
    assert [v for v in versions if f"Programming Language :: Python :: {v}" in classifiers] == versions


def test_pre_commit_has_the_ruff_of_the_constraints():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"ruff=={repository['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-check", "ruff-format"]


def test_ci_runs_make_test():
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")
