"""Threads and copies: what is set comes back, what is copied is the same."""

import pytest
import torch

from eagle3_utils.devices import one_torch_thread, to_device


def test_the_number_of_threads_comes_back_after_an_error_too():
    before = torch.get_num_threads()
    with pytest.raises(ValueError), one_torch_thread():
        assert torch.get_num_threads() == 1
        raise ValueError
    assert torch.get_num_threads() == before


def test_a_copy_to_the_cpu_is_the_tensor():
    tensor = torch.arange(3)
    assert torch.equal(to_device(tensor, "cpu"), tensor)
