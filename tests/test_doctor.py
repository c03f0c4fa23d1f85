"""`eagle3 doctor`: every finding has a verdict, and a missing piece is a failure."""

from __future__ import annotations

from pathlib import Path

from eagle3_utils import doctor


def test_this_environment_is_healthy_and_every_check_reports():
    findings = {finding.name: finding for finding in doctor.checkup()}
    assert {"python", "sglang", "torch", "transformers", "plugin", "/dev/shm", "disk", "ports"} <= findings.keys()
    assert not [finding for finding in findings.values() if finding.verdict == "fail"]


def test_a_missing_package_fails_and_another_version_warns():
    assert doctor._package("no-such-package", "1.0").verdict == "fail"
    assert doctor._package("torch", "0.1").verdict == "warn"


def test_a_missing_plugin_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    assert doctor._plugin().verdict == "fail"


def test_gpus_that_torch_cannot_use_are_a_failure(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor.gpus, "free_bytes", lambda: [140 << 30])
    assert [finding.verdict for finding in doctor._gpus()] == ["fail"]
    monkeypatch.setattr(doctor.gpus, "free_bytes", list)
    assert [finding.verdict for finding in doctor._gpus()] == ["warn"]


def test_little_room_and_no_folder_warn(tmp_path):
    assert doctor._room("disk", tmp_path, wanted_gib=1 << 40).verdict == "warn"
    assert doctor._room("shm", Path("/no/such/folder"), wanted_gib=1).verdict == "warn"
