"""Calls from one process of a run to another, by methods that mypy checks. Nothing else turns a role's method into a name."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Reply(Generic[T]):
    """A call that has begun. Cluster.get waits for its reference and returns the result, of type T."""

    reference: Any


@overload
def begin(
    actor: Any, method: Callable[Concatenate[R, P], Coroutine[Any, Any, T]], *args: P.args, **options: P.kwargs
) -> Reply[T]: ...
@overload
def begin(actor: Any, method: Callable[Concatenate[R, P], T], *args: P.args, **options: P.kwargs) -> Reply[T]: ...
def begin(actor: Any, method: Callable[..., Any], *args: Any, **options: Any) -> Reply[Any]:
    """Begin to call a method of the object that an actor holds. actor: handle of an actor that passes `call` on to it."""
    return Reply(actor.call.remote(method.__name__, *args, **options))
