"""The Python that was traced, and what it names: looked up again, and compared by digest, before a graph is used.

A traced function is described where it is loaded: in the module that its file is. So its text on disk does not matter,
and a function that was replaced at run time counts as what it is now.
"""

from __future__ import annotations

import builtins
import dis
import os
import sys
import types
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch

from shardgraph.cache.digests import BUILT_IN, OF_THE_RUN, VOLATILE, Digest, NoDigest, has_file
from shardgraph.cache.values import OPERATORS
from shardgraph.torch_api import OpOverload, OpOverloadPacket, known_module

_OTHER_EACH_TIME = frozenset(("random", "secrets", "time", "uuid", "datetime"))
_ENVIRONMENT = frozenset(("environ", "environb", "getenv", "getenvb"))
_KNOWN = frozenset(("torch", "operator", "_operator", "math", "builtins"))
_TORCH = os.path.dirname(torch.__file__) + os.sep

Names = Mapping[str, list[str]]
"""By the name of a module, what traced code of its file looks up."""


def names_in(traced: Iterable[types.CodeType]) -> Names:
    """What traced code looks up, by module.

    Raises:
        NoDigest: a trace of it may be another one at the next start.
    """
    found: dict[str, set[str]] = {}
    files, variables = _files(), set[str]()
    for code in traced:
        if code.co_filename not in files and has_file(code):
            raise NoDigest(f"the function {code.co_qualname} of {code.co_filename}, which is the file of no module")
        for module in files.get(code.co_filename, ()):
            found.setdefault(module, set()).update(code.co_names, _words(code))
        variables.update(_variables(code))
    if found.pop("os", None) is not None and not variables:
        raise NoDigest("a function reads variables of the environment whose names are not in it")
    if variables:
        found["os"] = variables
    for module, names in found.items():
        if volatile := names & VOLATILE:
            raise NoDigest(f"{module} reads {', '.join(volatile)}")
        if asked := names & OF_THE_RUN:
            raise NoDigest(f"{module} calls {', '.join(sorted(asked))}")
    return {module: sorted(names) for module, names in sorted(found.items())}


def digest_of(names: Names, of: Digest) -> str:
    """Add to ``of`` what the ``names`` mean in their modules now, and all functions and classes of these modules.

    Raises:
        NoDigest: some of it cannot be described.
    """
    of.looked_up = frozenset(name for looked_up in names.values() for name in looked_up)
    modules = {module: looked_up for module, looked_up in names.items() if module != "os"}
    if (variables := names.get("os")) is not None:
        of.put("environment", [(key, os.environ.get(key)) for key in variables])
        of.outside([each for key, each in vars(os.environ).items() if key != "_data"])
        of.outside(type(os.environ))
        of.code(os.getenv.__code__)
    for module, looked_up in modules.items():
        _names(known_module(module), frozenset(looked_up), of, set())
    for module in (*modules, "torch.nn.functional"):
        of.put("module", module)
        for key, value in sorted(vars(sys.modules[module]).items()):
            function = isinstance(value, types.FunctionType)
            if (function or (isinstance(value, type) and module in names)) and value.__module__ == module:
                of.put(key)
                of.outside(value)
    return of.text


def check_described(traced: Iterable[types.CodeType], described: Set[types.CodeType]) -> None:
    """Raise NoDigest if a traced function is not among those ``described``."""
    for code in traced:
        if code not in described:
            raise NoDigest(f"the function {code.co_qualname} of {code.co_filename}, which is in no module")


def _names(module: types.ModuleType, names: frozenset[str], of: Digest, seen: set[str]) -> None:
    """Add what names mean in a module, and what they mean in the modules that they mean there."""
    seen.add(module.__name__)
    inner: list[types.ModuleType] = []
    package = module.__name__.split(".")
    for name in sorted(names):
        of.put(name)
        if name in vars(module):
            values = [vars(module)[name]]
        elif name in vars(builtins):
            values = [vars(builtins)[name]]
        else:  # imported inside a function, perhaps relative to a package
            known = (sys.modules.get(".".join((*package[:i], name))) for i in range(len(package) + 1))
            values = [each for each in known if each is not None]
        for value in values:
            _check_value(value, f"{module.__name__} uses {name}")
            if value is os.environ or value is os.getenv:
                of.put("environment")
            elif isinstance(value, types.ModuleType):
                of.put("module", value.__name__)
                inner.append(value)
            else:
                of.outside(value)
    for each in inner:
        if each.__name__ not in seen:
            _names(each, names, of, seen)


