"""FairScale's way to say which modules to wrap, and how, while a model is built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import nn

from shardgraph.arguments import BOOL, CALLABLE, NOT_NEGATIVE, Kind, checked, instance, whole
from shardgraph.errors import ShardGraphError

_MODULE = instance("an nn.Module", nn.Module)
_CLASSES = Kind(
    "classes of modules, in a list, tuple or set",
    lambda value: isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(each, type) for each in value),
)


class _Context(NamedTuple):
    """What :func:`enable_wrap` was given."""

    wrapper_cls: Callable[..., nn.Module]
    policy: Callable[..., bool] | None
    options: dict[str, Any]


_CONTEXT: ContextVar[_Context | None] = ContextVar("enable_wrap", default=None)


@checked(auto_wrap_policy=CALLABLE)
@contextmanager
def enable_wrap(auto_wrap_policy: Callable[..., bool] | None = None, **wrapper_kwargs: Any) -> Iterator[None]:
    """``fairscale.nn.enable_wrap``: inside, :func:`wrap` and :func:`auto_wrap` wrap.

    ::

        with enable_wrap(wrapper_cls=FSDP, mixed_precision=True):
            self.first = wrap(nn.Linear(5, 5))

    Args:
        auto_wrap_policy: the policy of :func:`auto_wrap`; default: :func:`default_auto_wrap_policy`.
        wrapper_kwargs: the class ``wrapper_cls``, and its options.
    """
    options = dict(wrapper_kwargs)
    if "wrapper_cls" not in options:
        raise ShardGraphError("enable_wrap needs the class to wrap modules in: give it wrapper_cls=FSDP")
    token = _CONTEXT.set(_Context(options.pop("wrapper_cls"), auto_wrap_policy, options))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


@checked(module=_MODULE)
def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` in the wrapper of :func:`enable_wrap`; outside of that, ``module`` itself.

    ``wrap_overrides`` take precedence over the options of :func:`enable_wrap`.
    """
    context = _CONTEXT.get()
    return module if context is None else context.wrapper_cls(module, **{**context.options, **wrap_overrides})


@checked(module=_MODULE, auto_wrap_policy=CALLABLE)
def auto_wrap(module: nn.Module, auto_wrap_policy: Callable[..., bool] | None = None, **kwargs: Any) -> nn.Module:
    """``module`` with the modules inside, and itself, wrapped as a policy says; outside of :func:`enable_wrap`, as it
    is.

    Args:
        module: its modules are replaced in place.
        auto_wrap_policy: default: that of :func:`enable_wrap`, and without one :func:`default_auto_wrap_policy`.
        kwargs: options of the policy, such as ``min_num_params``, or else of the wrapper.
    """
    context = _CONTEXT.get()
    if context is None:
        return module
    policy = auto_wrap_policy or context.policy or default_auto_wrap_policy
    for each in module.modules():
        if isinstance(context.wrapper_cls, type) and isinstance(each, context.wrapper_cls):
            raise ShardGraphError(
                f"a module inside is wrapped in {context.wrapper_cls.__name__} already: use wrap for each module, or "
                "auto_wrap for the whole"
            )
    wrapped, _ = _wrapped(module, policy, kwargs, is_root=True)
    return wrapped


@checked(
    module=_MODULE,
    recurse=BOOL,
    unwrapped_params=whole(0),
    module_is_root=BOOL,
    min_num_params=NOT_NEGATIVE,
    force_leaf_modules=_CLASSES,
    exclude_wrap_modules=_CLASSES,
    skip_params_check_for_root=BOOL,
)
def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool = False,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Whether to look inside ``module`` (``recurse``), or to wrap it: if enough parameters are not in a wrapper yet.

    Args:
        module: the module in question.
        recurse: which of the two questions it is.
        unwrapped_params: elements of its parameters that are in no wrapper yet.
        module_is_root: whether :func:`auto_wrap` was called with it.
        min_num_params: enough.
        force_leaf_modules: classes not to look inside; default: ``nn.MultiheadAttention``.
        exclude_wrap_modules: classes not to wrap; default: ``nn.ModuleList`` and ``nn.ModuleDict``.
        skip_params_check_for_root: wrap the root however few there are.
    """
    leaves = tuple(force_leaf_modules if force_leaf_modules is not None else [nn.MultiheadAttention])
    excluded = tuple(exclude_wrap_modules if exclude_wrap_modules is not None else [nn.ModuleList, nn.ModuleDict])
    enough = unwrapped_params >= min_num_params
    if recurse:
        return enough and not isinstance(module, leaves)
    return (enough or (module_is_root and skip_params_check_for_root)) and not isinstance(module, excluded)


def _wrapped(
    module: nn.Module, policy: Callable[..., bool], kwargs: dict[str, Any], is_root: bool = False
) -> tuple[nn.Module, int]:
    """``module`` as the policy has it, and how many elements of its parameters are in wrappers."""
    total = sum(parameter.numel() for parameter in module.parameters())
    known = {name: value for name, value in kwargs.items() if name in _OPTIONS_OF_POLICY}
    options = {name: value for name, value in kwargs.items() if name not in known}
    done = 0

    def asked(recurse: bool) -> bool:
        return policy(module=module, recurse=recurse, unwrapped_params=total - done, module_is_root=is_root, **known)

    if asked(recurse=True):
        for name, child in module.named_children():
            wrapped, inside = _wrapped(child, policy, kwargs)
            setattr(module, name, wrapped)
            done += inside
    if asked(recurse=False):
        return wrap(module, **options), total
    return module, done


_OPTIONS_OF_POLICY = ("min_num_params", "force_leaf_modules", "exclude_wrap_modules", "skip_params_check_for_root")
