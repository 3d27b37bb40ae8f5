"""The fast half of the chaos matrix; `make chaos` runs all of it (tests/chaos/matrix.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.matrix import FAULTS, FIVE, Fault, play
from chaos.scene import LAYOUTS, Stage

CELLS = [(fault, layout) for layout in LAYOUTS for fault in FAULTS if layout in fault.fast]
"""By layout: neighbours are run by one worker, and share an undisturbed twin."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    return Stage(tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize(("fault", "layout"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_a_fault_has_the_outcome_that_its_row_states(stage: Stage, fault: Fault, layout: str) -> None:
    play(fault, stage.scene(layout, *fault.overrides))


def test_the_matrix_has_sixty_faults_and_each_layout_its_share() -> None:
    assert len({(fault.group, fault.name) for fault in FAULTS}) == len(FAULTS) >= 60
    for layout in FIVE:
        assert sum(layout in fault.layouts for fault in FAULTS) >= 60, layout
