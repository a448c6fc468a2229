"""Workers of a run on other machines, as processes: they come, go, die, and their cable is cut, slow, half-open."""

import os
import signal
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from namespaces import Machine, why_not_permitted
from ports import free_port
from safetensors.torch import load, save
from small_run import SmallRun
from tiny_models import teacher_forced
from transformers import AutoModelForCausalLM

from pipeline import rundir
from pipeline.messages import (
    Batch,
    Judgement,
    Judgements,
    Rollout,
    Verdict,
    VerifyJobs,
    WeightsNotice,
    pack_ids,
    pack_logprobs,
)
from pipeline.model_path import resolve_model_path

# How long the cable is cut, and deaf: `just cable 30` asks for more than the few seconds of every test run.
CUT_S = float(os.environ.get("NGU_CUT_S", "5"))
pytestmark = pytest.mark.timeout(280 + 5 * CUT_S)  # the machine may be busy


def started(closing: list[Any], *settings: str) -> SmallRun:
    """A run with one engine of its own and a gateway."""
    run = SmallRun(*settings, "max_rollouts=1000000")
    closing.append(run)
    run.start("gateway", "pipeline.remote.gateway", str(run.dir))
    run.start("engine-0", "pipeline.worker", str(run.dir), "--name", "engine-0")
    return run


def worker_argv(run: SmallRun) -> list[str]:
    return ["worker", "--connect", run.address(), "--key", str(run.dir / "keys" / "worker.key")]


def test_workers_join_leave_and_die_while_the_run_goes_on(closing):
    run = started(closing, f"daemon.listen=tcp://127.0.0.1:{free_port()}", "daemon.hang_s=3.0")
    run.until(lambda: run.trained_by("engine-0", 100), "the run's own engine")
    for name in ("first", "second"):
        run.start(name, "pipeline.cli", *worker_argv(run), "--slots", "8")
        run.until(lambda: run.trained_by("remote0", 50), "its rollouts")
        run.until(lambda: run.trained_by("remote1", 50) or name == "first", "its rollouts")  # noqa: B023
    with rundir.lock(run.dir):  # as its supervisor would
        here = run.ngu("status", str(run.dir)).stdout
    assert "remote1 on" in here and "gateway at tcp://127.0.0.1" in here, here
    peer = run.peers()["remote0"]
    assert (peer["role"], peer["pid"], peer["version"] > 0) == ("engine", 0, True)
    run.processes["first"].send_signal(signal.SIGTERM)
    run.until(lambda: run.processes["first"].poll() is not None, "its farewell")
    assert run.processes["first"].returncode == 0, run.log("first")
    run.until(lambda: "remote0" not in run.peers(), "the run to notice")
    run.processes["second"].kill()
    run.until(lambda: "remote1" not in run.peers(), "the run to notice")
    run.until(lambda: any("remote1 (" in w for w in run.status()["warnings"]), "a warning")
    run.start("third", "pipeline.cli", *worker_argv(run))
    run.until(lambda: "remote0" in run.peers(), "a third one")
    assert len(list(run.dir.parent.glob("ngu-worker-*"))) == 1, "it has cleared up behind the one that was killed"
    run.start("judge", "pipeline.cli", *worker_argv(run), "--role", "verifier")
    judged = lambda: run.status()["verifiers"].get("remote-verifier0", {}).get("num_correct", 0)  # noqa: E731
    run.until(lambda: judged() > 20, "verdicts from another machine")
    run.processes["gateway"].kill()
    run.processes["gateway"].wait()
    before = run.by_engine["remote0"]
    run.start("gateway", "pipeline.remote.gateway", str(run.dir))
    run.until(lambda: run.trained_by("remote0", before + 50), "rollouts by way of the new gateway")
    run.until(lambda: run.gateway.get("joined") == 2, "its count")
    run.until(lambda: judged() > 40, "verdicts by way of it")
    run.processes["judge"].send_signal(signal.SIGTERM)
    run.until(lambda: run.processes["judge"].poll() is not None, "its farewell")
    assert run.processes["judge"].returncode == 0, run.log("judge")
    run.until(lambda: "remote-verifier0" not in run.peers(), "the run to notice")
    run.finish()
    run.until(lambda: run.processes["third"].poll() is not None, "the worker to hear that the run is over")
    assert run.processes["third"].returncode == 0, run.log("third")


