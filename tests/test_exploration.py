"""The exploration type is one for all threads; whoever sets it leaves it as the program had it."""

from __future__ import annotations

import threading

import pytest
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from swath.rollout.exploration import end_scopes, exploring, open_scopes, own_exploration

# By their values: to a type checker, tensordict's members are mere strings.
RANDOM, MODE = InteractionType("random"), InteractionType("mode")


@pytest.mark.parametrize("kinds", [(RANDOM, RANDOM), (RANDOM, MODE), (MODE, None)])
@pytest.mark.parametrize("first_to_end", [0, 1])
def test_threads_that_overlap_leave_nothing_behind(kinds: tuple, first_to_end: int) -> None:
    begun, may_end = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def explore(which: int) -> None:
        with exploring(kinds[which]):
            begun[which].set()
            assert may_end[which].wait(10)

    threads = [threading.Thread(target=explore, args=(which,)) for which in range(2)]
    for which, thread in enumerate(threads):
        thread.start()
        assert begun[which].wait(10)
    for which in (first_to_end, 1 - first_to_end):
        may_end[which].set()
        threads[which].join(10)
        if which == first_to_end:
            assert interaction_type() is kinds[1 - which]
    assert interaction_type() is None
    assert not open_scopes()


def test_what_the_program_sets_meanwhile_stays() -> None:
    with set_interaction_type(MODE):
        with exploring(RANDOM):
            assert interaction_type() is RANDOM
        assert interaction_type() is MODE
        with exploring(RANDOM):
            set_interaction_type(InteractionType.MEAN).__enter__()
        assert interaction_type() is InteractionType.MEAN


def test_after_ctrl_c_only_what_was_begun_since_is_ended() -> None:
    with exploring(MODE):
        outer = open_scopes()
        exploring(RANDOM).__enter__()  # Ctrl-C: its end never comes
        end_scopes(except_for=outer)
        assert interaction_type() is MODE
        assert open_scopes() == outer


@pytest.mark.parametrize("first_to_end", ["own", "shared"])
def test_a_thread_of_its_own_neither_sees_nor_changes_what_others_share(first_to_end: str) -> None:
    begun, may_end = threading.Event(), threading.Event()
    seen: list[InteractionType | None] = []

    def explore() -> None:
        with own_exploration():
            seen.append(interaction_type())
            with exploring(MODE):
                seen.append(interaction_type())
                begun.set()
                assert may_end.wait(10)
                seen.append(interaction_type())
                with set_interaction_type(InteractionType.MEAN):
                    seen.append(interaction_type())
            seen.append(interaction_type())

    thread = threading.Thread(target=explore)
    with exploring(RANDOM):
        thread.start()
        assert begun.wait(10)
        assert interaction_type() is RANDOM
        if first_to_end == "own":
            may_end.set()
            thread.join(10)
        assert interaction_type() is RANDOM
    assert interaction_type() is None
    may_end.set()
    thread.join(10)
    assert seen == [None, MODE, MODE, InteractionType.MEAN, None]
    assert interaction_type() is None
    assert not open_scopes()
