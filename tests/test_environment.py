"""One environment, said three times (pyproject.toml, requirements.lock, environment.yml), must be the same one."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import yaml
from packaging.requirements import Requirement

from eagle3_utils.doctor import PINNED
from eagle3_utils.runs import repo_root

ROOT = repo_root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if line.strip()]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_in_the_lock_and_fits_it():
    pinned = {canonical(pin.name): str(pin.specifier).removeprefix("==") for pin in LOCK if _applies(pin)}
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pinned[canonical(wanted.name)]), text


def test_the_lock_holds_names_and_exact_versions_only():
    for pin in LOCK:
        assert pin.url is None and [s.operator for s in pin.specifier] == ["=="], str(pin)


def test_what_is_installed_is_what_is_locked():
    wrong = {pin.name: metadata.version(pin.name) for pin in LOCK if _applies(pin) and not _fits(pin)}
    assert not wrong, "run make setup"


def test_conda_installs_the_lock_and_this_package():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert pip == ["-r requirements.lock", "-e ."]
    python = next(item for item in environment["dependencies"] if str(item).startswith("python="))
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python.removeprefix("python="))


def test_doctor_names_the_locked_versions():
    pinned = {pin.name: str(pin.specifier).removeprefix("==") for pin in LOCK if _applies(pin)}
    assert {name: pinned[name] for name in PINNED} == PINNED


def _applies(pin: Requirement) -> bool:
    return pin.marker is None or pin.marker.evaluate()


def _fits(pin: Requirement) -> bool:
    return pin.specifier.contains(metadata.version(pin.name), prereleases=True)
