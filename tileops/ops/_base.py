"""What every op shares: which target serves a call, and, for the in-tree kernels, whether to load, compile or refuse.

The decision itself is ``_resolve.obtain``. Store, driver and compiler are imported when a CUDA tensor first needs them,
so that importing the ops costs nothing over torch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from tileops import targets
from tileops.config import Value
from tileops.errors import TileOpsError
from tileops.ops._checks import FORWARD_ONLY
from tileops.ops._torch import dual_level, recogniser, unknown

if TYPE_CHECKING:
    from tileops.ops._planner import Plan, Planner, Slot
    from tileops.ops._resolve import Preloaded

#: Plans an op keeps; a server meets few signatures, a fuzzer many.
_MAX_PLANS = 4096

Result = Any  # Tensor | tuple[Tensor, ...]


class Op:
    """Base of the operators. Subclasses define ``check``, ``options``, ``empty``, ``plan`` and ``kernels``."""

    #: Arguments of ``forward`` that are written in place.
    mutated: tuple[str, ...] = ()

    #: What targets know the op as, and its name in ``torch.ops.tileops``; a subclass of an op has its op's (_library.py).
    op_name: str
    library_name: str

    #: Names of ``forward``'s tensors.
    arguments: tuple[str, ...]

    #: Names of the tensors beyond the spec, which ``forward`` takes as keywords and ``_run`` gets last; targets get those that are given.
    features: tuple[str, ...] = ()

    def __init__(self, target: str | None = None) -> None:
        if target is not None:
            targets.validate(target)
        self.target = target
        self._forget()
        self._load_known()

    def __init_subclass__(cls) -> None:
        if "forward" in cls.__dict__ and "__call__" not in cls.__dict__:
            cls.__call__ = cls.forward  # type: ignore[method-assign]  # a frame less between: calls are counted in microseconds

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Result:
        raise NotImplementedError

    def _forget(self) -> None:
        self._plans: dict[object, _Known] = {}
        self._last: _Known | None = None
        self._kinds: Callable[..., bool | None] = unknown  # whether a call's tensors are of kinds that were checked

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start without plans: those hold this process's handles."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_plans", "_last", "_kinds")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.options().items())})"

    # --- what a subclass defines -------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """The constructor's values, as keywords of every target's implementation; those beyond the spec where they are not the default."""
        return {}

    @staticmethod
    def empty(*tensors: Any, **options: Any) -> Result:
        """Results of the right shapes and dtypes, their content undefined, for ``options()`` as keywords."""
        raise NotImplementedError

    def library_call(self, *tensors: Any) -> Result:
        """The call as ``torch.ops.tileops.*`` (_library.py makes it)."""
        raise NotImplementedError

    def full(self, *tensors: Tensor | None) -> Sequence[Tensor | None]:
        """The tensors as targets get them: short forms that the spec does not have become the spec's."""
        return tensors

    def check(self, *tensors: Tensor | None, alike: bool = False) -> None:
        """Raises ValueError or TypeError naming the argument that is wrong, what was expected and what came.

        ``alike``: only sizes and strides are other than in a call that passed."""
        raise NotImplementedError

    def check_builtin(self, *tensors: Tensor | None) -> None:
        """Further limits of the in-tree CUDA kernels (supported P, N, Q, dtypes)."""

    def plan(self, p: Planner, *slots: Slot | None) -> Slot | tuple[Slot, ...]:
        """Describes the launches of a call whose tensors have these shapes, strides and alignments."""
        raise NotImplementedError

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        """The kernels this op can ask for: name and the compile-time values that construction already fixes."""
        return []

    # --- running a call ----------------------------------------------------------------------------------------

    def _run(self, *tensors: Tensor | None) -> Result:
        """Runs a call on the target that serves it. Subclasses' ``forward`` pass their tensors in the spec's order, then ``features``."""
        if is_compiling():
            if is_grad_enabled():
                for name, t in zip(self.arguments, tensors):
                    if t is not None and t.requires_grad:
                        raise ValueError(FORWARD_ONLY.format(name=name))
            return self.library_call(*tensors)
        known = self._last
        if known is not None:
            result = known.call(*tensors)
            if result is not None:
                return result
        if isinstance(tensors[0], FakeTensor):  # before its address is asked for: torch warns of that
            self.check(*tensors)
            return self.library_call(*tensors)
        try:
            given = [t for t in tensors if t is not None]
            addresses = [t.data_ptr() for t in given]
            modes = _modes()
            key = (_signature(tensors), modes)
        except (AttributeError, RuntimeError):  # no tensor, or one without memory (sparse, of vmap): check() has the words for it
            self.check(*tensors)
            raise
        known = self._plans.get(key)
        if known is not None:
            if 0 in addresses:
                self._check_memory(tensors, targets.BUILTIN)
            known.learn(tensors, modes)
        else:
            alike = self._kinds(*tensors) is not None
            self.check(*tensors, alike=alike)
            device = given[0].device
            if device.type == "meta":  # shapes and dtypes are all that is asked for
                return self.library_call(*tensors)
            name = targets.choose(self.target, device.type, self.op_name)
            if 0 in addresses:
                self._check_memory(tensors, name)
            if name != targets.BUILTIN:
                return self._run_on(name, self.full(*tensors))
            self.check_builtin(*tensors)
            with nullcontext() if torch._C._cuda_getDevice() == device.index else torch.cuda.device(device):
                known = _Known(self._make_plan(tensors, device))
            if not alike:
                self._kinds = recogniser(tensors, _modes, modes, exact=False, then="return True")
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = known
        self._last = known
        return known.plan.run(given, addresses)

    def _run_on(self, name: str, tensors: Sequence[Tensor | None]) -> Result:
        options, required = self.options(), len(tensors) - len(self.features)
        given = {word: tensor for word, tensor in zip(self.features, tensors[required:]) if tensor is not None}
        function = targets.implementation(name, self.op_name, (*given, *options) if self.features else ())
        return function(*tensors[:required], **given, **options)

    def _check_memory(self, tensors: Sequence[Tensor | None], target: str) -> None:
        """Raises ValueError for a tensor whose elements are not at an address: a kernel would read address 0, and end the process' CUDA.

        Other targets may know what to do with one, but not where its storage was freed: torch's functions end the process there."""
        for name, t in zip(inspect.signature(self.forward).parameters, tensors):
            if t is not None and t.numel() and not t.data_ptr() and (target == targets.BUILTIN or not t.untyped_storage().nbytes()):
                raise ValueError(
                    f"{name}: expected a tensor with memory that kernels can read, got a {type(t).__name__} without; pass a plain one."
                )

    def _make_plan(self, tensors: Sequence[Tensor | None], device: torch.device) -> Plan:
        from tileops.ops._planner import Plan, Planner  # here: it brings the driver, which a CPU user does not need

        planner = Planner(tensors, device)
        return Plan(planner, self.plan(planner, *planner.slots))

    # --- kernels ahead of the first call -----------------------------------------------------------------------

    def _load_known(self) -> None:
        """Where CUDA is up, loads for the current device what the roots hold for this op.

        Where it is not, nothing can be chosen: which artifacts match depends on the GPU, and asking for it would
        initialise CUDA, after which a process cannot fork. The first call, or ``preload``, then does it.
        """
        if self.target in (None, targets.BUILTIN) and torch.cuda.is_initialized():
            try:
                self.preload()
            except TileOpsError as error:  # the call that needs a kernel raises it, if one ever does
                logging.getLogger("tileops").debug("%s loads nothing at construction: %s", self.op_name, error)

    def preload(self, *, device: int | str | torch.device | None = None, **values: Value) -> Preloaded:
        """Loads every packaged or cached kernel that this op can ask for on ``device`` (default: the current one).

        Args:
            device: a CUDA device.
            values: narrow it down: ``dtype="bfloat16", d_head=64, d_state=128`` or kernels' own field names.

        Returns:
            What was loaded: count, bytes of cubins, milliseconds, device.

        Raises:
            ValueError: a keyword that is no compile-time value.
            MissingKernelError: ``values`` name one model (dtype, d_head and d_state) and a kernel of it is in no root.
            DriverError: torch sees no GPU. IncompatibleArtifactError: no arch of this package runs on it.
        """
        from tileops.ops import _resolve

        return _resolve.preload_ops([self], device=device, **values)


