"""Artifacts by key: bytes in, bytes out. No torch, no CUDA, no compiler; importing it writes nothing.

====================  ==========================================================================  ==============
looking up            ``find``, ``find_or_build``, ``matching``, ``Lookup``, ``missing_error``     lookup.py
where                 ``roots``, ``Root``, ``Fault``, ``location``                                 discovery.py, places.py
may it be compiled    ``policy``, ``freeze``, ``frozen``, ``current_policy``                       policies.py
user cache            ``publish``, ``compile_lock``                                                publishing.py, locks.py
size                  ``prune``                                                                    pruning.py
packaged roots        ``PackagedWriter``, ``write_packaged``, ``read_digests``                     writing.py
bundles               ``export_bundle``, ``import_bundle``                                         bundles.py
what happened         ``stats``, ``reset_stats``, ``logger``, ``StoreWarning``                     notes.py
====================  ==========================================================================  ==============
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tileops.store.cache import compiler_of
from tileops.store.discovery import roots
from tileops.store.locks import compile_lock
from tileops.store.lookup import Lookup, Step, differing, find, find_or_build, fix_command, matching, missing_error, trace_lines
from tileops.store.notes import StoreWarning, logger, reset_stats, stats
from tileops.store.places import Location, location
from tileops.store.policies import current as current_policy
from tileops.store.policies import freeze, frozen, policy
from tileops.store.publishing import Published, publish
from tileops.store.roots import Fault, Miss, Root

if TYPE_CHECKING:
    from tileops.store.bundles import Exported, Imported, export_bundle, import_bundle
    from tileops.store.pruning import Pruned, prune
    from tileops.store.writing import PackagedWriter, Written, read_digests, write_packaged

__all__ = [
    "Exported",
    "Fault",
    "Imported",
    "Location",
    "Lookup",
    "Miss",
    "PackagedWriter",
    "Pruned",
    "Published",
    "Root",
    "Step",
    "StoreWarning",
    "Written",
    "compile_lock",
    "compiler_of",
    "current_policy",
    "differing",
    "export_bundle",
    "find",
    "find_or_build",
    "fix_command",
    "freeze",
    "frozen",
    "import_bundle",
    "location",
    "logger",
    "matching",
    "missing_error",
    "policy",
    "prune",
    "publish",
    "read_digests",
    "reset_stats",
    "roots",
    "stats",
    "trace_lines",
    "write_packaged",
]

#: Names that no look-up needs: their modules are imported at first use.
_LAZY = {
    **dict.fromkeys(("Exported", "Imported", "export_bundle", "import_bundle"), "bundles"),
    **dict.fromkeys(("Pruned", "prune"), "pruning"),
    **dict.fromkeys(("PackagedWriter", "Written", "read_digests", "write_packaged"), "writing"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