class RealWeights(SmallRun):
    """Its learner publishes the model that ships, from version 2 on in another file, which is torn when it is first
    announced; every second rollout is right.
    """

    def __init__(self, *settings: str):
        directory = resolve_model_path("builtin")
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.rollouts: list[Rollout] = []
        ids, path = list(range(3, 12)), directory / "model.safetensors"
        canary = pack_ids(ids), pack_logprobs(teacher_forced(self.model, ids))
        self._paths, self._notices = [path], []
        for data in (path.read_bytes(), save(load(path.read_bytes()), metadata={"name": "second"})):
            self._notices.append(
                WeightsNotice(0, str(path), xxhash.xxh3_64_hexdigest(data), len(data), str(directory), *canary)
            )
        super().__init__(*settings)
        for name, size in (("torn", len(data) // 2), ("whole", len(data))):
            self._paths.append(self.dir / name)
            self._paths[-1].write_bytes(data[:size])
        self._judge = self

    def _publish(self) -> WeightsNotice:
        notice, path = self._notices[self.version >= 2], self._paths[0]
        if self.version >= 2:  # the torn file once, and then the whole one
            path = self._paths.pop(1) if len(self._paths) == 3 else self._paths[1]
        return msgspec.structs.replace(notice, policy_version=self.version, path=str(path))

    def judge(self, jobs: VerifyJobs) -> Judgements:
        rewards = ((job.attempt_id, job.attempt_id % 2) for job in jobs.jobs)
        outcomes = ("incorrect", "correct")
        return Judgements(tuple(Judgement(i, Verdict(outcomes[reward], float(reward))) for i, reward in rewards))

    def _step(self, batch: Batch) -> None:
        self.rollouts += [rollout for group in batch.groups for rollout in group.rollouts]
        super()._step(batch)


def test_an_embedded_engine_serves_from_another_machine(closing):
    run = RealWeights("engines.kind=embedded", f"daemon.listen=tcp://127.0.0.1:{free_port()}", "max_rollouts=1000000")
    closing.append(run)
    run.start("gateway", "pipeline.remote.gateway", str(run.dir))
    run.start("worker", "pipeline.cli", *worker_argv(run))
    newest = lambda: run.peers()["remote0"]["version"] or 0  # noqa: E731
    run.until(lambda: run.trained_by("remote0", 60) and newest() > 2, "its rollouts", timeout_s=250.0)
    run.finish()
    run.until(lambda: run.processes["worker"].poll() is not None, "the worker to hear that the run is over")
    assert run.processes["worker"].returncode == 0, run.log("worker")
    assert run.status()["errors"] == {"error/weights": 1}, "the gateway refused what was torn, once"
    for rollout in run.rollouts[:20]:
        prompt = rollout.prompt_array().tolist()
        expected = teacher_forced(run.model, prompt + rollout.completion_array().tolist())[len(prompt) - 1 :]
        assert rollout.logprob_array() == pytest.approx(expected, abs=1e-4)


def test_a_cable_that_is_cut_slow_or_half_open_costs_time_and_nothing_else(closing):
    if reason := why_not_permitted():
        pytest.skip(f"network namespaces: {reason}")
    machine = Machine()
    closing.append(machine)
    run = started(closing, f"daemon.listen=tcp://{machine.here}:0", f"daemon.hang_s={CUT_S + 7}")
    run.start("worker", "pipeline.cli", *worker_argv(run), inside=machine.argv)

    def goes_on(what: str) -> None:
        before = dict(run.by_engine)
        for engine in ("engine-0", "remote0"):
            run.until(lambda: run.trained_by(engine, before.get(engine, 0) + 50), f"{engine} after {what}")  # noqa: B023

    goes_on("joining")
    machine.cut()
    run.go_on(CUT_S)  # at 5 s for either end to give the connection up, at 30 for both
    machine.mend()
    goes_on("a cut")
    machine.slow(4000)  # weights of 1 MiB take two seconds, and a step a tenth of one
    version = run.peers()["remote0"]["version"]
    run.until(lambda: (run.peers()["remote0"]["version"] or 0) > version + 10, "newer weights over the slow cable")
    goes_on("a slow cable")
    machine.quicken()
    machine.deafen()
    run.go_on(CUT_S)
    machine.undeafen()
    goes_on("a half-open connection")
    run.go_on(1.5)  # until the gateway's counts are those of now
    assert (run.gateway["joined"], run.gateway["cut_off"]) == (1, 0), "one session through all of it"
    machine.cut()
    run.until(lambda: "remote0" not in run.peers(), "the run to give it up")
    before = run.by_engine["engine-0"]
    run.until(lambda: run.trained_by("engine-0", before + 100), "its work to be done by others")
    machine.mend()
    goes_on("its work was sent again")
    run.go_on(1.5)
    assert (run.gateway["joined"], run.gateway["cut_off"], run.gateway["workers"]) == (2, 1, 1)
    run.finish()
    run.until(lambda: run.processes["worker"].poll() is not None, "the worker to hear that the run is over")
    assert run.processes["worker"].returncode == 0, run.log("worker")
