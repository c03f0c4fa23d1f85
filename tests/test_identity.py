"""Is the server that answers the one we mean?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from serving_fakes import FakeSGLang

from eagle3_utils.errors import UserError
from eagle3_utils.serving.launch.identity import check_handshake, last_error, read_handshake
from eagle3_utils.serving.server import AttachedServer, CaptureSpec
from eagle3_utils.target import load_target


@pytest.fixture
def fake(tiny_llama, tmp_path):
    with FakeSGLang(None, load_target(str(tiny_llama)), tmp_path, [2, 4]) as fake:
        yield fake


def spec(fake, layers=(1, 3)) -> CaptureSpec:
    return CaptureSpec(list(layers), fake.dump_dir)


def test_a_server_the_user_started_is_used_after_the_same_checks(fake):
    server = AttachedServer(fake.url, fake.dump_dir, fake.target, spec(fake))
    assert server.handshake["boundaries"] == [2, 4]


def test_a_wrong_model_on_the_right_port_is_refused(fake):
    fake.model_path = "/models/other"
    with pytest.raises(UserError, match="serves /models/other"):
        AttachedServer(fake.url, fake.dump_dir, fake.target, None)


def test_nobody_on_the_port_is_said(fake):
    with pytest.raises(UserError, match="no SGLang server answers"):
        AttachedServer("http://127.0.0.1:9", fake.dump_dir, fake.target, None)


def test_a_missing_handshake_means_that_the_plugin_did_not_load(tmp_path):
    with pytest.raises(UserError, match="the plugin is absent"):
        read_handshake(tmp_path)


@pytest.mark.parametrize(
    ("changes", "nonce", "words"),
    [
        ({"boundaries": [3, 5]}, None, r"boundaries \[3, 5\], expected \[2, 4\]"),
        ({"hidden_size": 1}, None, "hidden_size 1"),
        ({"num_layers": 61}, None, "num_layers 61"),
        ({"nonce": "old"}, "new", "nonce old, expected new"),
        ({"model_path": "/models/other"}, None, "is for /models/other"),
        ({"ranks": {"tp": 2, "attn_tp": 1, "writers": 2}}, None, r"no handshake from data-parallel ranks \[1\]"),
    ],
)
def test_a_handshake_that_differs_is_refused(fake, changes, nonce, words):
    fake.write_handshake(**changes)
    with pytest.raises(UserError, match=words):
        check_handshake(fake.dump_dir, spec(fake), fake.target, nonce)


def test_a_dead_servers_handshake_is_refused(fake):
    fake.write_handshake(pid=2**22 - 1)
    with pytest.raises(UserError, match="a dead server's"):
        AttachedServer(fake.url, fake.dump_dir, fake.target, spec(fake))


def test_the_line_that_says_why_a_server_ended_is_found(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "loading\nTraceback\n  File x\neagle3_capture.hooks.CaptureRefused: capture refuses to start: radix\n\nkilled\n"
    )
    assert last_error(log).endswith("capture refuses to start: radix")
    log.write_text("one\ntwo\n")
    assert last_error(log) == "two"


def test_capture_specs_count_boundaries_from_layer_outputs():
    assert CaptureSpec([1, 14, 26], SimpleNamespace()).boundaries == [2, 15, 27]
