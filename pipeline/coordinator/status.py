"""RUN/status.json: what a person sees of a run, rewritten whole about twice a second."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from pipeline.coordinator.loop import Coordinator
from pipeline.coordinator.queues import queues
from pipeline.ledger import FATES
from pipeline.rundir import read_status, write_atomic

PERIOD_S = 0.5


class StatusFile:
    def __init__(self, run_dir: Path):
        self._path = run_dir / "status.json"
        self._started = read_status(run_dir).get("started") or time.time()
        self._due = 0.0

    def update(self, coordinator: Coordinator, state: str | None = None, reason: str = "") -> None:
        """Write if the period has passed, or at once when a closing `state` is given."""
        now = time.monotonic()
        if state is None and now < self._due:
            return
        self._due = now + PERIOD_S
        status = describe(coordinator) | {"pid": os.getpid(), "time": time.time(), "started": self._started}
        if state is not None:
            status |= {"state": state, "reason": reason}
        write_atomic(self._path, msgspec.json.encode(status))


def describe(coordinator: Coordinator) -> dict[str, Any]:
    tally, ledger, config = coordinator.tally, coordinator.ledger, coordinator.config
    last, evaluation = tally.last_step, coordinator.flow.evaluation
    rollouts_per_s, tokens_per_s = tally.rates()
    return {
        "state": coordinator.state,
        "reason": "",
        "step": coordinator.policy_version,
        "max_steps": config.max_steps or None,
        "rollouts": tally.counters["rollouts"],
        "max_rollouts": config.max_rollouts or None,
        "tokens": tally.counters["tokens"],
        "rollouts_per_s": rollouts_per_s,
        "tokens_per_s": tokens_per_s,
        "lag_mean": last.get("lag_mean"),
        "lag_max": last.get("lag_max"),
        "ess": last.get("ess"),
        "reward_mean": last.get("generated/reward_mean"),
        "hard_pass_at_1": tally.last_eval.get("hard_pass_at_1"),
        "mix_pass_at_1": tally.last_eval.get("mix_pass_at_1"),
        "evaluation": {"left": evaluation.num_missing, "of": len(evaluation.launches)} if evaluation else None,
        "queues": queues(coordinator.flow),
        "attempts": {fate: ledger.counts[fate] for fate in FATES},
        "launched": ledger.counts["launched"],
        "open": ledger.num_open,
        "in_flight_updates": tally.counters["in_flight_updates"],
        "engines": {n: s for n, s in coordinator.peers.stats.items() if n in coordinator.peers.rotation.versions},
        "verifiers": {n: s for n, s in coordinator.peers.stats.items() if _role(coordinator, n) == "verifier"},
        "gateway": next((s for n, s in coordinator.peers.stats.items() if _role(coordinator, n) == "gateway"), None),
        "learner": next((s for n, s in coordinator.peers.stats.items() if _role(coordinator, n) == "learner"), None),
        "catching_up": _catching_up(coordinator),
        "peers": _peers(coordinator),
        "mode": coordinator.mode,
        "sampler": coordinator.sampler.stats(),
        "errors": tally.errors(),
        "warnings": list(tally.warnings),
    }


def _catching_up(coordinator: Coordinator) -> dict[str, int] | None:
    """Where a learner that was started alone is, on its way to the newest version."""
    version = coordinator.lineage.version
    if version is None or version >= coordinator.policy_version:
        return None
    return {"at": version, "to": coordinator.policy_version}


def _peers(coordinator: Coordinator) -> dict[str, dict[str, Any]]:
    """Every process that has said Hello; `silent_s` is null until its first word after that.

    `pid` is 0 and `host` the machine for one that is elsewhere; a gateway's `host` is where it listens.
    """
    now, flow = coordinator.clock(), coordinator.flow
    peers = {}
    for name, hello in coordinator.peers.known.items():
        heard = coordinator.peers.last_heard.get(name)
        peers[name] = {
            "role": hello.role,
            "pid": hello.pid,
            "host": hello.host,
            "version": coordinator.peers.rotation.versions.get(name),
            "held": sum(queue.held_by(name) for queue in (flow.work, flow.eval_work, flow.jobs)),
            "silent_s": None if heard is None else now - heard,
        }
    return peers


def _role(coordinator: Coordinator, name: str) -> str | None:
    hello = coordinator.peers.known.get(name)
    return hello.role if hello else None
