"""What a user sees of a mistake: where, what, and what to do."""

from eagle3_utils.errors import UserError


def test_the_place_comes_first_and_the_remedy_on_a_line_of_its_own():
    error = UserError("the disk is full", "/data", "free 3 GiB, then run again")
    assert str(error) == "/data: the disk is full\n  free 3 GiB, then run again"
    assert error.exit_code == 1


def test_what_alone_is_enough():
    assert str(UserError("no such stage", exit_code=2)) == "no such stage"
