"""A supervisor whose roles are a few lines each."""

import sys
from pathlib import Path

from pipeline.supervisor import Role, Supervisor

ENGINE = """
import os, time
open("engine.partial", "w").write(str(os.getpid()))
os.rename("engine.partial", "engine")
time.sleep(100)
"""
# One rank says who it is and where it meets the others.
LEARNER = """
import os, sys, time
*_, meet, _, rank = sys.argv
open(f"partial-{rank}", "w").write(f"{os.getpid()} {meet}")
os.rename(f"partial-{rank}", f"rank-{rank}")
time.sleep(100)
"""


class TinySupervisor(Supervisor):
    code = ""
    learner = LEARNER

    def _learner_argv(self, checkpoint: Path | None) -> list[str]:
        return [sys.executable, "-S", "-c", self.learner]

    def _start_all(self, checkpoint: Path | None) -> None:
        python = [sys.executable, "-S", "-c"]
        self.roles = [
            Role("coordinator", [*python, self.code]),
            *(self._learner_roles(checkpoint) if self.config.learner.num_processes > 1 else ()),
            Role("engine-0", [*python, ENGINE]),
        ]
        for role in self.roles:
            role.grace_s = 0.0  # none of them would use it
            self._start(role)
