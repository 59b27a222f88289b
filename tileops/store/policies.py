"""Where a kernel may come from: ``auto`` (everywhere, and the compiler), ``cached`` (never the compiler), ``packaged``
(neither compiler nor user cache).

From strongest to weakest: the argument of one look-up, ``with policy(...)``, the process default set by calling
``policy(...)``, TILEOPS_POLICY. After ``freeze()`` none of them can bring the compiler back.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

from tileops import env
from tileops.errors import SettingError

_context: ContextVar[str | None] = ContextVar("tileops_policy", default=None)
_default: str | None = None
_frozen = False


class policy:  # lower case: used as a function, policy("cached")
    """Sets where kernels may come from: ``auto``, ``cached`` or ``packaged``.

    Called, it sets the default of the process. In a ``with`` statement it holds for the block, in this thread (and tasks
    started in it) only, and the process default is what it was; other threads can see the value between the call and the
    block, so a server that must never compile calls ``freeze()``.

    Raises:
        SettingError: not a policy, or ``auto`` after ``freeze()``.
    """

    def __init__(self, name: str) -> None:
        global _default
        check(name)
        self.name = name
        self._tokens: list[Token[str | None]] = []
        self._undo: tuple[str | None] | None = (_default,)
        _default = name

    def __enter__(self) -> policy:
        global _default
        if self._undo is not None:
            (_default,), self._undo = self._undo, None
        self._tokens.append(_context.set(self.name))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _context.reset(self._tokens.pop())


def freeze() -> None:
    """From now on nothing is compiled in this process, whatever anyone sets: the policy is at least ``cached``.

    There is no way back: a server calls it once, after warming.
    """
    global _frozen
    _frozen = True


def frozen() -> bool:
    """Whether freeze() was called in this process (or in the one it was forked from)."""
    return _frozen


def current(argument: str | None = None) -> str:
    """The policy of a look-up made now, here. Raises SettingError as ``policy`` does."""
    if argument is not None:
        return check(argument)
    name = _context.get() or _default or env.policy()
    return "cached" if _frozen and name == "auto" else name


def check(name: str) -> str:
    """``name``, if it is a policy that may be asked for now; else SettingError."""
    if name not in env.POLICIES:
        raise SettingError(
            f"policy is {name!r}; expected one of {', '.join(env.POLICIES)}.", name="policy", value=name, expected=env.POLICIES
        )
    if _frozen and name == "auto":
        raise SettingError(
            "policy 'auto' was asked for after tileops.freeze(), which is final; use 'cached' or 'packaged'.",
            name="policy",
            value=name,
            expected=env.POLICIES[1:],
        )
    return name