def _modes() -> tuple[object, ...]:
    """What a call's plan depends on besides its tensors."""
    return is_grad_enabled(), is_inference_mode_enabled(), targets.default(), dual_level()


class _Known:
    """A plan, and from its second call on ``call``, which recognises a call of it in less time than making the call's key takes, and
    then runs it; of others it returns None."""

    __slots__ = ("_learnt", "call", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.call: Callable[..., Result | None] = unknown
        self._learnt = False

    def learn(self, tensors: Sequence[Tensor | None], modes: object) -> None:
        """Makes ready to recognise calls with the key of this one, in whose ``_modes()`` it was made."""
        if not self._learnt:
            self._learnt = True
            then, names = self.plan.written()
            self.call = recogniser(tensors, _modes, modes, exact=True, then=then, names=names)


def _signature(tensors: Sequence[Tensor | None]) -> tuple[object, ...]:
    """Everything of a call that its plan depends on, and what ``_Known`` tells apart; equal signatures share a plan."""
    return tuple(
        [
            # get_device: the ordinal, which hashes faster than a torch.device; only calls on CUDA have plans.
            None
            if t is None
            else (t.shape, t.stride(), t.dtype, t.get_device(), t.requires_grad, t.is_neg(), t.data_ptr() & 15, type(t), t.is_inference())
            for t in tensors
        ]
    )
