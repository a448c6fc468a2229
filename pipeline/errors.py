"""The one error family of the project; every message says what to do about it."""


class NguError(Exception):
    """Base of all expected errors. `exit_status` is what the command line exits with."""

    exit_status = 1

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class ConfigError(NguError):
    """The user's input is wrong: a file, a field, a value."""

    exit_status = 2


class OtherVersion(ConfigError):
    """What an earlier run has left is whole, and of another version of this package."""


class WireError(NguError):
    """A peer sent what is not a valid message; `kind` is the word under which it is counted."""

    def __init__(self, message: str, kind: str = "bytes"):
        super().__init__(message)
        self.kind = kind

    def __reduce__(self):
        return (type(self), (self.message, self.kind))


class EngineError(NguError):
    """An inference engine failed; `retryable` says whether its attempts may be launched again."""

    def __init__(self, message: str, retryable: bool = True):
        super().__init__(message)
        self.retryable = retryable

    def __reduce__(self):
        return (type(self), (self.message, self.retryable))


class WeightError(NguError):
    """A weights file is missing, torn, or not what its notice promised."""


class WrongWeights(WeightError):
    """An engine loaded the announced bytes and computes other logprobs than the learner: it serves nothing now."""


class VerifierError(NguError):
    """The verifier itself failed (a wrong answer is a verdict, never an error)."""


class RunFailed(NguError):
    """The run stopped for good; the message is the reason shown on the first line of `ngu status`."""
