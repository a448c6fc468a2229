"""What a person may ask of a running coordinator: each command changes it between two turns and says what it did."""

from pipeline.control import Reply, Request, changed_live
from pipeline.coordinator.loop import Coordinator, Mode
from pipeline.errors import ConfigError
from pipeline.rundir import write_config


class Controls:
    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator

    def handle(self, request: Request) -> Reply:
        if self._coordinator.state in ("stopping", "stopped", "finished"):
            return Reply(False, "the run is ending")
        try:
            return Reply(True, self._act(request))
        except ConfigError as e:
            return Reply(False, e.message)

    def _act(self, request: Request) -> str:
        coordinator = self._coordinator
        match request.verb:
            case "pause":
                return self._switch("pause", "paused: what runs is finished and judged, no step is started")
            case "drain":
                return self._switch("drain", "draining: nothing new is launched, full batches are still trained")
            case "resume":
                return self._switch("run", "running")
            case "checkpoint":
                coordinator.save_requested = True
                return f"a checkpoint is saved at step {coordinator.policy_version}, or after the step in training"
            case "eval":
                if coordinator.state != "training":
                    raise ConfigError("an evaluation can start during training, and one at a time")
                coordinator.evaluator.ask()
                return f"evaluating from step {coordinator.policy_version} on, beside training"
            case "set":
                return self._set(request.setting)
            case "engines":
                raise ConfigError("the supervisor has the engines")
            case "shutdown":
                coordinator.stop_requested = True
                return "saving a checkpoint and ending every process of the run"

    def _switch(self, mode: Mode, text: str) -> str:
        before, self._coordinator.mode = self._coordinator.mode, mode
        return f"nothing to do: {text}" if before == mode else text

    def _set(self, setting: str) -> str:
        coordinator = self._coordinator
        config, change = changed_live(coordinator.config, setting)
        if config.eval.every_steps > coordinator.config.eval.every_steps:
            coordinator.evaluator.check(config.eval)
        coordinator.reconfigure(config)
        write_config(coordinator.run_dir, config)  # so that a restarted role, and a resumed run, go on with it
        return f"{change}, from step {coordinator.policy_version} on"
