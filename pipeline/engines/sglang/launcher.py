"""Start SGLang's HTTP server, also on a machine without a GPU: `PYTHON launcher.py --model-path DIR …` (its own flags).

Run by the interpreter that has SGLang, so nothing of this project is imported here. SGLang can serve from plain PyTorch
(`--device cpu --attention-backend torch_native`), but importing it needs packages that hold GPU kernels or image code.
Where one is missing, a stand-in lets the import succeed; a kernel of a stand-in raises when it is called. SGLang's
children are spawned, which runs this file in each of them before their own imports, so they get the stand-ins as well.
"""

import ctypes
import ctypes.util
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

PARENT_ENV = "NGU_PARENT_PID"
KERNELS = "sgl_kernel"
OPTIONAL = (KERNELS, "torchvision", "triton")
# SGLang has a fallback of its own for this one and takes it only when the import fails.
HAS_FALLBACK = frozenset({"sgl_kernel.scalar_type"})


class _StandInClass(type):
    """Usable as a base class and in annotations; an attribute of one is its own name (members of enumerations)."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _make_class(name: str, module: str) -> type:
    def ignore(self: object, *args: object, **kwargs: object) -> None: ...

    def itself(cls: type, item: object) -> type:
        return cls

    members = {
        "__module__": module,
        "__init__": ignore,
        "__init_subclass__": classmethod(ignore),
        "__class_getitem__": classmethod(itself),
    }
    return _StandInClass(name, (), members)


def _make_kernel(name: str) -> Any:
    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} needs a GPU: this server runs on stand-ins for the kernel packages")

    return kernel


class _StandIn(types.ModuleType):
    """A package in which every name exists: a class if it is capitalised, a kernel in `sgl_kernel`, else a package.

    Called, it is a decorator that changes nothing, with and without arguments (`triton.jit`).
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in HAS_FALLBACK:
            raise AttributeError(name)
        if self.__name__.partition(".")[0] == KERNELS:
            made: Any = _make_kernel(full)
        elif name[0].isupper():
            made = _make_class(name, self.__name__)
        else:
            made = sys.modules.get(full) or _StandIn(full)
            made.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda decorated: decorated


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]):
        self._packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages or fullname in HAS_FALLBACK:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__file__ = __file__
        module.__dict__["__version__"] = "0.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def install_stand_ins() -> None:
    """Stand-ins for what is missing; none on a machine with CUDA, where a missing kernel package is a fault to see."""
    if ctypes.util.find_library("cuda") is not None:
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # The kernel package imports only where libcuda is, installed or not.
    missing = [name for name in OPTIONAL if name == KERNELS or importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _StandInFinder(missing))


def die_with_parent() -> None:
    """Be killed when the worker that started this server dies, however it dies; SGLang's children follow (Linux)."""
    parent = os.environ.get(PARENT_ENV)
    if parent is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above took effect
        os._exit(1)


def hold_lifeline() -> None:
    """`pipeline.lifeline.hold`, of which this interpreter has the file and no package."""
    spec = importlib.util.spec_from_file_location("lifeline", Path(__file__).parents[2] / "lifeline.py")
    assert spec is not None and spec.loader is not None
    lifeline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lifeline)
    lifeline.hold()


if __name__ in ("__main__", "__mp_main__"):  # here, or in a child that multiprocessing has spawned
    hold_lifeline()
    install_stand_ins()

if __name__ == "__main__":
    die_with_parent()
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
