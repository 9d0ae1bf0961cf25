"""Make `--help` of a training stage quick. Import this before Lightning; in any other run it does nothing.

Printing the help needs Lightning's classes, for their signatures, but none of the packages that come in with them and that
cost half of the six seconds: torchmetrics imports torchvision and scipy for metrics of pictures and sound, Lightning
imports PyTorch's compiler for one `isinstance`. In a process that is asked for help only, and that therefore ends before
any of them could be used, they are replaced by empty stand-ins.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

HEAVY = ("torchvision", "scipy", "sklearn", "sympy", "torch._dynamo")


class _Nothing:
    """Stands for any class or function of a stand-in; as a decorator it gives back what it decorates."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else super().__new__(cls)


class _StandIn(ModuleType):
    __path__: list[str] = []  # noqa: RUF012  marks it as a package, so that its submodules are asked for here too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in HEAVY):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if {"-h", "--help"} & set(sys.argv[1:]) and "lightning" not in sys.modules:
    sys.meta_path.insert(0, _StandInFinder())
