"""What a role does to its own process."""

import gc
import subprocess
import sys

from pipeline.role import few_collections

# Blocks that come and go together, as the messages of a turn do.
FAULTS = """
import resource, sys
from pipeline.role import keep_freed_memory
if sys.argv[1:]:
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytes(1 << 20) for _ in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([faults() for _ in range(4)][-1])
"""


def faults(*argument: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, *argument], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_that_messages_have_used_is_used_again_without_page_faults():
    assert faults("kept") < faults() / 4


def test_a_loop_that_makes_many_objects_is_not_searched_for_cycles_each_time():
    before, usual = gc.get_threshold(), (700, 10, 10)
    gc.set_threshold(*usual)  # whatever a library has set
    try:
        with few_collections():
            assert gc.get_threshold()[0] > 10 * usual[0] and gc.get_freeze_count() > 0
        assert (gc.get_threshold(), gc.get_freeze_count()) == (usual, 0)
    finally:
        gc.set_threshold(*before)
