"""`torch.distributed.checkpoint` and sharded modules, by the programs in `checkpoint_engines.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from checkpoint_programs import grow_while_saving_distributed, several_layouts
from processes import run_alone, run_program

from torchext.deferred_init import deferred_init, is_deferred

PROGRAMS = [
    "shards_of_two_processes_are_saved_alike",
    "one_sharding_is_saved_and_another_loaded",
    "writer_of_hugging_face_has_the_same_files",
    "each_of_two_processes_reads_its_part_of_a_file",
    "placements_divide_files_as_they_divide_tensors",
    "each_of_four_processes_reads_its_part_of_a_file",
]


@pytest.mark.ci
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    run_program("checkpoint_engines", name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_one_process_saves_the_eager_values(tmp_path: Path) -> None:
    model = deferred_init(several_layouts)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "deferred")
    dcp.save(several_layouts().state_dict(), checkpoint_id=tmp_path / "eager")
    for path in (tmp_path / "eager").glob("*.distcp"):
        assert (tmp_path / "deferred" / path.name).read_bytes() == path.read_bytes()
    assert is_deferred(model)


@pytest.mark.ci
def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    grown, size = run_alone(grow_while_saving_distributed, tmp_path)
    assert grown < size / 2
