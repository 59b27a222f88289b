"""The TileLang programs: one kernel a file, each with ``program(**fields)``. Imported by tileops.compiler only."""
