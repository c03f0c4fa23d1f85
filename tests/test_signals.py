"""A first signal is a wish, a later one an interrupt; handlers are put back."""

import signal

import pytest

from eagle3_utils.draft.training import signals
from eagle3_utils.draft.training.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_sets_the_wish_and_one_that_is_not_its_echo_interrupts(number, monkeypatch):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        signal.raise_signal(number)  # at once: the same wish by another way
        monkeypatch.setattr(signals, "_SAME_WISH_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