def _check_value(value: Any, use: str) -> None:
    """Raise NoDigest if what traced code uses gives something else at every run."""
    holder = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if holder in _OTHER_EACH_TIME:
        raise NoDigest(f"{use}, which differs from run to run")
    if getattr(value, "_dynamo_marked_constant", False):
        raise NoDigest(f"{use}, whose result is taken as a constant")
    if (value is os.environ and not use.endswith(" environ")) or (value is os.getenv and not use.endswith(" getenv")):
        raise NoDigest(f"{use}, which reads variables of the environment")


def check_calls(called: Iterable[Any]) -> None:
    """Raise NoDigest if a trace calls a function that it has not read, as with ``torch.compiler.allow_in_graph``.

    Such a function leaves nothing behind in a graph of torch's operators. Those of torch are known by its version.
    """
    for function in called:
        if isinstance(function, (OpOverload, OpOverloadPacket)):
            known = str(function).partition(".")[0] in OPERATORS
        elif isinstance(function, types.FunctionType):
            known = function.__code__.co_filename.startswith(_TORCH)
        elif isinstance(function, type):
            known = _root(function) in _KNOWN
        else:
            known = type(function) in BUILT_IN and _root(function) in _KNOWN
        if not known:
            raise NoDigest(f"a call of {function}, which is not traced through")


def _root(function: Any) -> str:
    """The package of a class, or of a function of C, which may have no module but a class."""
    owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))
    return str(getattr(function, "__module__", None) or owner.__module__).partition(".")[0]


def _variables(code: types.CodeType) -> list[str]:
    """The variables of the environment that code reads.

    Raises:
        NoDigest: their names are not all constants, as in ``os.environ["NAME"]`` or ``os.getenv("NAME")``.
    """
    if code.co_filename == os.getenv.__code__.co_filename:
        return []  # what reads them
    names = []
    following = [each for each in dis.get_instructions(code) if each.opname not in ("PUSH_NULL", "PRECALL", "CACHE")]
    for i, each in enumerate(following):
        if each.argval in _ENVIRONMENT:
            read = following[i + 2] if following[i + 1].argval == "get" else following[i + 1]
            if read.opname != "LOAD_CONST" or not isinstance(read.argval, str):
                raise NoDigest(f"{code.co_qualname} reads variables of the environment whose names are not constants")
            names.append(read.argval)
    if "os" in code.co_names and "getattr" in code.co_names:
        raise NoDigest(f"{code.co_qualname} may read variables of the environment")
    return names


def _words(code: types.CodeType) -> list[str]:
    """The identifiers that code has as text: names of attributes are among them."""
    return [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]


def _files() -> dict[str, list[str]]:
    """The loaded modules by the file of their code."""
    files: dict[str, list[str]] = {}
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            spec = getattr(module, "__spec__", None)
            frozen = spec is not None and spec.origin == "frozen"
            file = f"<frozen {name}>" if frozen else getattr(module, "__file__", None)
            if isinstance(file, str):
                for each in dict.fromkeys((file, os.path.abspath(file), os.path.relpath(file))):
                    files.setdefault(each, []).append(name)
    return files


def state_of_torch(device: torch.device) -> tuple[object, ...]:
    """Switches of torch that tracing reads."""
    switches = torch.backends.cuda
    sdp = switches.flash_sdp_enabled(), switches.mem_efficient_sdp_enabled(), switches.math_sdp_enabled()
    cuda = torch.cuda.is_available() and torch.cuda.get_device_capability()
    flags = torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    modes = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), str(torch.get_default_device())
    return *sdp, switches.cudnn_sdp_enabled(), cuda, device.type, *flags, *modes, torch.backends.mkldnn.enabled
