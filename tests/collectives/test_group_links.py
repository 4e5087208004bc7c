"""What the master remembers of links."""

from __future__ import annotations

import math

from planetary.collectives.group_links import GroupLinks

AB, BA = ("a", "b"), ("b", "a")


def test_a_lasting_drop_has_the_link_measured_again() -> None:
    links = GroupLinks()
    links.measured(AB, 1e9, 0.001)
    links.measured(BA, 1e9, 0.001)
    for speed in (0.8e9, 0.9e9, 0.7e9):
        links.observed(AB, speed)
    for _ in range(4):
        links.observed(AB, 0.2e9)
    assert links.known() == {AB, BA}  # a short dip is none
    links.observed(AB, 0.6e9)
    for _ in range(4):
        links.observed(AB, 0.2e9)
    assert links.known() == {AB, BA}
    links.observed(AB, 0.2e9)
    assert links.known() == {BA}
    links.measured(AB, 0.2e9, 0.001)
    for _ in range(20):
        links.observed(AB, 0.2e9)  # as slow as it now is known to be
    assert links.known() == {AB, BA}


def test_speeds_that_cannot_be_are_passed_over() -> None:
    links = GroupLinks()
    links.measured(AB, 1e9, 0.001)
    for speed in (0.0, -1.0, math.nan, math.inf):
        for _ in range(10):
            links.observed(AB, speed)
    assert links.known() == {AB}


def test_costs_of_unknown_broken_and_forgotten_links() -> None:
    links = GroupLinks()
    assert links.costs("ab") == ((0.0, 1.0), (1.0, 0.0))
    links.measured(AB, float(1 << 20), 0.5)
    assert links.costs("ab") == ((0.0, 1.5), (1.5, 0.0))
    assert not links.blame(BA)
    assert links.blame(BA)
    links.give_up(BA)
    assert links.costs("ab") == ((0.0, 1.5), (math.inf, 0.0))
    assert links.known() == {AB}
    links.forget("a")
    assert links.costs("ab") == ((0.0, 1.0), (1.0, 0.0))
